"""What the other utils need of torch.distributed; everything works without a process group too."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from utils.errors import ExplainedError, UsageError

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

    An exception of rank 0 ends the whole job instead of leaving the others waiting: they raise
    the same UsageError, or an ExplainedError that names rank 0.
    """
    result, error, failure = None, None, None
    if rank() == 0:
        try:
            result = function()
        except Exception as exception:
            error = exception
            usage = isinstance(error, UsageError)
            failure = (usage, f"{error}" if usage else f"rank 0: {type(error).__name__}: {error}")
    result, failure = broadcast_object((result, failure))
    if error is not None:
        raise error
    if failure is not None:
        usage, message = failure
        raise UsageError(message) if usage else ExplainedError(message)
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
