"""Batch arithmetic: how the recipe's global batch is laid out over processes and micro-steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.distributed import NoteBoard, rank
from utils.errors import ExplainedError, UsageError
from utils.marks import latest
from utils.metrics import peak_memory_bytes

# Messages of RuntimeErrors that mean it too: CPU (Linux, Windows), MPS and CUDA, cuBLAS and cuDNN.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class BatchPlan:
    """num_processes * micro_batch_size * accumulation = global_batch_size."""

    global_batch_size: int
    num_processes: int
    micro_batch_size: int
    accumulation: int


def plan_batches(global_batch_size: int, micro_batch_size: int, num_processes: int) -> BatchPlan:
    """Derive the accumulation; micro_batch_size 0 means global/processes, no accumulation.

    Raises UsageError, naming the values that work, when the sizes do not divide.
    """
    if global_batch_size < 1 or micro_batch_size < 0:
        raise UsageError(
            f"global_batch_size={global_batch_size} and micro_batch_size={micro_batch_size} "
            "must be positive (micro_batch_size 0: no accumulation)"
        )
    unit = (micro_batch_size or 1) * num_processes
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        product = f"{micro_batch_size} x {num_processes} processes"
        raise UsageError(
            f"global_batch_size={global_batch_size} is not a multiple of "
            + (f"micro_batch_size={product}" if micro_batch_size else f"{num_processes} processes")
            + f"; use {above}"
            + (f" or {below}" if below else "")
        )
    micro = micro_batch_size or global_batch_size // num_processes
    accumulation = global_batch_size // (micro * num_processes)
    return BatchPlan(global_batch_size, num_processes, micro, accumulation)


class OutOfMemory(ExplainedError):
    """The micro-batch does not fit; a restart would meet it again."""


@contextmanager
def explain_out_of_memory(
    plan: BatchPlan, bn_group: int, directory: Path | None = None
) -> Iterator[None]:
    """Turn running out of memory into one line, from one process, that names the flag to change.

    Args:
        bn_group: examples that share BatchNorm statistics; 0 for a model without BatchNorm.
        directory: of the run: what holds the memory is written there.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        kinds = (torch.OutOfMemoryError, MemoryError)
        if not isinstance(error, kinds) and not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        place = latest()
        is_first = NoteBoard("memory").is_first(f"update {place.step}")
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        details = [f"update {place.step}, micro-step {place.micro_step}, {place.phase}"]
        details.append(f"peak memory {peak_memory_bytes(device) / 2**30:.2f} GiB")
        if is_first and directory is not None:
            details += _write_summary(directory / f"memory_rank_{rank()}.txt", error)
        explained = OutOfMemory(
            f"out of memory with micro_batch_size={plan.micro_batch_size} "
            f"({'; '.join(details)}): {smaller_micro_batch(plan, bn_group)}"
        )
        explained.quiet = not is_first
        raise explained from error


def _write_summary(path: Path, error: BaseException) -> list[str]:
    """What holds the memory, where torch knows it (CUDA); the path, if it could be written."""
    parts = [str(error)]
    if torch.cuda.is_initialized():
        parts.append(torch.cuda.memory_summary())
    try:
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError:
        return []
    return [str(path)]


def smaller_micro_batch(plan: BatchPlan, bn_group: int) -> str:
    """How to need less memory with the same recipe: the largest micro-batch up to half of this."""
    for micro in range(plan.micro_batch_size // 2, 0, -1):
        per_step = micro * plan.num_processes
        keeps_group = not bn_group or (
            micro % bn_group == 0 or (bn_group % micro == 0 and per_step % bn_group == 0)
        )
        if plan.global_batch_size % per_step == 0 and keeps_group:
            # `--bn-group device` or `global` would mean another group in the new layout.
            group = f" --bn-group {bn_group}" if bn_group else ""
            return f"--micro-batch-size {micro}{group} needs less and keeps the recipe"
    if plan.micro_batch_size == 1:
        return "one example is the least; use a smaller model, smaller inputs or a larger GPU"
    return (
        f"no smaller one keeps bn_group={bn_group} on {plan.num_processes} processes; use more "
        "processes, or a smaller --bn-group (another recipe)"
    )
