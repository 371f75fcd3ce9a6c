"""Weights for deployment: plain names, plain BatchNorm, checked before they are called done."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from utils.batchnorm import revert_batchnorm
from utils.files import write_json


def export_model(
    directory: Path,
    model: torch.nn.Module,
    description: dict[str, Any],
    build: Callable[[], torch.nn.Module],
    example: torch.Tensor,
) -> Path:
    """Write RUN/model/model.safetensors and model.json; returns the folder.

    The file is loaded again, strictly, into a plain model from `build`, which must give the same
    output for `example` as the trained one, both without autocast.

    Args:
        model: unwrapped, as trained (BatchNorm converted or not).
        description: for model.json: architecture, classes, normalisation.
        build: makes the architecture anew, without any conversion.
        example: one input batch.
    """
    folder = directory / "model"
    folder.mkdir(parents=True, exist_ok=True)
    plain = copy.deepcopy(model).to(example.device).eval()
    plain.__dict__.pop("forward", None)  # Accelerate's, under autocast: the class's own is exact
    revert_batchnorm(plain)
    state = {  # clones: the format refuses tensors that share memory (tied weights)
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in plain.state_dict().items()
    }
    temporary = folder / ".model.tmp.safetensors"
    try:
        save_file(state, temporary)
        fresh = build().to(example.device, next(plain.parameters()).dtype).eval()
        own, loaded = fresh.state_dict(), load_file(temporary)
        if own.keys() != loaded.keys():
            raise RuntimeError(f"the weights' names differ: {sorted(own.keys() ^ loaded.keys())}")
        own.update(loaded)  # in the model's own dict: MNASNet looks for a version in its metadata
        fresh.load_state_dict(own)
        with torch.no_grad():
            pair = zip(tree_leaves(plain(example)), tree_leaves(fresh(example)), strict=True)
        for expected, output in pair:
            if not torch.allclose(expected, output, rtol=1e-3, atol=1e-4, equal_nan=True):
                off = (expected - output).abs().max().item()
                raise RuntimeError(f"the exported weights give other outputs ({off:.2e} off)")
        os.replace(temporary, folder / "model.safetensors")
    finally:
        temporary.unlink(missing_ok=True)
    write_json(folder / "model.json", description)
    return folder
