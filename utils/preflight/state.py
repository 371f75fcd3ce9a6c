"""Fingerprints of a model, and everything that training changes put back afterwards."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from utils.preflight.job import Job
from utils.sharding import own_part
from utils.zero import ZeroOptimizer

CHUNK = 1 << 22  # elements at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()


def checksum(tensor: Tensor) -> str:
    """Of the bits, in their order, of this process's part; dtype and shape are part of it."""
    tensor = own_part(tensor).detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().reshape(-1)
    size = bits.element_size()
    if size * bits.numel() % 8 == 0:  # by words of 8 bytes, for speed
        aligned = size * bits.storage_offset() % 8 == 0
        bits = (bits if aligned else bits.clone()).view(torch.int64)
    else:
        bits = bits.view(INTEGERS[size])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        odd = torch.arange(2 * start + 1, 2 * (start + len(part)) + 1, 2, device=part.device)
        total += odd.mul_(part).sum()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {'x'.join(map(str, tensor.shape))} {int(total) & (1 << 64) - 1:016x}"


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Checksum of every parameter and buffer by its name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def inner_optimizer(job: Job) -> torch.optim.Optimizer:
    """torch's own, inside Accelerate's and DeepSpeed's."""
    optimizer = job.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def zero_parts(job: Job) -> list[Tensor]:
    """What DeepSpeed holds of the weights beside the model's parameters."""
    return job.optimizer.held() if isinstance(job.optimizer, ZeroOptimizer) else []


def generator_states() -> dict[str, Any]:
    """Of the global generators: torch's, of Python and, where it is in use, of numpy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def restored(job: Job) -> Iterator[None]:
    """Afterwards the weights, buffers, optimizer, generators and counters are as before."""
    model, optimizer, accelerator = job.plain_model, inner_optimizer(job), job.accelerator
    tensors = [*zero_parts(job), *model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    modes = {module: module.training for module in model.modules()}
    state = {p: {k: _copy(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    generators, start_step = generator_states(), job.sampler.start_step
    loaders = [loader.generator for loader in (job.train_loader.loader, job.test_loader)]
    own = [generator.get_state() if generator is not None else None for generator in loaders]
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    step, synchronises = accelerator.step, accelerator.gradient_state.sync_gradients
    try:
        yield
    finally:
        zero_parts(job)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for module, mode in modes.items():
            module.training = mode
        optimizer.zero_grad()
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - saved.keys() - {"params"}:
                del group[key]
            group.update(saved)
        job.bn_plan.discard_statistics()
        set_generator_states(generators)
        job.sampler.start_step = start_step
        for generator, saved in zip(loaders, own, strict=True):
            if generator is not None and saved is not None:
                generator.set_state(saved)
        if accelerator.scaler is not None and scaler:
            accelerator.scaler.load_state_dict(scaler)
        accelerator.step = step
        accelerator.gradient_state._set_sync_gradients(synchronises)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """Dropout off, all else as in training: modules by their names, functions, rates."""
    with ExitStack() as stack:
        for name in DROPOUTS:
            same = mock.patch.object(nn.functional, name, lambda input, *args, **kwargs: input)
            stack.enter_context(same)
        for module in (module for model in models for module in model.modules()):
            kind = type(module).__name__.lower()
            if "drop" in kind or "stochasticdepth" in kind:
                stack.callback(setattr, module, "training", module.training)
                module.training = False
            rate = module.__dict__.get("dropout")
            if isinstance(rate, float):
                stack.callback(setattr, module, "dropout", rate)
                module.dropout = 0.0  # type: ignore[assignment]
        yield


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Without the autocast that `prepare` has put around the model's forward, and no TF32."""
    patched = model.__dict__.pop("forward", None)
    precision = torch.get_float32_matmul_precision()
    tf32 = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
        if patched is not None:
            model.forward = patched
