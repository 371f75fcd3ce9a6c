"""Weights for deployment: the same outputs, plain names, and a refusal where that is not so."""

import json
import math
from functools import partial

import pytest
import torch
import torchvision
from safetensors.torch import load_file

from utils.batchnorm import GroupBatchNorm, convert_batchnorm
from utils.errors import ExplainedError
from utils.export import FILES, export_checkpoint, export_model
from utils.models import load_weights, read_weights

DESCRIPTION = {"architecture": "net", "classes": ["a", "b"], "mean": [0.5], "std": [0.25]}


def build(hidden: int = 6) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, hidden, 3, bias=False),
        torch.nn.BatchNorm2d(hidden),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(hidden, 2),
    )


def trained(convert: bool = True) -> torch.nn.Module:
    """A model in training mode whose running statistics are far from those of any batch."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
        model[1].weight.normal_()
    if convert:
        convert_batchnorm(model, 2, 4)
    return model.train()


def state_of(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


EXAMPLE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def assert_exported(folder, model) -> None:
    expected = {name: value for name, value in model.state_dict().items()}
    state = load_file(folder / "model.safetensors")
    assert state.keys() == expected.keys() == build().state_dict().keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    plain = build()
    plain.load_state_dict(state, strict=True)
    assert json.loads((folder / "model.json").read_text()) == DESCRIPTION
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]


@pytest.mark.parametrize("convert", [True, False])
def test_export_and_load_again(tmp_path, convert):
    model = trained(convert).to(memory_format=torch.channels_last)
    before = state_of(model)
    folder = export_model(tmp_path / "run", model, DESCRIPTION, build, EXAMPLE)
    assert folder == tmp_path / "run" / "model"
    assert_exported(folder, model)
    assert model.training and isinstance(model[1], GroupBatchNorm) == convert  # as it was
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    export_model(tmp_path / "run", model, DESCRIPTION, build, EXAMPLE)  # again, over the old one


def test_float64(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        model = trained()
        assert_exported(export_model(tmp_path, model, DESCRIPTION, build, EXAMPLE.double()), model)
    finally:
        torch.set_default_dtype(torch.float32)


def export_under_bf16(directory) -> list[float]:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = trained()
    with torch.no_grad():
        model[6].weight.mul_(300)  # bfloat16 is now off by more than any tolerance
        before = model.eval()(EXAMPLE)
    prepared = accelerator.prepare(model.train())
    plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    assert "forward" in plain.__dict__  # Accelerate's own, under autocast
    with torch.no_grad():
        assert (plain.eval()(EXAMPLE) - before).abs().max() > 0.1
    plain.train()
    folder = export_model(directory, plain, DESCRIPTION, build, EXAMPLE)
    assert_exported(folder, plain)
    assert "forward" in plain.__dict__ and plain.training
    accelerator.wait_for_everyone()
    fresh = build().eval()
    fresh.load_state_dict(load_file(directory / "model" / "model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(fresh(EXAMPLE), before, rtol=1e-5, atol=1e-4)
    return fresh(EXAMPLE).flatten().tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_under_autocast_the_plain_model_is_compared(pool, tmp_path, size):
    replies = pool.run(size, export_under_bf16, tmp_path, init=False)
    assert all(reply == replies[0] for reply in replies)


def test_weights_of_another_architecture_are_not_exported(tmp_path):
    with pytest.raises(RuntimeError, match="size mismatch"):
        export_model(tmp_path, trained(), DESCRIPTION, lambda: build(7), EXAMPLE)
    with pytest.raises(RuntimeError, match="other outputs"):

        def tanh() -> torch.nn.Module:
            model = build()
            model[2] = torch.nn.Tanh()  # the same names
            return model

        export_model(tmp_path, trained(), DESCRIPTION, tanh, EXAMPLE)
    assert list((tmp_path / "model").iterdir()) == []


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)
        self.out = torch.nn.Linear(3, 5)
        self.out.weight = self.encode.weight

    def forward(self, x):
        return self.out(self.decode(self.encode(x)))


def test_tied_weights(tmp_path):
    model = Tied()
    export_model(tmp_path, model, DESCRIPTION, Tied, torch.ones(2, 3))
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"), strict=True)
    assert torch.equal(fresh(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_a_model_whose_state_has_a_version(tmp_path):
    def mnasnet():  # reads its version from the state dict's metadata, which no file carries
        return torchvision.models.mnasnet0_5(num_classes=2)

    model = mnasnet()
    folder = export_model(tmp_path, model, DESCRIPTION, mnasnet, torch.rand(2, 3, 32, 32))
    fresh = mnasnet()
    load_weights(fresh, read_weights(folder / "model.safetensors"), "it")
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in model.state_dict().items())


def test_an_exported_file_serves_as_initial_weights(tmp_path):
    model = trained()
    folder = export_model(tmp_path, model, DESCRIPTION, build, EXAMPLE)
    fresh = build()
    assert load_weights(fresh, read_weights(folder / "model.safetensors"), "file") == ()
    assert torch.equal(fresh[6].weight, model[6].weight)


# ---- Other formats, and samples ---------------------------------------------------------------


SIZED = {**DESCRIPTION, "image_size": 8}


def reload(folder, format: str):
    if format == "torch-export":
        return torch.export.load(folder / "model.pt2").module()
    session = pytest.importorskip("onnxruntime").InferenceSession(folder / "model.onnx")
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


@pytest.mark.parametrize("format", ["torch-export", "onnx"])
@pytest.mark.parametrize("description", [SIZED, DESCRIPTION], ids=["sized", "any size"])
def test_graphs_take_any_batch_and_any_size_where_none_is_told(tmp_path, format, description):
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    model = trained()
    folder = export_model(tmp_path, model, description, build, EXAMPLE, format)
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", FILES[format]]
    loaded, model = reload(folder, format), model.eval()
    shapes = [(1, 3, 8, 8), (5, 3, 8, 8)]
    shapes += [(1, 3, 9, 31), (2, 3, 20, 7)] if description is DESCRIPTION else []
    for shape in shapes:
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(loaded(images), model(images), rtol=1e-4, atol=1e-5)


def samples() -> list[dict]:
    images = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(10)
    return [{"image": images[i : i + 4], "id": ids[i : i + 4]} for i in range(0, 10, 4)]


class Evaluation:
    """A metric of a script: the share of images that the first class is taken for."""

    def __init__(self):
        self.counts = []

    def __call__(self, model, batches) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(batch["image"]) for batch in batches])
        model.train()
        self.counts.append(len(logits))
        share = (logits.argmax(1) == 0).double().mean().item()
        return {"val/share": share, "val/num_examples": len(logits)}


def test_samples_are_bounded_and_both_models_see_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("utils.export.NUM_SAMPLES", 6)
    evaluation = Evaluation()
    export = partial(export_model, tmp_path, trained(), SIZED, build)
    assert export_checkpoint("torch-export", export, EXAMPLE, samples(), evaluation) == 0
    assert evaluation.counts == [6, 6]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("export    torch-export, 6 validation samples: outputs differ by")
    assert lines[1].split()[0] == "val/share" and lines[1].split()[3] == f"{lines[1].split()[-1]},"
    assert (tmp_path / "model" / "model.pt2").exists()


@pytest.mark.parametrize(
    ("off", "words"), [(0.01, "other outputs"), (math.nan, "other outputs"), (0.0, "val/share")]
)
def test_what_differs_is_not_called_done(tmp_path, monkeypatch, off, words):
    class Off(torch.nn.Module):
        def forward(self, x):
            output = model(x)
            return output if len(x) == 2 else output + off  # the example is of two

    model, wrong = trained().eval(), iter((0.5, 0.9))
    monkeypatch.setattr("utils.export._write_program", lambda *args, **kwargs: Off())
    evaluate = Evaluation()

    def metric(model, batches):
        return {**evaluate(model, batches), **({"val/share": next(wrong)} if off == 0 else {})}

    export = partial(export_model, tmp_path, model, SIZED, build)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.pt2").write_text("the older one")
    with pytest.raises(ExplainedError, match=words):
        export_checkpoint("torch-export", export, EXAMPLE, samples(), metric)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.pt2"]
    assert (tmp_path / "model" / "model.pt2").read_text() == "the older one"
