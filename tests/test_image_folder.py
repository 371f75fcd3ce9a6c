"""train/image_folder.py on folders of small made-up photographs, and what it finds in folders."""

import importlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tests.scripts import NarrowResNet18, read_run, relative_difference, run_cifar
from train import image_folder
from utils.augment import IMAGENET_MEAN, IMAGENET_STD
from utils.errors import UsageError
from utils.image_loading import ImageDataset
from utils.image_sets import UNLABELLED, natural_key, open_image_sets
from utils.images import decode_rgb
from utils.order import SampleIndex
from utils.small_images import ImageData, Split

CLASSES = ("1", "2", "10")
COLOURS = {"1": (200, 60, 60), "2": (60, 200, 60), "10": (60, 60, 200)}
BROKEN = {"train/2/torn.jpg": "truncated", "train/10/text.png": "no image", "val/1/torn.jpg": ""}


def photograph(colour: tuple[int, ...], seed: int) -> Image.Image:
    """Of one colour with noise, and of a size of its own."""
    numbers = np.random.default_rng(seed)
    height, width = numbers.integers(18, 40, 2)
    noise = numbers.integers(-50, 50, (height, width, 3))
    return Image.fromarray((noise + np.array(colour)).clip(0, 255).astype(np.uint8))


def make_folder(root: Path, train: int = 14, val: int = 5, broken: bool = False) -> Path:
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in reversed(range(count)):  # not as they will be sorted
                seed = 1000 * label + i + (500 if part == "val" else 0)
                photograph(COLOURS[name], seed).save(folder / f"{i}.png")
    if broken:
        photograph(COLOURS["1"], 0).save(root / "whole.jpg", quality=95)
        half = (root / "whole.jpg").read_bytes()[:900]
        (root / "whole.jpg").unlink()
        for name in BROKEN:
            (root / name).write_bytes(b"these are no pixels" if "text" in name else half)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def broken_photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("broken"), broken=True)


# ---- What is found ----------------------------------------------------------------------------


def names_of(split) -> list[str]:
    return [split.images.name(i) for i in range(len(split))]


def test_classes_in_natural_order_and_one_of_each_in_turn(photos):
    data = open_image_sets(str(photos), 0)
    assert data.classes == ["1", "2", "10"]
    assert sorted(["10", "b2", "2", "b10", "1"], key=natural_key) == ["1", "2", "10", "b2", "b10"]
    assert names_of(data.train)[:5] == [
        "train/1/0.png", "train/2/0.png", "train/10/0.png", "train/1/1.png", "train/2/1.png"
    ]  # fmt: skip
    assert data.train.labels[:5].tolist() == [0, 1, 2, 0, 1]
    assert len(data.train) == 42 and len(data.test) == 15
    subset = open_image_sets(str(photos), 4)
    assert names_of(subset.train) == names_of(data.train)[:4] and len(subset.test) == 4
    assert subset.classes == data.classes


def test_a_part_without_a_class_keeps_the_numbers(photos, tmp_path, capsys):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "val" / "2")
    data = open_image_sets(str(tmp_path), 0)
    assert data.classes == ["1", "2", "10"]
    assert set(data.test.labels.tolist()) == {0, 2}
    assert "val has no image of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "val" / "2").rename(f / "val" / "two"), "val has two, no class of train"),
        (lambda f: (f / "train" / "3").mkdir(), "class folder .*3 has no images"),
        (lambda f: (f / "val").rename(f / "other"), "no folder val or test"),
        (lambda f: (f / "train").rename(f / "other"), "needs"),
        (lambda f: [shutil.rmtree(f / "train" / c) for c in ("1", "10")], "needs 2 or more"),
    ],
)
def test_folders_that_make_no_sense_are_refused(photos, tmp_path, change, words):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(UsageError, match=words):
        open_image_sets(str(tmp_path), 0)


def test_other_files_are_left_out_and_said(photos, tmp_path, capsys):
    shutil.copytree(photos, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train" / "1" / "notes.txt").write_text("")
    (tmp_path / "train" / "1" / ".hidden.png").write_text("")
    (tmp_path / "train" / ".DS_Store").write_text("")
    (tmp_path / "train" / "1" / "more").mkdir()
    photograph(COLOURS["1"], 1).save(tmp_path / "train" / "1" / "more" / "x.JPG")
    data = open_image_sets(str(tmp_path), 0)
    assert len(data.train) == 43 and "train/1/more/x.JPG" in names_of(data.train)
    assert "1 files left out, no images by name: " in capsys.readouterr().out


def test_fingerprint_is_of_names_sizes_and_labels(photos, tmp_path):
    expected = open_image_sets(str(photos), 0).fingerprint
    shutil.copytree(photos, tmp_path / "a")
    assert open_image_sets(str(tmp_path / "a"), 0).fingerprint == expected
    found = {expected, open_image_sets(str(photos), 5).fingerprint}
    with (tmp_path / "a" / "val" / "1" / "0.png").open("ab") as file:
        file.write(b"x")
    found.add(open_image_sets(str(tmp_path / "a"), 0).fingerprint)
    image = tmp_path / "a" / "train" / "1" / "0.png"
    image.rename(image.with_name("00.png"))
    found.add(open_image_sets(str(tmp_path / "a"), 0).fingerprint)
    for part in ("train", "val"):
        (tmp_path / "a" / part / "10").rename(tmp_path / "a" / part / "11")
    found.add(open_image_sets(str(tmp_path / "a"), 0).fingerprint)
    assert len(found) == 5


def write_parquet(photos: Path, folder: Path, label, classes=None) -> str:
    """The images of `photos` as a data set of parquet; label(part, class name, number)."""
    import datasets

    for part, split in (("train", "train"), ("val", "validation")):
        files = sorted((photos / part).rglob("*.png"))
        labels = [label(part, file.parent.name, i) for i, file in enumerate(files)]
        kind = datasets.ClassLabel(names=classes) if classes else datasets.Value("string")
        if not classes and any(isinstance(value, int) for value in labels):
            kind = datasets.Value("int64")
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        cells = [{"bytes": file.read_bytes(), "path": None} for file in files]
        rows = datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)
        folder.mkdir(exist_ok=True)
        rows.to_parquet(folder / f"{split}-00000.parquet")
    return str(folder)


@pytest.mark.parametrize("kind", ["names", "strings", "numbers"])
def test_parquet(photos, tmp_path, kind, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = {"names": ["1", "10", "2"], "strings": None, "numbers": None}[kind]
    numbers = {"1": 0, "2": 1, "10": 2}

    def label(part, class_, i):
        if part == "train" and i < 4:
            return None if kind == "strings" else -1
        if kind == "names":
            return ["1", "10", "2"].index(class_)
        return class_ if kind == "strings" else numbers[class_]

    data = open_image_sets(write_parquet(photos, tmp_path / "set", label, names), 0)
    assert data.classes == (["0", "1", "2"] if kind == "numbers" else ["1", "2", "10"])
    assert "train: 4 of 42 images have no label" in capsys.readouterr().out
    labels = data.train.labels.tolist()
    assert labels.count(UNLABELLED) == 4 and labels.count(0) == 10 and labels.count(2) == 14
    for i in range(0, len(data.train), 5):
        row = int(data.train.images.name(i).split()[2])
        file = sorted((photos / "train").rglob("*.png"))[row]
        assert labels[i] in (numbers[file.parent.name], UNLABELLED)
        assert data.train.images.source(i) == file.read_bytes()
    smaller = open_image_sets(str(tmp_path / "set"), 7)
    assert smaller.fingerprint != data.fingerprint and len(smaller.train) == 7


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (lambda part, c, i: -2 if i == 3 else int(c), "split train, .*label 3 is -2"),
        (lambda part, c, i: -1 if part == "val" else int(c), "validation has no labelled image"),
        (lambda part, c, i: 11 if part == "val" else int(c), "validation has 11, no class"),
    ],
)
def test_labels_that_make_no_sense_are_refused(photos, tmp_path, label, words):
    with pytest.raises(UsageError, match=words):
        open_image_sets(write_parquet(photos, tmp_path / "set", label), 0)


# ---- Samples ----------------------------------------------------------------------------------


def test_random_crops_are_of_the_sample_and_epoch(photos):
    data = open_image_sets(str(photos), 0)
    transform = image_folder.train_transform(16, 0.08, True)
    train_set = ImageDataset(data.train, transform, 3, replace=False)
    state = torch.get_rng_state()
    first, again = (train_set[SampleIndex(4, 1)]["image"] for _ in range(2))
    assert torch.equal(first, again) and first.shape == (3, 16, 16) and first.dtype == torch.uint8
    assert not torch.equal(first, train_set[SampleIndex(4, 2)]["image"])
    assert torch.equal(state, torch.get_rng_state())


def test_unreadable_image_is_replaced_by_another_with_its_label(broken_photos):
    data = open_image_sets(str(broken_photos), 0)
    names = names_of(data.train)
    bad = names.index("train/2/torn.jpg")
    as_it_is = torch.nn.Identity()
    train_set = ImageDataset(data.train, as_it_is, 3, replace=True)
    chosen = []
    for epoch in range(4):
        sample, again = (train_set[SampleIndex(bad, epoch)] for _ in range(2))
        assert torch.equal(sample["image"], again["image"])
        assert sample["id"] == bad and sample["bad"][0].startswith("train/2/torn.jpg: ")
        whole = [i for i, name in enumerate(names) if name not in BROKEN]
        same = [
            i for i in whole
            if torch.equal(decode_rgb(data.train.images.source(i), ""), sample["image"])
        ]  # fmt: skip
        assert data.train.labels[same[0]] == sample["label"]
        chosen += same
    assert len(set(chosen)) > 1  # another one in another epoch
    placeholder = ImageDataset(data.train, as_it_is, 3, replace=False)[bad]
    assert placeholder["label"] == UNLABELLED and len(placeholder["bad"]) == 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 30000), (40, 3), (33, 57)])
def test_any_shape_becomes_a_square(shape):
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    for transform in (
        image_folder.train_transform(24, 0.08, True),
        lambda image: image_folder.eval_transform(image, 24, 0.875),
    ):
        assert transform(image).shape == (3, 24, 24)


def test_flags_are_those_of_cifar_and_some_more():
    from train import cifar

    own, common = image_folder.Config.__dataclass_fields__, cifar.Config.__dataclass_fields__
    assert common.keys() <= own.keys()
    assert {name: own[name].type for name in common} == {n: f.type for n, f in common.items()}
    for bad in (dict(num_workers=-2), dict(crop_pct=0.0), dict(crop_scale=1.5)):
        with pytest.raises(UsageError, match=f"--{list(bad)[0].replace('_', '-')} "):
            image_folder.main(image_folder.Config(**bad))


def test_evaluation_sees_the_middle():
    image = torch.zeros(3, 40, 80, dtype=torch.uint8)
    image[:, 5:35, 25:55] = 200
    assert (image_folder.eval_transform(image, 16, 0.75) == 200).all()
    assert torch.equal(image_folder.eval_transform(image[:, :, :40], 40, 1.0), image[:, :, :40])


# ---- Training ---------------------------------------------------------------------------------


@contextmanager
def small_script(dtype=torch.float64):
    script = importlib.import_module("train.image_folder")
    torch.set_default_dtype(dtype)
    saved, script.torchvision_model = script.torchvision_model, lambda _, n: NarrowResNet18(n)
    try:
        yield script
    finally:
        script.torchvision_model = saved


def run_script(config: dict, **how) -> dict:
    """image_folder.py's main in this process; rank 0 returns what the run left behind."""
    with small_script(**how) as script:
        code = script.main(script.Config(**{"tracker": "none", **config}))
    if dist.is_initialized() and dist.get_rank() > 0:
        return {}
    directory = Path(config["output_dir"])
    listed = directory / "bad_images.txt"
    lines = listed.read_text().splitlines() if listed.exists() else []
    return {"code": code, "bad": lines, **read_run(directory)}


def recipe(directory: Path, photos: Path, **changes) -> dict:
    given = dict(output_dir=str(directory), dataset=str(photos), image_size=16, num_workers=0)
    return given | dict(global_batch_size=12, bn_group=6, epochs=2, lr=0.05) | changes


def train(pool, processes: int, directory: Path, photos: Path, **changes) -> dict:
    given = recipe(directory, photos, **changes)
    result = pool.run(processes, run_script, given, init=False, timeout=300)[0]
    assert result["config"]["world_size"] == processes
    return result


def assert_same(expected: dict, actual: dict, tolerance: float) -> None:
    for kind in ("model", "momentum"):
        for name, value in expected[kind].items():
            assert relative_difference(value, actual[kind][name]) <= tolerance, name
    assert expected["metrics"].keys() == actual["metrics"].keys()
    for step, values in expected["metrics"].items():
        for key in (key for key in values if not key.startswith("perf/")):
            value = values[key]
            if isinstance(value, float):
                value = pytest.approx(value, rel=tolerance, abs=tolerance * 1e-3)
            assert actual["metrics"][step][key] == value, (step, key)


SLOW_RESUMES = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (2, 2))]


@pytest.mark.parametrize(("processes", "workers"), [(1, 2), *SLOW_RESUMES])  # workers read ahead
def test_stopped_and_continued_is_bitwise_the_same(pool, tmp_path, photos, processes, workers):
    """In the middle of the second epoch of 3 updates."""
    how = dict(num_workers=workers)
    whole = train(pool, processes, tmp_path / "whole", photos, **how)
    stopped = train(pool, processes, tmp_path / "parts", photos, stop_after=4, **how)
    assert stopped["code"] == 75
    continued = train(pool, processes, tmp_path / "parts", photos, **how)
    assert continued["code"] == 0 and len(continued["metrics"]) == 6
    assert_same(whole, continued, 0.0)
    description = json.loads((tmp_path / "whole" / "model" / "model.json").read_text())
    assert description["classes"] == ["1", "2", "10"] and description["image_size"] == 16


def test_unreadable_images_are_replaced_alike_in_any_layout(pool, tmp_path, broken_photos):
    how = dict(bad_images="skip")
    expected = train(pool, 1, tmp_path / "1x12", broken_photos, **how)
    for processes, micro, workers in ((1, 6, 0), (2, 6, 0), (2, 3, 0)):
        directory = tmp_path / f"{processes}x{micro}"
        changes = how | dict(micro_batch_size=micro, num_workers=workers)
        result = train(pool, processes, directory, broken_photos, **changes)
        assert_same(expected, result, 1e-10)
        assert result["bad"] == expected["bad"]
    assert [line.split(": ")[0] for line in expected["bad"]] == sorted(BROKEN)
    assert "no image" in expected["bad"][0] and "truncated" in expected["bad"][1]
    assert expected["metrics"][6]["val/num_examples"] == 15


@pytest.mark.parametrize("processes", [1, 2])
def test_an_unreadable_image_stops_the_run_by_name(pool, tmp_path, broken_photos, processes):
    how = dict(epochs=4)
    with pytest.raises(
        AssertionError, match=r"ExplainedError: rank \d: unreadable image: \w+/"
    ) as e:
        train(pool, processes, tmp_path, broken_photos, **how)
    assert any(f"{name}: " in str(e.value) for name in BROKEN)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed"
    # What it stopped at is no other recipe: it goes on where it was.
    if processes == 1:
        result = train(pool, 1, tmp_path, broken_photos, bad_images="skip", **how)
        assert result["code"] == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_verify_data_lists_all_before_training(pool, tmp_path, broken_photos, processes):
    how = dict(verify_data=True)
    with pytest.raises(AssertionError, match="UsageError: --verify-data: 3 unreadable images") as e:
        train(pool, processes, tmp_path, broken_photos, **how)
    assert "train/2/torn.jpg: " in str(e.value) and "(rank " in str(e.value)
    listed = (tmp_path / "bad_images.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == sorted(BROKEN)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_verify_data_passes_on_good_images(pool, tmp_path, photos):
    result = train(pool, 2, tmp_path, photos, verify_data=True, max_steps=1)
    assert result["code"] == 0 and result["bad"] == []


def test_a_folder_that_is_gone_is_no_single_bad_image(pool, tmp_path, photos):
    shutil.copytree(photos, tmp_path / "photos")
    for file in (tmp_path / "photos" / "train").rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(AssertionError, match="unreadable images in a row, such as train/"):
        train(pool, 1, tmp_path / "run", tmp_path / "photos", bad_images="skip")


def test_other_classes_are_not_continued(pool, tmp_path, photos):
    shutil.copytree(photos, tmp_path / "photos")
    train(pool, 1, tmp_path / "run", tmp_path / "photos", stop_after=2)
    for part in ("train", "val"):
        (tmp_path / "photos" / part / "10").rename(tmp_path / "photos" / part / "0")
    with pytest.raises(AssertionError, match=r"classes=\['0', '1', '2'\] .* \['1', '2', '10'\]"):
        train(pool, 1, tmp_path / "run", tmp_path / "photos")


def preflight(config: dict, mean_loss: bool) -> dict:
    with small_script(torch.float32) as script:
        saved = script.compute_loss
        if mean_loss:

            def compute_loss(model, batch, label_smoothing=0.0):
                loss, logits = saved(model, batch, label_smoothing)
                return loss / script.count_valid(batch), logits

            script.compute_loss = compute_loss
        try:
            code = script.main(script.Config(**{"tracker": "none", "preflight": True, **config}))
        finally:
            script.compute_loss = saved
    if os.environ.get("RANK", "0") != "0":  # the main process writes it, maybe later
        return {}
    report = json.loads((Path(config["output_dir"]) / "preflight.json").read_text())
    return {"code": code, "report": report}


@pytest.mark.parametrize("mean_loss", [False, True])
def test_preflight(pool, tmp_path, photos, mean_loss):
    given = recipe(tmp_path, photos)
    answer = pool.run(2, preflight, given, mean_loss, init=False)[0]
    checks = {check["check"]: check for check in answer["report"]["checks"]}
    failed = [name for name, check in checks.items() if check["result"] == "fail"]
    assert (answer["code"], failed) == ((1, ["gradient"]) if mean_loss else (0, []))
    assert "where samples are read" in checks["random"]["seen"]


# ---- Against cifar.py -------------------------------------------------------------------------


def cifar_and_folder(given: dict, cifar_config: dict, cifar_data: ImageData) -> list[dict]:
    """Both scripts without their augmentation, which differs; in this process."""
    from train import cifar

    crop, cifar.random_crop_flip = cifar.random_crop_flip, lambda images, ids, **how: images
    transform, image_folder.train_transform = image_folder.train_transform, lambda *_: lambda x: x
    try:
        return [run_cifar(cifar_config, cifar_data), run_script(given)]
    finally:
        cifar.random_crop_flip, image_folder.train_transform = crop, transform


def test_cifar10_as_a_folder_trains_as_cifar_does(pool, tmp_path, real_data):
    from datasets import load_dataset

    for part, split in (("train", "train"), ("val", "test")):
        rows = load_dataset(str(real_data / "cifar10"), split=f"{split}[:90]")
        for i, row in enumerate(rows):
            folder = tmp_path / "photos" / part / f"{row['label']}"
            folder.mkdir(parents=True, exist_ok=True)
            row["img"].save(folder / f"{i}.png")
    found = open_image_sets(str(tmp_path / "photos"), 0)
    assert found.classes == list("0123456789")
    splits = []
    for split in (found.train, found.test):
        pixels = [decode_rgb(split.images.source(i), "") for i in range(len(split))]
        splits.append(Split(torch.stack(pixels), split.labels))
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    data = ImageData("cifar", splits[0], splits[1], found.classes, True, mean, std, "")
    same = dict(global_batch_size=16, bn_group=8, epochs=2, lr=0.05, weight_decay=1e-4)
    given = recipe(tmp_path / "a", tmp_path / "photos", **same, image_size=32, crop_pct=1.0)
    cifar_config = dict(output_dir=str(tmp_path / "b"), **same)
    expected, result = pool.run(1, cifar_and_folder, given, cifar_config, data, init=False)[0]
    assert len(result["metrics"]) == 10
    assert_same(expected, result, 1e-12)
