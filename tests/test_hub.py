"""Data sets: a hub in a thread, whose files are downloaded for real; folders; broken data."""

import hashlib
import http.server
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import datasets
import numpy
import PIL.Image
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch

from utils import hub
from utils.errors import UsageError

NAME = "some-owner/Tiny_Images"
CARD = """---
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train-*
  - split: test
    path: plain/test-*
---
"""
TOKEN = "hf_abcdefghijklmnop"
OPEN = """
import sys
from utils import hub

try:
    splits = hub.open_dataset(sys.argv[1])
    print({name: split.num_rows for name, split in splits.items()})
    print(hub.decode_images(splits["train"], "img").sum().item())
    print(hub.decode_labels(splits["train"], "label")[1])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def png(seed: int, size: tuple[int, int] = (8, 8), mode: str = "RGB", kind: str = "PNG") -> bytes:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), numpy.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def make_split(files: list[bytes | None], labels: list[int] | None = None) -> datasets.Dataset:
    features = datasets.Features(
        img=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog", "frog"])
    )
    rows = [None if file is None else {"bytes": file, "path": None} for file in files]
    labels = [index % 3 for index in range(len(rows))] if labels is None else labels
    return datasets.Dataset.from_dict(
        {"img": rows, "label": labels}, features=features, split=datasets.Split("train")
    )


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    make_split([png(seed) for seed in range(7)]).to_parquet(folder / "train-00000-of-00001.parquet")
    make_split([png(9)] * 5).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


class FakeHub(http.server.ThreadingHTTPServer):
    """What `datasets.load_dataset` asks of a hub, for one data set of a few files."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        make_folder(folder / "plain")
        (folder / "README.md").write_text(CARD)
        self.files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.commit = "0123456789" * 4
        self.refusals = {}
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()


class FakeHubHandler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, path: str) -> dict:
        content = self.server.files[path]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": oid}

    def tree(self, folder: str) -> list[dict]:
        start = f"{folder}/" if folder else ""
        names = [file.removeprefix(start) for file in self.server.files if file.startswith(start)]
        folders = {name.split("/")[0] for name in names if "/" in name}
        entries = [{"type": "directory", "path": start + name, "oid": "0" * 40} for name in folders]
        return entries + [self.entry(start + name) for name in names if "/" not in name]

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path  # through a proxy self.path is the whole address
        self.server.requests.append(f"{self.command} {path}")
        commit, files = self.server.commit, self.server.files
        api, resolve = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        for start, (status, code) in self.server.refusals.items():
            if path.startswith(start):
                return self.answer(status, X_Error_Code=code, X_Error_Message="It is not for you")
        if path.startswith(resolve):
            path = path.removeprefix(resolve).split("/", 1)[1]
            if path not in files:
                return self.answer(404, X_Error_Code="EntryNotFound")
            etag = f'"{self.entry(path)["oid"]}"'
            return self.answer(200, files[path], ETag=etag, X_Repo_Commit=commit)
        if path.startswith(f"{api}/tree/{commit}"):
            folder = path.removeprefix(f"{api}/tree/{commit}").strip("/")
            return self.answer(200, json.dumps(self.tree(folder)).encode())
        if path == api or path.startswith(f"{api}/revision/"):
            facts = {"id": NAME, "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            return self.answer(200, json.dumps(facts).encode())
        return self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty Hugging Face home, for this process and its children; no proxy, no offline mode."""
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy") or "OFFLINE" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return tmp_path / "home"


@pytest.fixture
def fake_hub(home, tmp_path, monkeypatch):
    server = FakeHub(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.stop()


@pytest.fixture
def silent_hub(home, monkeypatch):
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def start_script(name: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, name],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def prepared_files(home: Path) -> list[Path]:
    return sorted(home.glob("datasets/*/*/*/*/*.arrow"))


def check(splits) -> None:
    assert {name: split.num_rows for name, split in splits.items()} == {"train": 7, "test": 5}
    images = hub.decode_images(splits["train"], "img")
    assert torch.equal(images[6], pil(png(6)))
    labels, names = hub.decode_labels(splits["train"], "label")
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0] and names == ["cat", "dog", "frog"]


def pil(file: bytes) -> torch.Tensor:
    image = PIL.Image.open(io.BytesIO(file)).convert("RGB")
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


@pytest.mark.slow
def test_a_new_process_downloads_and_the_next_one_reads_the_cache(fake_hub):
    outputs = []
    for _ in range(2):
        output, errors = start_script(NAME).communicate(timeout=60)
        outputs.append(output.splitlines())
        assert TOKEN not in output + errors
        if len(outputs) == 1:
            assert f"downloading {NAME} from {fake_hub.url}" in errors and "Generating" in errors
            assert sum(".parquet" in request for request in fake_hub.requests) == 4
            fake_hub.stop()
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == "{'train': 7, 'test': 5}"
    assert outputs[0][1] == str(sum(pil(png(seed)).sum().item() for seed in range(7)))


def test_this_process_keeps_its_environment_and_works_without_the_hub_after(fake_hub, monkeypatch):
    environment = dict(os.environ)
    check(hub.open_dataset(NAME))
    assert dict(os.environ) == environment and not datasets.config.HF_HUB_OFFLINE
    fake_hub.stop()
    check(hub.open_dataset(NAME))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check(hub.open_dataset(NAME))


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        "raw",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("short", "missing", "no facts")),
    ],
)
def test_a_damaged_cache_is_downloaded_again(fake_hub, home, damage, capfd):
    check(hub.open_dataset(NAME))
    fake_hub.requests.clear()
    file = next(path for path in prepared_files(home) if "train" in path.name)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "short":
        table = datasets.Dataset.from_file(str(file), in_memory=True).data.table.slice(0, 3)
        with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table)
    elif damage == "missing":
        file.unlink()
    else:
        (file.parent / "dataset_info.json").write_text("")
    if damage == "raw":
        for path in home.glob("hub/*/blobs/*"):
            if path.read_bytes().startswith(b"PAR1"):
                path.write_bytes(path.read_bytes()[:100])
    check(hub.open_dataset(NAME))
    assert fake_hub.requests
    assert f"warning: not used: {file.parent}" in capfd.readouterr().err
    file.unlink()
    fake_hub.stop()
    with pytest.raises(hub.HubUnreachable, match="not in the cache"):
        hub.open_dataset(NAME)


def test_an_interrupted_preparation_is_no_copy(fake_hub, home):
    check(hub.open_dataset(NAME))
    folder = prepared_files(home)[0].parent
    old = folder.with_name("fedcba.incomplete")
    folder.rename(old)
    (old / "dataset_info.json").unlink()
    check(hub.open_dataset(NAME))
    fake_hub.stop()
    check(hub.open_dataset(NAME))


@pytest.mark.slow
def test_of_several_configurations_the_hub_tells_the_default(fake_hub, home):
    check(hub.open_dataset(NAME))
    plain = prepared_files(home)[0].parents[2]
    other = plain.with_name("other")
    shutil.copytree(plain, other)
    for path in other.rglob("dataset_info.json"):
        path.write_text(path.read_text().replace('"plain"', '"other"'))
    fake_hub.requests.clear()
    check(hub.open_dataset(NAME))
    assert fake_hub.requests
    fake_hub.stop()
    with pytest.raises(hub.HubUnreachable):
        hub.open_dataset(NAME)


@pytest.mark.parametrize(
    "start, status, code, message",
    [
        ("/api/datasets/", 404, "RepoNotFound", "no data set of that name.*hf auth login"),
        ("/api/datasets/", 401, "RepoNotFound", "no data set of that name.*hf auth login"),
        ("/api/datasets/", 403, "GatedRepo", "gated.*hf auth login"),
        (f"/datasets/{NAME}/resolve", 401, "GatedRepo", "gated.*hf auth login"),
        (f"/datasets/{NAME}/resolve", 403, "GatedRepo", "gated.*hf auth login"),
    ],
)
def test_a_hub_that_refuses_is_wrong_usage(fake_hub, start, status, code, message, capfd):
    fake_hub.refusals[start] = (status, code)
    with pytest.raises(UsageError, match=f"--dataset {NAME}: .*{message}") as caught:
        hub.open_dataset(NAME)
    assert TOKEN not in str(caught.value) + capfd.readouterr().err
    assert "\n" not in str(caught.value)


def test_code_from_the_hub_is_not_run(fake_hub, tmp_path):
    script = f"open({str(tmp_path / 'was_run')!r}, 'w')"
    fake_hub.files["Tiny_Images.py"] = script.encode()
    with pytest.raises(UsageError, match="cannot be read: .*scripts are no longer supported"):
        hub.open_dataset(NAME)
    assert not (tmp_path / "was_run").exists()


def test_a_repository_without_data_is_wrong_usage(fake_hub):
    fake_hub.files = {"README.md": b"# nothing here"}
    with pytest.raises(UsageError, match=f"--dataset {NAME}: .*cannot be read"):
        hub.open_dataset(NAME)


def test_a_hub_that_breaks_down_or_vanishes_is_unreachable(fake_hub, monkeypatch):
    fake_hub.refusals["/"] = (503, "")
    with pytest.raises(hub.HubUnreachable, match=f"{fake_hub.url} tried for .* s: .*503"):
        hub.open_dataset(NAME)
    fake_hub.stop()
    address = fake_hub.url.replace("//", "//me:secret@")
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(hub.HubUnreachable, match="refused") as caught:
        hub.open_dataset(NAME)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_silent_hub_is_known_within_20_seconds(silent_hub):
    start_time = time.monotonic()
    output, _ = start_script(NAME).communicate(timeout=60)
    assert time.monotonic() - start_time < 20
    assert output.startswith(f"HubUnreachable: {NAME} is not in the cache; http://127.0.0.1:")
    assert hub.REACH_SECONDS <= 15


def test_a_probe_that_ignores_its_timeout_is_killed(silent_hub, monkeypatch):
    monkeypatch.setattr(hub, "REACH_SECONDS", 0.5)
    with pytest.raises(hub.HubUnreachable, match="tried for . s: no answer"):
        hub.open_dataset(NAME)


def test_the_download_ends_with_the_process_that_wanted_it(silent_hub):
    script = start_script(NAME)
    silent_hub.settimeout(60)
    connection, _ = silent_hub.accept()
    script.kill()
    script.communicate(timeout=8)  # until its child, which has the same stderr, has ended too
    connection.close()


def test_an_endpoint_that_does_not_resolve(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(hub.HubUnreachable, match="http://no-such-host.invalid tried for"):
        hub.open_dataset(NAME)


def test_a_proxy_is_used(fake_hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    monkeypatch.setenv("http_proxy", fake_hub.url)
    check(hub.open_dataset(NAME))


def test_no_secret_in_messages(fake_hub, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\u20ac")  # not a header that can be sent
    with pytest.raises(hub.HubUnreachable) as caught:
        hub.open_dataset(NAME)
    assert TOKEN not in str(caught.value) + capfd.readouterr().err
    assert hub._public(f"http://me:secret@x/y: {TOKEN}, it is") == "http://***@x/y: ***, it is"


@pytest.mark.parametrize("value", ["1", "true"])
def test_offline_mode_does_not_try(fake_hub, monkeypatch, value):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(hub.HubUnreachable, match="not tried: HF_HUB_OFFLINE"):
        hub.open_dataset(NAME)
    assert fake_hub.requests == []


def test_the_hint_is_a_command_that_exists():
    assert "hf download uoft-cs/cifar10 --repo-type dataset --local-dir cifar10" in hub.cache_hint(
        "uoft-cs/cifar10"
    )
    command = [str(Path(sys.executable).with_name("hf")), "download", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--repo-type" in text and "--local-dir" in text


def test_folders(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check(hub.open_dataset(str(make_folder(tmp_path / "parquet"))))  # also a format's name
    monkeypatch.chdir(tmp_path)
    check(hub.open_dataset("parquet"))
    copied = tmp_path / "copied"  # as `hf download --local-dir` leaves it
    make_folder(copied / "plain")
    (copied / "README.md").write_text(CARD)
    (copied / ".cache" / "huggingface").mkdir(parents=True)
    (copied / ".cache" / "huggingface" / ".gitignore").write_text("*")
    check(hub.open_dataset("./copied"))
    datasets.DatasetDict(train=make_split([png(1)])).save_to_disk("saved")
    assert hub.open_dataset("saved")["train"].num_rows == 1
    (tmp_path / "photos" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "train" / "cat" / "1.png").write_bytes(png(3))
    photos = hub.open_dataset("photos")["train"]
    assert torch.equal(hub.decode_images(photos, "image")[0], pil(png(3)))


@pytest.mark.parametrize(
    "value", ["./none", "../none", "~/none-of-that", "/none/x", "a/b/c", "none", "a/", "", "a b/c"]
)
def test_a_missing_folder_is_wrong_usage_without_asking_the_hub(fake_hub, value):
    with pytest.raises(
        UsageError, match=f"--dataset {value or chr(39) * 2}: no such file or folder"
    ):
        hub.open_dataset(value)
    assert fake_hub.requests == []


def test_folders_without_good_data(fake_hub, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    broken = make_folder(tmp_path / "broken")
    file = broken / "train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:300])
    for folder in ("empty", "broken"):
        with pytest.raises(UsageError, match=f"--dataset .*/{folder}: .*parquet") as caught:
            hub.open_dataset(str(tmp_path / folder))
        assert "\n" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    for value in (str(file), f"broken/{file.name}"):
        with pytest.raises(UsageError, match="--dataset .*parquet: no such file or folder"):
            hub.open_dataset(value)


@pytest.mark.parametrize(
    "kind, modes",
    [
        ("PNG", ["RGB", "L", "LA", "P", "RGBA", "1"]),
        ("JPEG", ["RGB", "L", "CMYK", "YCbCr"]),
        ("WEBP", ["RGB", "RGBA", "L"]),
        ("GIF", ["P", "L"]),
        ("TIFF", ["RGB", "L", "RGBA", "CMYK"]),
    ],
)
def test_every_kind_of_image_is_what_pil_makes_of_it(kind, modes):
    files = [png(seed, (9, 6), mode, kind) for seed, mode in enumerate(modes)]
    images = hub.decode_images(make_split(files), "img")
    assert images.shape == (len(modes), 3, 6, 9) and images.dtype == torch.uint8
    assert torch.equal(images, torch.stack([pil(file) for file in files]))


def test_images_of_selected_rows_and_of_a_plain_binary_column():
    split = make_split([png(seed) for seed in range(600)])
    chosen = split.select([599, 3, 3, 300])
    expected = torch.stack([pil(png(seed)) for seed in (599, 3, 3, 300)])
    assert torch.equal(hub.decode_images(chosen, "img"), expected)
    assert hub.decode_labels(chosen, "label")[0].tolist() == [2, 0, 0, 0]
    binary = datasets.Dataset.from_dict({"x": [png(599), png(3), png(3), png(300)]})
    assert torch.equal(hub.decode_images(binary, "x"), expected)


def test_images_of_different_size_are_refused():
    files = [png(seed) for seed in range(700)]
    files[300], files[650] = png(1, (9, 6)), png(1, (5, 5))
    with pytest.raises(UsageError, match="image 0 is 8x8, image 300 is 9x6; train/image_folder.py"):
        hub.decode_images(make_split(files), "img")


def test_images_that_cannot_be_decoded():
    deep = io.BytesIO()
    PIL.Image.fromarray(numpy.full((8, 8), 4000, numpy.uint16)).save(deep, "PNG")
    jpeg = png(2, (8, 8), "RGB", "JPEG")
    for bad in (b"text", b"", None, png(2)[:60], jpeg[:-20], deep.getvalue()):
        with pytest.raises(UsageError, match="split train, column img: image 2 is unreadable"):
            hub.decode_images(make_split([png(0), png(1), bad, png(3)]), "img")
    with pytest.raises(UsageError, match="mode I;16"):
        hub.decode_images(make_split([deep.getvalue()]), "img")
    with pytest.raises(UsageError, match="no rows"):
        hub.decode_images(make_split([png(0)]).select([]), "img")


@pytest.mark.parametrize("wrong", [-1, 3, None])
def test_labels_outside_the_classes(wrong, tmp_path):
    path = tmp_path / "x.parquet"
    table = make_split([png(0)] * 3, [0, 1, 2]).data.table
    column = pyarrow.array([0, wrong, 2], pyarrow.int64())
    pyarrow.parquet.write_table(table.set_column(1, table.schema.field(1), column), path)
    split = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert isinstance(split.features["label"], datasets.ClassLabel)
    message = (
        f"--dataset: split train, column label: label 1 is {wrong}, must be a number from 0 to 2"
    )
    with pytest.raises(UsageError, match=message):
        hub.decode_labels(split, "label")


def test_labels_without_class_names():
    labels, names = hub.decode_labels(datasets.Dataset.from_dict({"y": [5, 0, 7]}), "y")
    assert labels.tolist() == [5, 0, 7] and labels.dtype == torch.int64 and names is None
    for wrong in ([1, -1], [1, "cat"], [1.0, 0.5], [[1], [2]]):
        wrong = [str(value) for value in wrong] if "cat" in wrong else wrong
        with pytest.raises(UsageError, match="must be a number from 0"):
            hub.decode_labels(datasets.Dataset.from_dict({"y": wrong}), "y")


def test_find_column():
    split = make_split([png(0)])
    assert hub.find_column(split, ["image", "img"], "images") == "img"
    with pytest.raises(UsageError, match="no column with images: .*image, pixels.*img, label"):
        hub.find_column(split, ["image", "pixels"], "images")


def test_cifar10(real_data, home):
    splits = hub.open_dataset(str(real_data / "cifar10"))
    for name, rows in (("train", 50_000), ("test", 10_000)):
        images = hub.decode_images(splits[name], hub.find_column(splits[name], ["img"], "images"))
        labels, names = hub.decode_labels(splits[name], "label")
        assert images.shape == (rows, 3, 32, 32)
        assert labels.bincount().tolist() == [rows // 10] * 10 and names and names[3] == "cat"
        for index in range(0, rows, 97):
            image = splits[name][index]["img"].convert("RGB")
            assert torch.equal(images[index], torch.tensor(numpy.array(image)).permute(2, 0, 1))
