"""Find out that a run hangs, and on which rank, while every process may be stuck in a collective.

Each process posts where it stands (utils/marks.py) outside of any collective. A run hangs when no
process has set a mark for the timeout; the one that stands furthest behind is the likely cause.
"""

import json
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from utils.distributed import NoteBoard, rank, world_size
from utils.marks import PHASES, Mark, first_step, latest

# The first pass compiles, a save waits for the disk, the end exports: these may take three times
# as long, everything else sets marks as it goes.
PATIENCE = 3.0
PATIENT_PHASES = ("start", "save", "finish")
FIRST_PASS_PHASES = ("forward", "reduce", "step", "evaluate")
SILENT_POSTS = 5  # intervals without a post: that process is stopped or dead


class Place(NamedTuple):
    """Where a process stands, as it posts it."""

    posts: int
    step: int
    micro_step: int
    phase: str
    idle_seconds: float  # since its last mark
    may_take: float  # seconds

    def __str__(self) -> str:
        micro = f", micro-step {self.micro_step}" if self.micro_step else ""
        return f"update {self.step}{micro}, {self.phase}"


@dataclass
class Peer:
    """What is known of another process."""

    place: Place | None = None
    silent_seconds: float = 0.0  # since its last post, as far as this process has looked
    left: str = ""  # how it left the loop

    def hangs(self, interval: float) -> bool:
        if self.left or self.place is None or self.silent_seconds > SILENT_POSTS * interval:
            return True
        return self.place.idle_seconds > self.place.may_take

    def __str__(self) -> str:
        if self.left:
            return f"left the loop ({self.left})"
        return "not in the loop yet" if self.place is None else str(self.place)


@dataclass
class HangWatch:
    """Called every `interval` seconds by the guard's thread.

    Args:
        timeout: seconds without a mark of any process.
        main_thread: id of the thread that trains.
    """

    board: NoteBoard
    timeout: float
    main_thread: int
    interval: float = field(init=False)
    idle_seconds: float = 0.0
    _mark: Mark = field(default_factory=latest)
    _posts: int = 0
    _posted: float = 0.0  # seconds ago
    _first_evaluation: int | None = None

    def __post_init__(self) -> None:
        self.interval = min(max(self.timeout / 20, 0.05), 5.0)
        self.peers = {r: Peer() for r in range(world_size()) if r != rank()}

    def tick(self, seconds: float) -> bool:
        """`seconds` have passed; whether the run hangs.

        A process that was stopped itself (a laptop asleep) has not waited in the meantime.
        """
        seconds = min(seconds, 4 * self.interval)
        mark = latest()
        self.idle_seconds = 0.0 if mark.count != self._mark.count else self.idle_seconds + seconds
        self._mark = mark
        if mark.phase == "evaluate reduce" and self._first_evaluation is None:
            self._first_evaluation = mark.step
        self._posted += seconds
        if self._posted >= self.interval:
            self._posted = 0.0
            self.post()
        if self.idle_seconds < self.timeout / 3:
            return False
        for other in self.peers:
            self._look_at(other, seconds)
        stuck = self.idle_seconds > self.may_take()
        return stuck and all(peer.hangs(self.interval) for peer in self.peers.values())

    def may_take(self) -> float:
        phase, step = self._mark.phase, self._mark.step
        first = self._first_evaluation is None if phase == "evaluate" else step == first_step()
        patient = phase in PATIENT_PHASES or (phase in FIRST_PASS_PHASES and first)
        return self.timeout * (PATIENCE if patient else 1.0)

    def place(self) -> Place:
        _, step, micro_step, phase = self._mark
        if phase == "forward" and in_backward(self.main_thread):
            phase = "backward"
        return Place(self._posts, step, micro_step, phase, self.idle_seconds, self.may_take())

    def post(self) -> None:
        self._posts += 1
        self.board.post(f"place/{rank()}", json.dumps(self.place()))

    def leave(self, how: str) -> None:
        """This process leaves the loop."""
        self.board.post(f"left/{rank()}", how)

    def _look_at(self, other: int, seconds: float) -> None:
        peer, note = self.peers[other], self.board.read(f"place/{other}")
        place = Place(*json.loads(note)) if note else None
        changed = place is not None and (peer.place is None or place.posts != peer.place.posts)
        peer.silent_seconds = 0.0 if changed else peer.silent_seconds + seconds
        peer.place = place or peer.place  # the store may be gone by now
        peer.left = self.board.read(f"left/{other}") or peer.left

    def wait_for_others(self, seconds: float) -> None:
        """Until all have told what they know: whoever ends first may take the notes along."""
        self.board.post(f"told/{rank()}", "")
        deadline = time.monotonic() + seconds
        waiting = [r for r, peer in self.peers.items() if not peer.left]
        while waiting and time.monotonic() < deadline and not self.board.is_lost():
            waiting = [r for r in waiting if self.board.read(f"told/{r}") is None]
            time.sleep(0.1)

    def verdict(self) -> str:
        """Which rank is behind, the likely cause."""
        if not self.peers:
            return "rank 0 is alone: its own stack tells"
        places: dict[int, Any] = {r: peer.place for r, peer in self.peers.items()}
        places[rank()] = self.place()
        order = {r: _order(place) for r, place in places.items()}
        for other, peer in self.peers.items():
            if peer.left:  # whoever is waited for and does not come is behind
                order[other] = (-1,)
        behind = [r for r in sorted(order) if order[r] == min(order.values())]
        others = {r: peer for r, peer in self.peers.items()}
        where = {r: others[r] if r in others else places[r] for r in behind}
        if len(behind) == len(order):
            return f"all ranks stand at the same place ({where[0]}): the network, or a device"
        silent = [
            f"rank {r} no longer answers (stopped or dead)"
            for r, peer in others.items()
            if not peer.left and peer.silent_seconds > SILENT_POSTS * self.interval
        ]
        named = [f"rank {r}: {where[r]}" for r in behind]
        ahead = max((r for r in order if r not in behind), key=lambda r: order[r])
        front = others[ahead] if ahead in others else places[ahead]
        return (
            f"behind, so the likely cause: {'; '.join(named)} (rank {ahead} is at {front})"
            + "".join(f"; {text}" for text in silent)
        )


def _order(place: Place | None) -> tuple[float, ...]:
    if place is None:
        return (-1,)
    # In the last phase the number of the update no longer grows.
    return (place.step, PHASES.index(place.phase), place.micro_step)


def in_backward(thread: int) -> bool:
    """Whether the thread is inside a backward pass: no line of a script needs to say so."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "backward":
            return True
        frame = frame.f_back
    return False


def script_line(thread: int) -> str:
    """The innermost line of the thread that is in no installed package."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [entry for entry in stack if not _is_installed(entry.filename)]
    script = [entry for entry in own if "/utils/" not in Path(entry.filename).as_posix()]
    chosen = (script or own or list(stack))[-1:]
    return "".join(f"{Path(e.filename).name}:{e.lineno} {e.name}: {e.line}" for e in chosen)


def _is_installed(filename: str) -> bool:
    library = Path(traceback.__file__).parent.as_posix()
    path = Path(filename).as_posix()
    return "site-packages" in path or path.startswith((library, "<frozen"))


def write_stacks(path: Path, heading: str) -> None:
    """All threads' stacks of this process into a file."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [heading + "\n"]
    for ident, frame in sys._current_frames().items():
        parts.append(f"\nThread {names.get(ident, '?')} ({ident}), innermost last:\n")
        parts += traceback.format_stack(frame)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts), encoding="utf-8")
