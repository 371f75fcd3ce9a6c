"""Several machines in one job: what the first process of each one does for the others there."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from utils import hub
from utils.distributed import (
    broadcast_object,
    gather_objects,
    on_main_process,
    rank,
    world_size,
)
from utils.errors import ExplainedError, UsageError
from utils.start import local_world_size

T = TypeVar("T")


def is_local_main() -> bool:
    """Whether this is the first process of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def on_local_main_processes(function: Callable[[], T]) -> list[T]:
    """Run `function` on the first process of each machine, at once, while the others wait.

    Returns all results in the order of the machines, on every process. An exception on one machine
    ends the whole job: the others raise the same UsageError, or an ExplainedError with its rank.
    """
    result, error, failure = None, None, None
    if is_local_main():
        try:
            result = function()
        except Exception as exception:
            error = exception
            usage = isinstance(error, UsageError)
            text = f"{error}" if usage else f"rank {rank()}: {type(error).__name__}: {error}"
            failure = (usage, text)
    answers = gather_objects((is_local_main(), result, failure))
    if error is not None:
        raise error
    for _, _, failure in answers:
        if failure is not None:
            usage, message = failure
            raise UsageError(message) if usage else ExplainedError(message)
    return [result for is_main, result, _ in answers if is_main]  # type: ignore[misc]


def is_first_on_disk(directory: Path, prefix: str) -> bool:
    """Whether this process is the one to write to `directory` for all that share its disk.

    That is rank 0, and the first process of each machine that sees a disk of its own there. Each
    leaves a file in it for a moment, whose name begins with `prefix`.
    """
    token = broadcast_object(uuid.uuid4().hex)
    own_rank = rank()
    leaders = on_local_main_processes(lambda: own_rank)

    def marker(of: int) -> Path:
        return directory / f"{prefix}{token}_{of}"

    def leave_marker() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        marker(own_rank).touch()

    def see_first_marker() -> int:
        return next(other for other in leaders if marker(other).exists())

    on_local_main_processes(leave_marker)
    seen = on_local_main_processes(see_first_marker)
    on_local_main_processes(lambda: marker(own_rank).unlink())
    return is_local_main() and seen[leaders.index(own_rank)] == own_rank


def find_on_each_machine(name: str, find: Callable[[], T]) -> T:
    """What `find` returns on the main process, on all of them.

    For data that stay on the disk: where `name` is a hub data set, it is in every machine's cache
    before, by one download on each. Raises UsageError when it cannot be had there.
    """

    def fetch() -> None:
        try:
            hub.open_dataset(name)
        except hub.HubUnreachable as error:
            raise UsageError(f"--dataset {name}: {error}. {hub.cache_hint(name)}") from error

    if world_size() > local_world_size() and on_main_process(lambda: hub.is_hub_name(name)):
        on_main_process(fetch)  # first: the machines may share a cache
        on_local_main_processes(lambda: fetch() if rank() > 0 else None)
    return on_main_process(find)
