"""The tracker of a run: a second copy of the metrics, which neither delays nor ends the training.

Its calls run on a thread of their own, in order; the truth is metrics.jsonl.
"""

import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from utils import backends
from utils.console import warn
from utils.distributed import rank
from utils.errors import UsageError, first_line
from utils.marks import mark
from utils.pictures import Picture

MOST_WAITING = 10_000  # entries, before more are left out: minutes of updates
MOST_PICTURES = 4  # among them
MOST_FAILURES_IN_A_ROW = 5  # then the tracker is left behind
FINISH_SECONDS = 30.0  # for what waits, at the end of a run; what it holds is in its own files too
SHORT_FINISH_SECONDS = 10.0  # after a failure or a signal: a launcher may be about to kill
COMPLETE = "metrics.jsonl is complete"


def check_tracker(name: str) -> str:
    """The tracker that can be used: UsageError for an optional package that is not installed."""
    if name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tracker tensorboard needs its package: pip install tensorboard")
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        if rank() == 0:
            warn("wandb is not installed (pip install wandb): going on without it")
        return "none"
    return name


class Tracker:
    """wandb or TensorBoard, behind a bounded queue; for the main process.

    A call that fails is warned of once and counted; after a few in a row no more are tried. One
    that hangs delays only the end of the run, by FINISH_SECONDS at most.

    Args:
        kind: wandb, tensorboard or none.
        run_id: of wandb, the same after a resume.
        job_type: train or eval.
        resume_step: update that the run continues from.
    """

    def __init__(
        self,
        kind: str,
        directory: Path,
        run_id: str = "",
        config: dict[str, Any] | None = None,
        *,
        job_type: str = "train",
        resume_step: int = 0,
    ):
        self.directory = directory
        self.failures = self.left_out = 0
        self._left_behind = False
        self._backend: Any = None
        self._state = ""  # in which the run has ended
        self._entries: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._pictures = threading.BoundedSemaphore(MOST_PICTURES)

        def open_backend() -> None:
            if kind == "wandb":
                self._backend = backends.Wandb(directory, run_id, config or {}, job_type)
            else:
                self._backend = backends.TensorBoard(directory, config or {}, resume_step)

        self._thread = threading.Thread(
            target=self._work, args=(open_backend,), name="tracker", daemon=True
        )
        self._wanted = kind != "none"  # whether there is anybody to give entries to
        if self._wanted:
            self._thread.start()

    def log(self, step: int, values: dict[str, float | int | str]) -> None:
        self._put(lambda: self._backend.log(step, values))

    def show(self, step: int, picture: Picture) -> None:
        """Give it a picture and its table, unless too many wait already."""

        def show() -> None:
            try:
                self._backend.show(step, picture)
            finally:
                self._pictures.release()

        if self._wanted and not self._pictures.acquire(blocking=False):
            self._leave_out()
        elif self._wanted and not self._put(show):
            self._pictures.release()

    def alert(self, state: str, text: str, wait_seconds: float = 0.0) -> None:
        """Have the tracker tell its user of `state` (failed, say), and wait until it has."""
        title = f"{self.directory.resolve().name}: {state}"[-63:]  # wandb's limit
        done = threading.Event()
        self._put(lambda: self._backend.alert(state, title, text))
        self._put(done.set)
        if self._wanted:
            done.wait(wait_seconds)

    def finish(self, state: str) -> None:
        """Wait for what is in the queue, for a bounded time, and close the tracker."""
        self._state = state
        self._entries.put(None)
        seconds = FINISH_SECONDS if state == "finished" else SHORT_FINISH_SECONDS
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
            mark("finish")  # it is no hang of the training
        if self._thread.is_alive():
            self._left_behind = True
            warn(f"the tracker did not end in {seconds:.0f} s: left behind; {COMPLETE}")
            _end_wandb_service()
        elif self.failures > 1:
            warn(f"the tracker failed {self.failures} times in all; {COMPLETE}")
        if self.left_out:
            warn(f"the tracker missed {self.left_out} entries; {COMPLETE}")

    def line(self) -> str:
        """How to look at the run, for the end of the console output; "" when there is nothing."""
        return backends.wandb_commands(self.directory)

    def _put(self, action: Callable[[], object]) -> bool:
        """Queue it, where there is room and anybody to do it; whether it is queued."""
        if not self._wanted:
            return False
        if self._entries.qsize() >= MOST_WAITING:
            self._leave_out()
            return False
        self._entries.put(action)
        return True

    def _leave_out(self) -> None:
        self.left_out += 1
        if self.left_out == 1:
            warn(f"the tracker is behind, or hangs: it misses entries; {COMPLETE}")

    def _work(self, open_backend: Callable[[], None]) -> None:
        self._wanted = self._attempt(open_backend)
        in_a_row = 0
        while self._backend is not None and (action := self._entries.get()) is not None:
            if self._wanted:
                in_a_row = 0 if self._attempt(action) else in_a_row + 1
                self._wanted = in_a_row < MOST_FAILURES_IN_A_ROW
        if self._backend is not None:
            self._attempt(lambda: self._backend.finish(self._state))

    def _attempt(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as failure:
            self.failures += 1
            if self.failures == 1 and not self._left_behind:
                warn(f"the tracker failed ({first_line(failure)}); the run and metrics.jsonl go on")
            return False
        return True


def _end_wandb_service() -> None:
    """End this process's wandb service, for which wandb would wait at exit without an end."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "wandb-core" in child.name():
                child.kill()

    def forget_it() -> None:
        with suppress(Exception):  # it is gone
            sys.modules["wandb"].teardown()

    thread = threading.Thread(target=forget_it, daemon=True)
    thread.start()
    thread.join(SHORT_FINISH_SECONDS)
