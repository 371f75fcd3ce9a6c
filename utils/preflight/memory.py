"""The check of the memory: what weights, gradients and optimizer take under each engine."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator

from utils.distributed import gather_objects
from utils.engines import engine_name
from utils.errors import UsageError
from utils.preflight.job import FAIL, PASS, WARN, Finding, Job, Steps
from utils.preflight.report import size_text
from utils.preflight.state import inner_optimizer
from utils.sharding import numel
from utils.start import local_world_size

FILES = {"HSDP": "hsdp.yaml", "FSDP2": "fsdp2.yaml"}  # the one that sends less first
SHARE = 2 / 3  # of the memory, at most: activations and a sharded block, whole, need the rest


class Bytes(NamedTuple):
    """Of a whole model; activations come on top."""

    weights: int
    gradients: int
    optimizer: int


def memory(job: Job) -> Steps:
    """Bytes of the model for each process under each engine, and which of them fit."""
    everyone = yield _facts(job.accelerator)
    return _judge(job.accelerator, job.plain_model, inner_optimizer(job), everyone)


def check_memory(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """UsageError where the model cannot fit, before `prepare` sends it to the device.

    All processes call it, and the smallest device decides for all.
    """
    found = _judge(accelerator, model, optimizer, gather_objects(_facts(accelerator)))
    if found.result == FAIL:
        raise UsageError(f"{found.seen}; {found.remedy}")


def count_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Of a model, sharded or not, and of what its optimizer will keep after the first update."""

    def size(tensor: torch.Tensor) -> int:
        return numel(tensor) * tensor.element_size()

    weights = sum(size(tensor) for tensor in [*model.parameters(), *model.buffers()])
    gradients = sum(size(p) for p in model.parameters() if p.requires_grad)
    # Adam and its like keep means of gradients and of squares; SGD its momentum.
    kept = max(
        2 + bool(group.get("amsgrad")) if "betas" in group else bool(group.get("momentum"))
        for group in optimizer.param_groups
    )
    return Bytes(weights, gradients, kept * gradients)


def bytes_per_process(sizes: Bytes, num_processes: int, local: int) -> dict[str, float]:
    """By engine, the one that sends least first.

    ZeRO's optimizer steps a copy of its part of the weights, and `prepare` begins with the whole
    model on each device.

    Args:
        local: processes between which HSDP shards: those of a machine.
    """
    weights, gradients, optimizer = sizes
    return {
        "DDP": weights + gradients + optimizer,
        "ZeRO-2": weights + (weights + gradients + optimizer) / num_processes,
        "HSDP": (weights + gradients + optimizer) / local,
        "FSDP2": (weights + gradients + optimizer) / num_processes,
        "ZeRO-3": max(weights, (2 * weights + gradients + optimizer) / num_processes),
    }


def judge_memory(
    sizes: Bytes, engine: str, num_processes: int, local: int, total: int, on_cpu: bool
) -> Finding:
    """Whether `engine` fits the `total` bytes of each process's device, and which one would."""
    needed = bytes_per_process(sizes, num_processes, local)
    if engine != "HSDP" and local in (1, num_processes):  # it would be DDP, or FSDP2
        del needed["HSDP"]
    seen = ", ".join(f"{name} {size_text(size)}" for name, size in sizes._asdict().items())
    if num_processes > 1:
        each = ", ".join(f"{size_text(size)} with {name}" for name, size in needed.items())
        seen += f"; a process holds {each}"
    seen += f"; activations come on top; {size_text(total)} there"
    if needed[engine] <= SHARE * total:
        return Finding(PASS, seen)
    running = engine if num_processes > 1 else "one process"
    if needed[engine] <= total:
        result, seen = WARN, f"{running} leaves little for activations: {seen}"
    else:
        result, seen = FAIL, f"{running} does not fit: {seen}"
    if on_cpu:
        return Finding(result, seen, "fewer processes on the machine, or a smaller model")
    for name, file in FILES.items():
        if name != engine and needed.get(name, math.inf) <= SHARE * total:
            return Finding(
                result, seen, f"{name} fits: accelerate_configs/{file} (language_model.py)"
            )
    enough = math.ceil(sum(sizes) / (SHARE * total))
    remedy = f"FSDP2 (accelerate_configs/fsdp2.yaml) on {enough} GPUs or more, or a smaller model"
    return Finding(result, seen, remedy)


def _facts(accelerator: Accelerator) -> tuple[int, int]:
    """Bytes of this process's device, and between how many processes HSDP shards, or would."""
    sizes: Any = accelerator.parallelism_config
    is_hsdp = engine_name(accelerator) == "HSDP"
    shard = sizes.dp_shard_size if is_hsdp else local_world_size()
    return _device_bytes(accelerator.device), shard


def _judge(accelerator: Accelerator, model, optimizer, everyone: Sequence) -> Finding:
    """Of all processes' facts: the smallest device decides."""
    total, shard = (min(values) for values in zip(*everyone, strict=True))
    return judge_memory(
        count_bytes(model, optimizer),
        engine_name(accelerator),
        accelerator.num_processes,
        shard,
        total,
        on_cpu=accelerator.device.type == "cpu",
    )


def _device_bytes(device: torch.device) -> int:
    """Memory of this process's device; a CPU's is shared with the others on the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total // local_world_size()
