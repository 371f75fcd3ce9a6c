"""train/cifar_fast.py: what it does not have in common with cifar.py, and that the rest holds."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.scripts import assert_same_weights, read_run, relative_difference, small_data
from utils.small_images import ImageData

DATA = dict(num_train=80, num_test=37, size=32)


def run_script(config: dict, data: ImageData, dtype=torch.float64, preflight=False) -> dict:
    """main in this process, on made-up data; rank 0 returns what the run left behind."""
    script = importlib.import_module("train.cifar_fast")
    torch.set_default_dtype(dtype)
    saved, script.load_small_images = script.load_small_images, lambda *args, **kwargs: data
    try:
        code = script.main(script.Config(**{"tracker": "none", "preflight": preflight, **config}))
    finally:
        script.load_small_images = saved
    if dist.is_initialized() and dist.get_rank() > 0:
        return {}
    directory = Path(config["output_dir"])
    if preflight:
        return {"code": code, **json.loads((directory / "preflight.json").read_text())}
    return {"code": code, **read_run(directory)}


def recipe(directory: Path, **changes) -> dict:
    same = dict(global_batch_size=16, bn_group=8, width=0.125, epochs=2)
    return dict(output_dir=str(directory)) | same | changes


def train(pool, processes: int, directory: Path, **changes) -> dict:
    given, data = recipe(directory, **changes), small_data(**DATA)
    result = pool.run(processes, run_script, given, data, init=False)[0]
    assert result["config"]["world_size"] == processes
    return result


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    return train(pool, 1, directory), directory


@pytest.mark.parametrize(
    ("processes", "micro"),
    [
        (1, 4),
        (2, 4),
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in [(2, 8), (4, 4)]),
    ],
)
def test_layouts(pool, trained, tmp_path, processes, micro):
    expected = trained[0]
    if (processes, micro) == (1, 4):  # a group larger than what the process holds at once
        with pytest.raises(AssertionError, match="bn_group=8"):
            train(pool, processes, tmp_path, micro_batch_size=micro)
        return
    result = train(pool, processes, tmp_path, micro_batch_size=micro)
    for kind in ("model", "momentum"):
        for name, value in expected[kind].items():
            assert relative_difference(value, result[kind][name]) < 1e-10, name
    for step, values in expected["metrics"].items():
        found = result["metrics"][step]
        assert found["data/digest"] == values["data/digest"]
        assert found["train/loss"] == pytest.approx(values["train/loss"], rel=1e-10)


def test_stopped_and_continued_is_bitwise_the_same(pool, trained, tmp_path):
    assert train(pool, 1, tmp_path, stop_after=3)["code"] == 75
    assert_same_weights(trained[0], train(pool, 1, tmp_path))


def test_accuracy_with_flips_is_of_both_views(trained):
    from train.cifar_fast import FastNet

    result, directory = trained
    state = load_file(directory / "model" / "model.safetensors")
    about = json.loads((directory / "model" / "model.json").read_text())
    model = FastNet(about["width"], len(about["classes"]), about["image_size"]).double().eval()
    model.load_state_dict(state)
    data = small_data(**DATA)
    mean, std = (torch.tensor(about[key]).reshape(3, 1, 1) for key in ("mean", "std"))
    images = (data.test.images.double() / 255 - mean) / std
    with torch.no_grad():
        plain, flipped = model(images), model(images.flip(3))
    last = result["metrics"][max(result["metrics"])]
    for logits, key in ((plain, "val/accuracy"), (plain + flipped, "val/accuracy_flip")):
        correct = (logits.argmax(dim=1) == data.test.labels).sum().item()
        assert last[key] == pytest.approx(correct / 37)


def test_what_is_frozen_stays(trained):
    from train.cifar_fast import to_input
    from utils.augment import whitening_filters

    data, model = small_data(**DATA), trained[0]["model"]
    torch.set_default_dtype(torch.float64)
    try:
        images = to_input(data, {"image": data.train.images})["image"]
        torch.testing.assert_close(model["whiten.weight"], whitening_filters(images, size=2))
    finally:
        torch.set_default_dtype(torch.float32)
    scales = [v for name, v in model.items() if name.endswith((".2.weight", ".5.weight"))]
    assert len(scales) == 6 and all((scale == 1).all() for scale in scales)
    biases = [v for name, v in model.items() if name.endswith((".2.bias", ".5.bias"))]
    assert len(biases) == 6 and all((bias != 0).any() for bias in biases)


def test_preflight(pool, tmp_path):
    given, data = recipe(tmp_path), small_data(**DATA)
    answer = pool.run(2, run_script, given, data, torch.float32, preflight=True, init=False)[0]
    failed = [check for check in answer["checks"] if check["result"] == "fail"]
    assert answer["code"] == 0 and not failed


def test_digits_that_shrink_to_one_pixel(pool, tmp_path):
    data = small_data(num_train=48, num_test=10, size=8)
    result = pool.run(1, run_script, recipe(tmp_path), data, init=False)[0]
    assert result["code"] == 0 and result["config"]["world_size"] == 1
