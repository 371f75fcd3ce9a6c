"""Run the real scripts in the pool's worker processes, on small data made here."""

import importlib
import json
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision

from utils.small_images import ImageData, Split


class NarrowResNet18(torchvision.models.ResNet):
    """torchvision's ResNet-18 with an eighth of the channels."""

    def __init__(self, num_classes: int):
        super().__init__(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2])
        self.fc = torch.nn.Linear(64, num_classes)

    def _make_layer(self, block, planes, *args, **kwargs):
        return super()._make_layer(block, planes // 8, *args, **kwargs)


def small_data(num_train: int, num_test: int, unlabelled: float = 0.0, size: int = 8) -> ImageData:
    """Made-up images of 4 classes; a share of the labels is -100 (no label)."""
    generator = torch.Generator().manual_seed(7)

    def split(count: int) -> Split:
        labels = torch.randint(4, (count,), generator=generator)
        images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
        images[:, 0] = (images[:, 0] // 4 + labels[:, None, None].to(torch.uint8) * 48).clamp(
            max=255
        )
        labels[torch.rand(count, generator=generator) < unlabelled] = -100
        return Split(images, labels)

    mean, std = [0.4, 0.5, 0.5], [0.3, 0.3, 0.3]
    train, test = split(num_train), split(num_test)
    return ImageData("made-up", train, test, list("abcd"), True, mean, std, "fingerprint")


@contextmanager
def small_cifar(data: ImageData | None, dtype=torch.float64, narrow=True):
    """train.cifar on made-up data (None: what its flags say), with a narrow model."""
    cifar = importlib.import_module("train.cifar")
    torch.set_default_dtype(dtype)
    saved = cifar.torchvision_model, cifar.load_small_images
    if narrow:
        cifar.torchvision_model = lambda name, num_classes: NarrowResNet18(num_classes)
    if data is not None:
        cifar.load_small_images = lambda *args, **kwargs: data
    try:
        yield cifar
    finally:
        cifar.torchvision_model, cifar.load_small_images = saved


def run_cifar(config: dict, data: ImageData | None = None, **how) -> dict:
    """cifar.py's main in this process; rank 0 returns what the run left behind."""
    with small_cifar(data, **how) as cifar:
        code = cifar.main(cifar.Config(**{"tracker": "none", **config}))
    if dist.is_initialized() and dist.get_rank() > 0:
        return {}
    return {"code": code, **read_run(Path(config["output_dir"]))}


def read_run(directory: Path) -> dict:
    """config, status, metrics (by step) and the newest checkpoint's tensors of a run."""
    metrics: dict[int, dict] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        step = metrics.setdefault(entry.pop("step"), {})
        assert not step.keys() & entry.keys(), f"duplicate keys in {entry}"
        step.update(entry)
    newest = sorted((directory / "checkpoints").glob("step_*"))[-1]
    training = torch.load(newest / "training.pt", weights_only=True)
    return {
        "config": json.loads((directory / "config.json").read_text()),
        "status": json.loads((directory / "status.json").read_text()),
        "metrics": metrics,
        "model": torch.load(newest / "model.pt", weights_only=True),
        "momentum": {
            index: state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"]
            for index, state in training["optimizer"]["state"].items()
        },
    }


def assert_same_weights(expected: dict, actual: dict) -> None:
    """The final weights and momentum of two runs, bit for bit."""
    for kind in ("model", "momentum"):
        for name, value in expected[kind].items():
            assert torch.equal(value, actual[kind][name]), name


def relative_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value."""
    if not expected.is_floating_point():
        return float((expected != actual).any())
    return float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-300))
