"""What the other utils need of torch.distributed; everything works without a process group too."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from utils.errors import ExplainedError, UsageError

T = TypeVar("T")

NOTE_SECONDS = 5.0  # for the process that keeps the notes to answer
_collective_timeout = timedelta(hours=1)  # outlasts a download by rank 0 while the others wait


def collective_timeout(at_least: timedelta | None = None) -> timedelta:
    """After how long a collective gives up; the same for all process groups. Raised on request."""
    global _collective_timeout
    if at_least is not None:
        _collective_timeout = max(_collective_timeout, at_least)
    return _collective_timeout


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


def start_all_reduce_sum(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to sum over all processes, in place; the function returned waits, and gives `tensor`.

    An accelerator waits, not the host.
    """
    if world_size() == 1:
        return lambda: tensor
    work = dist.all_reduce(tensor, async_op=True)

    def finish() -> torch.Tensor:
        nonlocal work
        if work is not None:
            work.wait()
            work = None
        return tensor

    return finish


def gather_objects(value: T) -> Sequence[T]:
    """Every process's value, in the order of ranks, on every process."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Of the collectives of a process group; torch 2.14 has a public name for it."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


class NoteBoard:
    """Short notes between the processes outside of any collective, so when one hangs too.

    They are kept by the store in which the processes have met. Where that is gone, with the
    launcher or with rank 0, or out of reach, nothing is found and nothing raised.
    """

    def __init__(self, name: str):
        self._store: Any = None
        self._turn = threading.Lock()  # the store's connection takes one call at a time
        self._overdue = threading.Thread()
        if world_size() > 1:
            try:
                store = dist.distributed_c10d._get_default_store()
                store = store.clone()  # a connection of its own: the other one may be waiting
                store.set_timeout(timedelta(seconds=NOTE_SECONDS))
                self._store = dist.distributed_c10d.PrefixStore(name, store)
            except RuntimeError:  # started by MPI, without a store
                pass

    def post(self, key: str, text: str) -> None:
        self._call(lambda store: store.set(key, text), None)

    def read(self, key: str) -> str | None:
        """The note, or None."""
        return self._call(lambda store: store.get(key).decode() if store.check([key]) else None)

    def is_first(self, key: str) -> bool:
        """Whether no process has asked this before."""
        return self._call(lambda store: store.add(key, 1) == 1, world_size() == 1)

    def is_lost(self) -> bool:
        return self._store is None or self._overdue.is_alive()

    def _call(self, action: Callable[[Any], Any], otherwise: Any = None) -> Any:
        """The action's result; while the network is cut it waits for ever, in a thread."""
        results: list[Any] = []

        def call() -> None:
            try:
                if self._store is not None:
                    results.append(action(self._store))
            except (RuntimeError, ValueError):
                self._store = None
            finally:
                self._turn.release()

        # Both the script and the thread that watches for hangs come here.
        if self.is_lost() or not self._turn.acquire(timeout=NOTE_SECONDS):
            return otherwise
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(NOTE_SECONDS)
        if thread.is_alive():
            self._overdue = thread
        return results[0] if results else otherwise
