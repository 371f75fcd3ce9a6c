"""Models for deployment: plain names, plain BatchNorm, checked before they are called done.

A file is written under another name, loaded again and compared with the model in torch, and only
then renamed into RUN/model/. Nothing in it needs this repository or a process group.
"""

import copy
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from utils.batchnorm import revert_batchnorm
from utils.console import say
from utils.distributed import on_main_process, rank
from utils.errors import FINISHED, ExplainedError, UsageError
from utils.files import write_json
from utils.sharding import is_sharded, whole
from utils.window import Batch

FILES = {"safetensors": "model.safetensors", "onnx": "model.onnx", "torch-export": "model.pt2"}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
NUM_SAMPLES = 512  # of the validation split, for the comparison of --export
# Of outputs, as torch.allclose has them; of metrics, so that a tie or two may end otherwise.
OUTPUT_TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
METRIC_TOLERANCE = {"rel_tol": 1e-3, "abs_tol": 5e-3}


def check_packages(format: str) -> None:
    """UsageError, with the line that installs them, where a format's packages are missing."""
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if format == "onnx" and missing:
        raise UsageError(
            f"--export onnx needs {', '.join(missing)}: pip install {' '.join(ONNX_PACKAGES)}"
        )


def describe_input(
    mean: list[float], std: list[float], image_size: int | None = None, crop_pct: float = 1.0
) -> dict[str, Any]:
    """For model.json: what becomes of an image before it is the model's input (B, 3, H, W).

    Args:
        mean, std: by channel, of images in [0, 1].
        image_size: height and width; None: any, each image at its own size.
        crop_pct: share of the shorter side that the middle square takes, which is then resized.
    """
    about = {"channel_order": "RGB", "value_range": [0.0, 1.0], "mean": mean, "std": std}
    if image_size is None:
        return about
    resize = {"interpolation": "bilinear", "antialias": True}
    return {"image_size": image_size, "crop_pct": crop_pct, **resize, **about}


def export_model(
    directory: Path,
    model: nn.Module,
    description: dict[str, Any],
    build: Callable[[], nn.Module],
    example: torch.Tensor,
    format: str = "safetensors",
    check: Callable[[nn.Module, nn.Module], None] | None = None,
) -> Path:
    """Write RUN/model/model.safetensors, model.onnx or model.pt2, and model.json; the folder.

    All processes call it, as each may hold a part of the model only; the main one writes. The file
    is loaded again (weights strictly, into a plain model from `build`), and must give the same
    outputs for `example` as the trained model, both without autocast.

    Args:
        model: unwrapped, as trained (BatchNorm converted or not).
        description: for model.json: architecture, classes, preprocessing. Without an "image_size",
            onnx and torch-export take images of any height and width; batches are of any size.
        build: makes the architecture anew, without any conversion.
        example: one input batch.
        format: safetensors, onnx or torch-export.
        check: called with the trained model, plain, and the file's, before the file is renamed;
            raises where it will not do.
    """
    parts = model.state_dict()
    state = whole(parts, keep=rank() == 0) if is_sharded(parts) else None

    def write() -> Path:
        if state is not None:  # it may be too large for this process's device
            plain, images = _load(build(), state, torch.device("cpu")), example.cpu()
        else:
            plain, images = copy.deepcopy(model).to(example.device).eval(), example
            # Laid out in memory as the loaded one: other rounding may change the boxes' order.
            plain = plain.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
            plain.__dict__.pop("forward", None)  # Accelerate's, under autocast: the own is exact
            revert_batchnorm(plain)
        return _write_checked(directory, plain, description, build, images, format, check)

    return on_main_process(write)


def _write_checked(
    directory: Path,
    plain: nn.Module,
    description: dict[str, Any],
    build: Callable[[], nn.Module],
    example: torch.Tensor,
    format: str,
    check: Callable[[nn.Module, nn.Module], None] | None,
) -> Path:
    """As `export_model`, of a plain model in this process alone."""
    path = directory / "model" / FILES[format]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        if format == "safetensors":
            save_file(_state_of(plain), temporary)
            loaded = _load(build(), load_file(temporary), example.device)
        else:
            fresh = _load(build(), _state_of(plain), example.device)
            write = _write_onnx if format == "onnx" else _write_program
            loaded = write(fresh, example, temporary, any_size="image_size" not in description)
        with torch.no_grad():
            Compared(plain, loaded)(example)
        if check is not None:
            check(plain, loaded)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    write_json(path.parent / "model.json", description)
    return path.parent


def export_checkpoint(
    format: str,
    export: Callable[..., Path],
    example: torch.Tensor,
    loader: Iterable[Batch],
    evaluate: Callable[[nn.Module, Iterable[Batch]], dict[str, float]],
) -> int:
    """--export: `export_model` on the CPU, compared on validation samples too; the exit code.

    Args:
        export: `export_model` up to the example.
        loader: of the validation split; its first samples are read.
        evaluate: metrics of a model on batches, on the CPU.
    """
    samples = FirstSamples(loader, NUM_SAMPLES)

    def check(plain: nn.Module, loaded: nn.Module) -> None:
        expected = evaluate(plain, samples)
        compared = Compared(plain.eval(), loaded)
        found = evaluate(compared, samples)
        say(
            f"export    {format}, {found['val/num_examples']} validation samples: outputs differ "
            f"by {compared.difference:.1e} at most (the largest is {compared.size:.3g})"
        )
        for name, value in expected.items():
            if isinstance(value, float) and name.count("/") == 1:
                say(f"{name:<20}in torch {value:.6f}, of the file {found[name]:.6f}")
            if not math.isclose(value, found[name], **METRIC_TOLERANCE):
                raise ExplainedError(
                    f"the exported model has another {name}: {found[name]}, in torch {value}"
                )

    path = export(example.cpu(), format, check) / FILES[format]
    say(f"exported  {path} ({path.stat().st_size / 1e6:.1f} MB), model.json beside it")
    return FINISHED


class Compared(nn.Module):
    """The loaded model, whose outputs are held against those of the model in torch at each call.

    Attributes:
        difference: the largest so far, absolute.
        size: the largest absolute output so far.
    """

    def __init__(self, expected: nn.Module, loaded: nn.Module):
        super().__init__()
        # In a tuple, so not parts of this one: an exported program refuses train() and eval().
        self.both = expected, loaded
        self.difference = self.size = 0.0

    def forward(self, *inputs: Any) -> Any:
        expected, output = (model(*inputs) for model in self.both)
        for one, other in zip(tree_leaves(expected), tree_leaves(output), strict=True):
            if one.shape != other.shape:  # boxes, of which there are any number
                counts = f"{len(other)} in place of {len(one)}"
                raise ExplainedError(f"the exported model gives other outputs ({counts})")
            if not one.numel():
                continue
            difference = (one - other).abs().max().item()
            if not torch.allclose(one, other, **OUTPUT_TOLERANCE, equal_nan=True):
                raise ExplainedError(f"the exported model gives other outputs ({difference:.2e})")
            self.difference = max(self.difference, difference)
            self.size = max(self.size, one.abs().max().item())
        return output


class FirstSamples:
    """The first `count` samples of a loader, in its batches; may be read several times."""

    def __init__(self, loader: Iterable[Batch], count: int):
        self.loader = loader
        self.count = count

    def __iter__(self) -> Iterator[Batch]:
        missing = self.count
        for batch in self.loader:
            yield {name: values[:missing] for name, values in batch.items()}
            missing -= len(batch["id"])
            if missing <= 0:
                break


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """On the CPU, as clones: safetensors refuses tensors that share memory (tied weights)."""
    return {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }


def _load(fresh: nn.Module, state: dict[str, torch.Tensor], device: torch.device) -> nn.Module:
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    fresh = fresh.to(device, dtype).eval()
    own = fresh.state_dict()
    if own.keys() != state.keys():
        raise RuntimeError(f"the weights' names differ: {sorted(own.keys() ^ state.keys())}")
    own.update(state)  # in the model's own dict: MNASNet looks for a version in its metadata
    fresh.load_state_dict(own)
    return fresh


# ---- Graphs ----------------------------------------------------------------------------------


def _example_and_dimensions(example: torch.Tensor, any_size: bool) -> tuple[torch.Tensor, dict]:
    """What a graph is traced with, and its free dimensions by number.

    Of two samples: a batch of one would be taken for a constant. With `any_size` height and width
    are free too, of images (B, 3, H, W), or the length, of tokens (B, T).
    """
    from torch.export import Dim  # heavy: imported where used

    free: dict[int, Any] = {0: Dim("batch")}
    if any_size:
        free |= {d: Dim.DYNAMIC for d in range(2 if example.ndim == 4 else 1, example.ndim)}
    return example[:1].repeat(2, *[1] * (example.ndim - 1)).contiguous(), free


def _write_program(model: nn.Module, example: torch.Tensor, path: Path, any_size: bool):
    example, free = _example_and_dimensions(example, any_size)
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=(free,))
    torch.export.save(program, path)
    return torch.export.load(path).module()


def _write_onnx(model: nn.Module, example: torch.Tensor, path: Path, any_size: bool):
    example, free = _example_and_dimensions(example, any_size)
    with torch.no_grad():
        outputs = model(example)
        names = list(outputs) if isinstance(outputs, dict) else ["output"]
        torch.onnx.export(
            model,
            (example,),
            path,
            input_names=["input"],
            output_names=names,
            dynamic_shapes=(free,),
            external_data=False,  # one file
            dynamo=True,
            verbose=False,
        )
    return OnnxModel(path, outputs)


class OnnxModel(nn.Module):
    """An ONNX file in onnxruntime, on the CPU, called like the model that it was made from."""

    def __init__(self, path: Path, outputs: Any):
        super().__init__()
        import onnxruntime  # type: ignore  # an optional package

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.structure = tree_flatten(outputs)[1]

    def forward(self, images: torch.Tensor) -> Any:
        outputs = self.session.run(None, {"input": images.contiguous().numpy()})
        return tree_unflatten([torch.from_numpy(values) for values in outputs], self.structure)
