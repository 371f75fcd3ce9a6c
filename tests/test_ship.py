"""--export and --predict of the scripts, as a user of a finished run has them."""

import csv
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.scripts import NarrowResNet18, run_cifar, small_cifar, small_data
from utils.errors import ExplainedError, UsageError
from utils.flags import RunFlags

DATA = dict(num_train=75, num_test=37)
RECIPE = dict(global_batch_size=16, bn_group=16, epochs=2, lr=0.05)
LAUNCHED = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


def contents(run: Path) -> dict[str, bytes]:
    """What must not change: all files of a run but the models and the predictions."""
    files = (path for path in run.rglob("*") if path.is_file())
    names = {path.relative_to(run).as_posix(): path for path in files}
    return {n: p.read_bytes() for n, p in names.items() if not n.startswith(("model/", "pred"))}


def act(given: dict, data) -> str:
    """cifar.py with only these flags, as `python train/cifar.py` starts it: without a launcher.

    data: of --dataset; None: reading it is an error. Returns the console's output, with the error
    that a user would see at its end.
    """
    console = io.StringIO()

    def refuse(*args, **kwargs):
        raise AssertionError("must not be called")

    for name in LAUNCHED:
        del os.environ[name]
    dist.init_process_group, saved = refuse, dist.init_process_group
    try:
        with small_cifar(data, torch.float32) as cifar:
            if data is None:
                cifar.load_small_images = refuse
            with redirect_stdout(console), redirect_stderr(console):
                assert cifar.main(cifar.Config(**given)) == 0
    except (UsageError, ExplainedError) as error:
        console.write(f"{type(error).__name__}: {error}")
    finally:
        dist.init_process_group = saved
    return console.getvalue()


def launched(given: dict) -> str:
    """cifar.py as a launcher starts it; the error that it must end with."""
    with small_cifar(None) as cifar, pytest.raises(UsageError) as caught:
        cifar.main(cifar.Config(**given))
    return str(caught.value)


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A run of four processes whose BatchNorm spans them all."""
    directory, data = tmp_path_factory.mktemp("trained"), small_data(**DATA)
    given = dict(output_dir=str(directory), **RECIPE)
    result = pool.run(4, run_cifar, given, data, dtype=torch.float32, init=False)[0]
    assert result["config"]["world_size"] == 4 and result["config"]["bn_plan"]["ranks_sharing"] == 4
    return directory, data, result


@pytest.mark.parametrize("format", ["safetensors", "torch-export", "onnx"])
def test_a_run_of_four_processes_becomes_a_plain_model(pool, trained, format):
    """From --resume alone: all other flags are the run's."""
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    run, data, result = trained
    before = contents(run)
    console = pool.run(1, act, dict(export=format, resume=str(run)), data, init=False)[0]
    assert contents(run) == before
    inputs = (data.test.images - 255 * torch.tensor(data.mean).view(3, 1, 1)) / (
        255 * torch.tensor(data.std).view(3, 1, 1)
    )
    plain = NarrowResNet18(4)
    plain.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    plain.maxpool = torch.nn.Identity()
    plain.load_state_dict(load_file(run / "model" / "model.safetensors"), strict=True)
    assert not any(isinstance(m, torch.nn.SyncBatchNorm) for m in plain.modules())
    with torch.no_grad():
        expected = plain.eval()(inputs)
    if format == "torch-export":
        program = torch.export.load(run / "model" / "model.pt2")
        calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert calls and all(call.startswith("aten.") for call in calls)
        logits = program.module()(inputs)
    elif format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(run / "model" / "model.onnx")
        logits = torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])
    else:
        logits = expected
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    accuracy = (logits.argmax(1) == data.test.labels).double().mean().item()
    assert accuracy == pytest.approx(result["metrics"][8]["val/accuracy"])
    assert console.count("37 validation samples: outputs differ by") == 1
    assert f"in torch {accuracy:.6f}, of the file {accuracy:.6f}" in console
    about = json.loads((run / "model" / "model.json").read_text())
    assert about["classes"] == list("abcd") and about["architecture"] == "resnet18"
    assert about["image_size"] == 8 and about["channel_order"] == "RGB"
    assert about["value_range"] == [0, 1] and about["interpolation"] == "bilinear"


def test_a_checkpoint_outside_of_its_run(pool, trained, tmp_path):
    run, data, _ = trained
    shutil.copytree(run / "checkpoints" / "step_00000008", tmp_path / "copied")
    given = dict(export="safetensors", resume=str(tmp_path / "copied"), output_dir=f"{tmp_path}/to")
    pool.run(1, act, given, data, init=False)
    assert sorted(p.name for p in (tmp_path / "to").rglob("*.*")) == [
        "model.json",
        "model.safetensors",
    ]


def test_another_recipe_is_not_exported(pool, trained):
    run, data, _ = trained
    given = dict(export="safetensors", resume=str(run), lr=0.5)
    console = pool.run(1, act, given, data, init=False)[0]
    assert re.search("UsageError: .*lr=0.5 but .* 0.05", console)


def test_several_processes_are_refused(pool, trained):
    given = dict(export="safetensors", resume=str(trained[0]))
    for message in pool.run(2, launched, given, init=False):
        assert message.startswith("--export safetensors runs in one process, not in 2: `python ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(export="onnx"), "--export onnx needs a run or a checkpoint: --resume RUN"),
        (dict(export="onnx", resume="never"), "--resume RUN"),
        (dict(export="onnx", resume="/does/not/exist"), "no usable checkpoint in /does/not/exist"),
        (dict(predict="/no.png", resume="/"), "--predict /no.png: no such file or folder"),
        (dict(predict="/", export="onnx"), "--export and --predict: one at a time"),
        (dict(predict="/", eval_only=True), "--eval-only and --predict: one at a time"),
    ],
)
def test_what_cannot_work_is_refused(flags, words, monkeypatch):
    monkeypatch.setattr("utils.export.ONNX_PACKAGES", ())
    with pytest.raises(UsageError, match=words):
        RunFlags(**flags).as_in_run()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("utils.export.ONNX_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(UsageError, match="needs no_such_package: pip install torch no_such_pack"):
        RunFlags(export="onnx", resume="/does/not/exist").as_in_run()
    with pytest.raises(UsageError, match="no usable checkpoint"):
        RunFlags(export="torch-export", resume="/does/not/exist").as_in_run()


def test_without_either_flag_nothing_changes():
    flags = RunFlags(resume="never", stop_after=3)
    assert flags.as_in_run() is flags


# ---- Prediction -------------------------------------------------------------------------------


def write_images(folder: Path, images: torch.Tensor) -> None:
    (folder / "more").mkdir(parents=True)
    for i, image in enumerate(images):
        place = folder / "more" if i % 2 else folder
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{i}.png")


def test_classes_of_files(pool, trained, tmp_path):
    """As the evaluation has them; broken files are named and left out, no data set is read."""
    run, data, _ = trained
    write_images(tmp_path, data.test.images)
    (tmp_path / "torn.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    (tmp_path / "text.jpg").write_text("no pixels")
    (tmp_path / "notes.txt").write_text("")
    before = contents(run)
    given = dict(predict=str(tmp_path), resume=str(run))
    console = pool.run(1, act, given, None, init=False)[0]
    assert contents(run) == before
    rows = list(csv.DictReader((run / "predictions" / "predictions.csv").open()))
    assert [row["file"] for row in rows[:2]] == ["0.png", "2.png"] and len(rows) == 37
    model = NarrowResNet18(4)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    model.load_state_dict(load_file(run / "model" / "model.safetensors"))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
    with torch.no_grad():
        shares = model.eval()((data.test.images / 255 - mean) / std).softmax(1)
    for row in rows:
        expected = shares[int(Path(row["file"]).stem)].sort(descending=True)
        assert [row[f"class_{i}"] for i in (1, 2, 3, 4)] == ["abcd"[c] for c in expected.indices]
        found = [float(row[f"probability_{i}"]) for i in (1, 2, 3, 4)]
        assert found == pytest.approx(expected.values.tolist(), abs=2e-5)
    assert "left out: torn.png: " in console and "left out: text.jpg: no image" in console
    assert "left out  1 files" in console and "more/1.png  " in console


def test_no_file_that_can_be_read(pool, trained, tmp_path):
    (tmp_path / "text.jpg").write_text("no pixels")
    given = dict(predict=str(tmp_path), resume=str(trained[0]))
    console = pool.run(1, act, given, None, init=False)[0]
    assert re.search("ExplainedError: .*none of 1 images could be read", console)
    (tmp_path / "text.jpg").rename(tmp_path / "text.txt")
    console = pool.run(1, act, given, None, init=False)[0]
    assert re.search("UsageError: .*no file in there", console)


# ---- Every script and format, by its command line ------------------------------------------------


def command(script: str, *flags: str, code: int = 0) -> str:
    line = [sys.executable, f"train/{script}.py", *flags]
    result = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def folder_of_photographs(root: Path) -> Path:
    from tests.test_image_folder import make_folder

    return make_folder(root)


def folder_of_masks(root: Path) -> Path:
    from tests.test_segmentation import make_folder

    return make_folder(root)


def folder_of_boxes(root: Path) -> Path:
    from tests.test_detection import make_folder

    return make_folder(root)


SMALL = {
    "cifar": "--dataset digits --subset 200 --max-steps 3 --global-batch-size 32 --bn-group 16",
    "cifar_fast": "--dataset digits --subset 200 --max-steps 3 --global-batch-size 32"
    " --bn-group 16 --width 0.125",
    "image_folder": "--image-size 33 --global-batch-size 16 --bn-group 8 --epochs 1"
    " --crop-pct 0.9 --model mobilenet_v3_small",
    "segmentation": "--crop-size 64 --global-batch-size 4 --bn-group 4 --epochs 1",
    "detection": "--image-size 64 --global-batch-size 4 --bn-group 4 --epochs 1 --regions 8",
}
FOLDERS = {
    "image_folder": folder_of_photographs,
    "segmentation": folder_of_masks,
    "detection": folder_of_boxes,
}
METRICS = {"segmentation": "val/miou", "detection": "val/ap"}


@pytest.fixture(scope="module", params=SMALL)
def small_run(request, tmp_path_factory):
    script, root = request.param, tmp_path_factory.mktemp(request.param)
    if script == "detection":
        pytest.importorskip("faster_coco_eval")
    flags = SMALL[script].split() + ["--tracker", "none", "--output-dir", str(root / "run")]
    folder = None
    if script in FOLDERS:
        folder = FOLDERS[script](root / "data")
        flags += ["--dataset", str(folder)]
    command(script, *flags)
    return script, root / "run", folder


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "torch-export", "onnx"])
def test_every_script_and_format(small_run, format):
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    script, run, _ = small_run
    before = contents(run)
    if script == "detection" and format != "safetensors":
        output = command(script, "--export", format, "--resume", str(run), code=2)
        assert f"error: --export {format}: torch.export cannot follow a detector" in output
        assert contents(run) == before
        return
    output = command(script, "--export", format, "--resume", str(run))
    metric = METRICS.get(script, "val/accuracy")
    assert metric in output and "outputs differ by" in output
    assert contents(run) == before
    names = {"safetensors": "model.safetensors", "torch-export": "model.pt2", "onnx": "model.onnx"}
    assert (run / "model" / names[format]).exists()
    assert not list((run / "model").glob(".*"))


@pytest.mark.slow
def test_every_script_predicts_without_its_data(small_run, tmp_path):
    script, run, folder = small_run
    if folder:
        folder = folder.rename(tmp_path / "moved")
    try:
        image = np.random.default_rng(0).integers(0, 255, (50, 70, 3)).astype(np.uint8)
        (tmp_path / "photos").mkdir()
        for name in ("a.png", "a.jpg", "b.webp"):
            Image.fromarray(image).save(tmp_path / "photos" / name)
        (tmp_path / "photos" / "broken.jpg").write_bytes(b"")
        before = contents(run)
        output = command(script, "--predict", str(tmp_path / "photos"), "--resume", str(run))
        assert "left out: broken.jpg" in output and contents(run) == before
        if script == "cifar":
            photo = str(tmp_path / "photos" / "a.png")
            output = command("detection", "--predict", photo, "--resume", str(run), code=2)
            assert f"error: --resume {run}" in output and "is a run of another script" in output
        found = sorted(path.name for path in (run / "predictions").iterdir())
        if script == "segmentation":
            kinds = ("mask.png", "overlay.png")
            assert found == sorted(f"{n}_{k}" for n in ("a", "a.png", "b") for k in kinds)
            assert Image.open(run / "predictions" / "b_overlay.png").size == (70, 50)
        elif script == "detection":
            kinds = ("boxes.json", "overlay.png")
            assert found == sorted(f"{n}_{k}" for n in ("a", "a.png", "b") for k in kinds)
            assert Image.open(run / "predictions" / "b_overlay.png").size == (70, 50)
            said = json.loads((run / "predictions" / "b_boxes.json").read_text())
            assert (said["file"], said["width"], said["height"]) == ("b.webp", 70, 50)
            for box in said["boxes"]:
                x1, y1, x2, y2 = box["box"]
                assert 0 <= x1 < x2 <= 70 and 0 <= y1 < y2 <= 50 and 0 < box["score"] <= 1
        else:
            assert found == ["predictions.csv"]
    finally:
        if folder:
            folder.rename(small_run[2])


@pytest.mark.slow
def test_the_lines_of_the_readme_load_the_weights(small_run):
    script, run, _ = small_run
    text = (REPOSITORY / "train" / "README.md").read_text()
    text = text[text.index("Load the weights with torchvision alone") :]
    text = text[text.index(f"{script}.py") :]
    block = text[text.index("    import json") :].split("\n\n")[0]
    code = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    code = code.replace("RUN", str(run)) + "\nprint(len(model.state_dict()), model.training)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    state = load_file(run / "model" / "model.safetensors")
    assert result.stdout.split() == [str(len(state)), "False"]


@pytest.mark.slow
def test_a_mask_has_the_values_of_the_data_sets_masks(tmp_path):
    """The ignored value stands in the middle of the classes there; on the model's side it has no
    number."""
    from tests.test_segmentation import VOID

    folder = folder_of_masks(tmp_path / "data")
    flags = SMALL["segmentation"].split() + ["--dataset", str(folder), "--tracker", "none"]
    command("segmentation", *flags, "--output-dir", str(tmp_path / "run"))
    images = folder / "images" / "val"
    command("segmentation", "--predict", str(images), "--resume", str(tmp_path / "run"))
    script = importlib.import_module("train.segmentation")
    about = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    model = script.build_model(about["architecture"], 4, about["auxiliary_head"]).eval()
    model.load_state_dict(load_file(tmp_path / "run" / "model" / "model.safetensors"))
    mean, std = (torch.tensor(about[key]).view(3, 1, 1) for key in ("mean", "std"))
    values = [0, 1, 2, 4]
    assert about["mask_values"] == values and VOID == 3
    for path in sorted(images.iterdir()):
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
        with torch.no_grad():
            logits = model(((pixels - mean) / std)[None])["out"][0]
        mask = Image.open(tmp_path / "run" / "predictions" / f"{path.stem}_mask.png")
        found = torch.from_numpy(np.array(mask))
        expected = torch.tensor(values)[logits.argmax(0)]
        assert mask.mode == "P" and (found == expected).double().mean() > 0.999
        assert mask.getpalette()[12:15] == [90, 90, 90]  # the road's colour


@pytest.mark.slow
def test_the_same_top_1_on_500_real_images(real_data, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    run = tmp_path / "run"
    flags = f"--dataset {real_data / 'cifar10'} --subset 2000 --epochs 4 --width 0.25"
    more = f"--global-batch-size 128 --tracker none --output-dir {run}"
    command("cifar_fast", *flags.split(), *more.split())
    for format in ("onnx", "torch-export"):
        command("cifar_fast", "--export", format, "--resume", str(run))
    from utils.small_images import load_small_images

    data = load_small_images(str(real_data / "cifar10"), 2000, on_accelerator=False)
    images, labels = data.test.images[:500], data.test.labels[:500]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
    inputs = (images / 255 - mean) / std
    session = onnxruntime.InferenceSession(run / "model" / "model.onnx")
    of_onnx = torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0]).argmax(1)
    with torch.no_grad():
        of_program = torch.export.load(run / "model" / "model.pt2").module()(inputs).argmax(1)
    assert torch.equal(of_onnx, of_program)
    assert (of_onnx == labels).double().mean() > 0.15  # it has learnt something
    # The same by --predict, from files.
    write_images(tmp_path / "images", images[:100])
    command("cifar_fast", "--predict", str(tmp_path / "images"), "--resume", str(run))
    for row in csv.DictReader((run / "predictions" / "predictions.csv").open()):
        number = int(Path(row["file"]).stem)
        assert row["class_1"] == data.classes[of_onnx[number]]
