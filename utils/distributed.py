"""What the other utils need of torch.distributed; everything works without a process group too."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from utils.errors import UsageError

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every process (what the others pass is ignored)."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main_process(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 while the others wait, and give its result to every process.

    An exception of rank 0 is raised on every process (UsageError stays UsageError), so that a
    missing file or a failed download ends the whole job instead of leaving the others waiting.
    """
    result, error = None, None
    if rank() == 0:
        try:
            result = function()
        except Exception as exception:
            error = exception
    shared = None if error is None else (isinstance(error, UsageError), f"{error}", type(error))
    result, shared = broadcast_object((result, shared))
    if error is not None:
        raise error
    if shared is not None:
        usage, message, kind = shared
        raise UsageError(message) if usage else RuntimeError(f"rank 0: {kind.__name__}: {message}")
    return result  # type: ignore[return-value]


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all processes, in place; returns `tensor`."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_objects(value: T) -> Sequence[T]:
    """Every process's value, in the order of ranks, on every process."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
