"""Where this process stands in the current update: written by the work, read by utils/hang.py.

A mark costs an assignment. The utils that do the work set them; a script may set more, where
something of its own takes long.
"""

from collections.abc import Callable
from typing import NamedTuple

# In the order of one update.
PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "reduce",
    "step",
    "evaluate",
    "evaluate reduce",
    "save",
    "finish",
)


class Mark(NamedTuple):
    count: int  # of all marks so far: another number is progress
    step: int
    micro_step: int  # from 1; in an evaluation the batch; 0 where there is none
    phase: str


_latest, _first_step = Mark(0, 0, 0, "start"), 0
_listener: Callable[[str], None] | None = None


def mark(phase: str, step: int | None = None, micro_step: int = 0) -> None:
    """This process is about to do `phase`, one of PHASES; of the same update when none is given."""
    global _latest, _first_step
    if step and not _first_step:
        _first_step = step
    _latest = Mark(_latest.count + 1, _latest.step if step is None else step, micro_step, phase)
    if _listener is not None:
        _listener(phase)


def listen(listener: Callable[[str], None] | None) -> None:
    """Have `listener(phase)` called at each mark (utils/profile.py); None: no more."""
    global _listener
    _listener = listener


def latest() -> Mark:
    return _latest


def first_step() -> int:
    """The first update of this process, in which things are compiled; 0 before it."""
    return _first_step


def start() -> None:
    """A loop begins."""
    global _first_step
    _first_step = 0
    mark("start", 0)
