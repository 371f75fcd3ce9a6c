"""Models by name and weights from files: near matches, plain names, refusals; nothing executed."""

import copy
import os
import pickle

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from utils.errors import UsageError
from utils.models import (
    check_forward,
    load_weights,
    plain_name,
    read_initial_weights,
    read_weights,
    torchvision_model,
)


def small(classes: int = 3, stem: int = 3, width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, width, stem),
        torch.nn.BatchNorm2d(width),
        torch.nn.Conv2d(width, width, 1),
        torch.nn.BatchNorm2d(width),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(width, classes),
    )


class Evil:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.system, (f"touch {self.trace}",))


@pytest.mark.parametrize(
    "name", ["fc.weight", "module.fc.weight", "_orig_mod.fc.weight", "module._orig_mod.fc.weight",
             "_orig_mod.module.fc.weight", "module.module._orig_mod.fc.weight"]
)  # fmt: skip
def test_plain_names(name):
    assert plain_name(name) == "fc.weight"


def test_only_the_front_of_a_name_is_plain():
    assert plain_name("layer.module.weight") == "layer.module.weight"
    assert plain_name("modules.weight") == "modules.weight"


@pytest.mark.parametrize("wrap", ["state dict", "model", "state_dict", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_weights_from_a_file(tmp_path, wrap, prefix):
    torch.manual_seed(0)
    source = small()
    state = {f"{prefix}{name}": value for name, value in source.state_dict().items()}
    path = tmp_path / ("weights.safetensors" if wrap == "safetensors" else "weights.pt")
    if wrap == "safetensors":
        save_file(state, path)
    else:
        torch.save(state if wrap == "state dict" else {wrap: state, "epoch": 3}, path)
    model = small()
    assert load_weights(model, read_weights(path), str(path)) == ()
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_weights_of_compiled_and_distributed_wrappers(tmp_path):
    source = small()
    compiled = torch.compile(torch.nn.DataParallel(source))  # `module.`, as DDP writes it
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.module.")
    torch.save(compiled.state_dict(), tmp_path / "weights.pt")
    assert load_weights(small(), read_weights(tmp_path / "weights.pt"), "file") == ()


def test_a_stem_and_a_head_of_another_shape_are_left_out_and_named():
    torch.manual_seed(0)
    source, model = small(classes=10, stem=5), small()
    fresh = copy.deepcopy(model.state_dict())
    left_out = load_weights(model, source.state_dict(), "file")
    assert left_out == ("0.weight", "6.weight", "6.bias")
    for name, value in model.state_dict().items():
        expected = fresh[name] if name in left_out else source.state_dict()[name]
        assert torch.equal(value, expected), name


def test_another_architecture_is_refused_and_nothing_loaded():
    model = small()
    before = copy.deepcopy(model.state_dict())
    state = small(width=16).state_dict()  # the same names
    with pytest.raises(UsageError, match=r"--weights x is of another architecture: \d+ of \d+ ten"):
        load_weights(model, state, "x")
    state = small().state_dict()
    state["extra"] = state.pop("6.bias")
    with pytest.raises(UsageError, match=r"missing \['6.bias'\], unexpected \['extra'\]"):
        load_weights(model, state, "x")
    with pytest.raises(UsageError, match="unexpected nothing"):
        load_weights(model, {}, "x")
    with pytest.raises(UsageError, match="2 of 2 tensors have another shape, such as weight"):
        load_weights(torch.nn.Linear(2, 3), torch.nn.Linear(4, 5).state_dict(), "x")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_files_that_cannot_be_used_are_named(tmp_path):
    cases = {
        "missing.pt": None,
        "missing.safetensors": None,
        "text.pt": b"hello",
        "text.safetensors": b"hello",
        "empty.pt": b"",
        "empty.safetensors": b"",
    }
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"--weights .*{name} cannot be read: .+"):
            read_weights(tmp_path / name)
    for value in ([1, 2], {"a": 1}, {1: torch.ones(1)}, torch.ones(2)):
        torch.save(value, tmp_path / "other.pt")
        with pytest.raises(UsageError, match="other.pt holds no state dict"):
            read_weights(tmp_path / "other.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_files_that_would_run_code_are_refused(tmp_path):
    trace = tmp_path / "trace"
    torch.save({"weight": Evil(trace)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil(trace)))
    torch.save(small(), tmp_path / "whole_model.pt")
    for name in ("a.pt", "b.pt", "whole_model.pt"):
        with pytest.raises(UsageError, match=f"{name} cannot be read: .*could run code"):
            read_weights(tmp_path / name)
    assert not trace.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert trace.exists()  # the bait was real


def test_default_weights_come_from_the_cache_without_executing_them(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    cached = tmp_path / "checkpoints" / url.rsplit("/", 1)[1]
    torch.save({"fc.weight": torch.ones(2)}, cached)
    assert read_initial_weights("default", "resnet18")["fc.weight"].tolist() == [1, 1]
    trace = tmp_path / "trace"
    torch.save({"fc.weight": Evil(trace)}, cached)
    with pytest.raises(
        UsageError, match="^--weights default: .*resnet18.*would run.*--weights FILE"
    ):
        read_initial_weights("default", "resnet18")
    assert not trace.exists()
    torch.save({"fc.bias": torch.zeros(1)}, tmp_path / "own.pt")
    assert list(read_initial_weights(str(tmp_path / "own.pt"), "resnet18")) == ["fc.bias"]


@pytest.mark.filterwarnings("ignore:The default weight init")
def test_unknown_models_get_near_matches():
    for name, near in (("resnet81", "resnet18"), ("ResNet-50", "resnet50"), ("vgg", "vgg1")):
        with pytest.raises(UsageError, match=f"--model {name} is not .*did you mean .*{near}"):
            torchvision_model(name, 10)
    with pytest.raises(UsageError, match="did you mean resnet18"):
        torchvision_model("qqqq", 10)
    with pytest.raises(UsageError, match="inception_v3 has several outputs"):
        torchvision_model("inception_v3", 10)
    model = torchvision_model("squeezenet1_1", 7)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


def test_inputs_that_a_model_cannot_take():
    model = small()
    model[1].eval()  # frozen
    modes = [module.training for module in model.modules()]
    check_forward(model, torch.zeros(2, 3, 8, 8), "small")
    assert [module.training for module in model.modules()] == modes
    assert int(model[3].num_batches_tracked) == 0
    with pytest.raises(UsageError, match="--model small cannot take 4x8x8 inputs: .*channels"):
        check_forward(model, torch.zeros(2, 4, 8, 8), "small")
    assert [module.training for module in model.modules()] == modes
    vit = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 16, num_classes=3)
    check_forward(vit, torch.zeros(1, 3, 32, 32), "vit")
    with pytest.raises(UsageError, match="--model vit cannot take 3x8x8 inputs: .*32"):
        check_forward(vit, torch.zeros(1, 3, 8, 8), "vit")


def test_a_classifiers_weights_start_the_backbone():
    for name, classifier in (
        ("lraspp_mobilenet_v3_large", "mobilenet_v3_large"),
        ("fcn_resnet50", "resnet50"),
    ):
        model = torchvision_model(name, 5, "segmentation", weights_backbone=None)
        state = torchvision_model(classifier, 1000).state_dict()
        head = {n: v.clone() for n, v in model.state_dict().items() if "classifier" in n}
        assert load_weights(model, state, "x") == ()
        for key, value in model.state_dict().items():
            plain = key.removeprefix("backbone.")
            source = state.get(plain, state.get(f"features.{plain}"))
            assert torch.equal(value, head[key] if key in head else source), key
        del state["conv1.weight" if "conv1.weight" in state else "features.0.0.weight"]
        with pytest.raises(UsageError, match="missing .*backbone"):
            load_weights(model, state, "x")


def test_weights_of_a_larger_classifier_are_refused():
    model = torchvision_model("fcn_resnet50", 5, "segmentation", weights_backbone=None)
    state = torchvision_model("resnet50", 1000).state_dict()
    state["layer3.6.conv1.weight"] = torch.zeros(256, 1024, 1, 1)  # as resnet101 has
    with pytest.raises(UsageError, match="--weights x is of another architecture"):
        load_weights(model, state, "x")
    with pytest.raises(UsageError, match="--weights backbone: not of ssdlite"):
        read_initial_weights("backbone", "ssdlite320_mobilenet_v3_large")


def test_weights_of_a_whole_segmentation_model_leave_the_head_fresh():
    options = dict(kind="segmentation", weights_backbone=None)
    model = torchvision_model("deeplabv3_mobilenet_v3_large", 5, **options)
    other = torchvision_model("deeplabv3_mobilenet_v3_large", 21, aux_loss=True, **options)
    left_out = load_weights(model, other.state_dict(), "x")
    assert left_out == ("classifier.4.weight", "classifier.4.bias")
    with pytest.raises(UsageError, match="of no_model; give --weights FILE or none"):
        read_initial_weights("backbone", "fcn_no_model")


def test_weights_out_of_reach_name_the_file_to_fetch(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", unreachable)
    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", unreachable)
    for weights, file in (("default", "lraspp_mobilenet_v3_large-"), ("backbone", "mobilenet_v3_")):
        with pytest.raises(UsageError, match=rf"no route to host.*fetch https://\S*{file}\S*\.pth"):
            read_initial_weights(weights, "lraspp_mobilenet_v3_large")
