"""Signals, values that are not finite, hangs: noticed on any process, acted on by all together.

    guard = Guard(directory, nonfinite="stop", hang_timeout=600)
    ...
    totals = window.reduce(losses, grad_norm, guard.stop_requested)
    totals = guard.check(window, totals, accelerator.scaler)  # before optimizer.step()
    ...
    with guard.watching(run.report), run:
        for window in loader: ...

What processes decide together travels in the update's own reduction; a hang is found without one.
"""

import atexit
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from utils import errors, marks
from utils.console import warn
from utils.distributed import NoteBoard, all_reduce_sum, on_main_process, rank
from utils.distributed import world_size as number_of_processes
from utils.engines import uses_fsdp, uses_zero
from utils.errors import ERROR, ExplainedError
from utils.files import read_json
from utils.hang import HangWatch, script_line, write_stacks
from utils.loaders import SIGNALS, end_loader_processes
from utils.marks import latest, mark
from utils.nonfinite import describe_nonfinite, raise_nonfinite
from utils.rundir import continue_command, is_restart, launcher_pid
from utils.window import Batch, Totals, Window

SAME_SIGNAL_SECONDS = 5.0  # a terminal, SLURM and a launcher all send it again
STUCK_SECONDS = 15.0  # after a signal, without progress: torchrun kills 30 s after its own
ORPHAN_SECONDS = 45.0  # a process whose launcher died ends after this at the latest
MOST_IN_A_ROW = 10  # updates left out
MOST_OVERFLOWS_IN_A_ROW = 30  # from the scaler's first 65536 down to nothing
DETERMINISTIC = r"(rank \d+: )?(NonFiniteError|OutOfMemory): "  # in status.json: reason
PEER_SECONDS = 2.0  # between a peer's death and an error that only follows from it

_numbers = count()  # of the guards in this process: their notes must not mix
_launcher = launcher_pid()  # 0 when there is none


def stopped_before_restart(directory: Path) -> bool:
    """Whether a launcher's --max_restarts has started again what a signal had stopped.

    It restarts every exit code but 0; the script then returns PREEMPTED again at once. What would
    fail again at the same update is an ExplainedError, at once too.
    """

    def look() -> bool:
        if not is_restart():
            return False
        status = read_json(directory / "status.json") or {}
        launched = psutil.Process(os.getppid()).create_time()  # an older launch does not count
        if not status or status["heartbeat"] <= launched:
            return False
        if status["state"] == "failed" and re.match(DETERMINISTIC, status["reason"]):
            raise ExplainedError(f"not restarted, it would fail again: {status['reason']}")
        return status["state"] == "preempted"

    return on_main_process(look)


class Guard:
    """Watches a run; `check`, `batches` and `agree_to_stop` work outside of `with` too.

    Args:
        directory: of the run: hang/ and nonfinite/ go there.
        nonfinite: "stop" or "skip": what becomes of an update whose loss or gradient is not finite.
        hang_timeout: seconds without progress of any process; 0 = never.

    Attributes:
        stop_requested: whether a process is known to have been told to stop.
        stopping: whether all processes have agreed to stop, in `check` or `agree_to_stop`.
        reason: why, for status.json.
    """

    def __init__(self, directory: Path, *, nonfinite: str = "stop", hang_timeout: float = 600.0):
        self.directory = directory
        self.nonfinite = nonfinite
        self.hang_timeout = hang_timeout
        self.stop_requested = False
        self.reason = ""
        self.stopping = False
        self._skipped_in_a_row = self._overflows_in_a_row = 0
        self._report: Callable[[str, str], None] = lambda state, reason: None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._handlers: dict[int, Any] = {}
        self._first_signal: float | None = None
        self._orphan_since: float | None = None
        self._told_stuck = False
        self._board = NoteBoard("")
        self._is_sharded = uses_fsdp() or uses_zero()

    # ---- In the loop -------------------------------------------------------------------------

    def check(
        self, window: Window, totals: Totals, scaler: torch.amp.GradScaler | None = None
    ) -> Totals:
        """Act on the update's figures, alike on all processes, before `optimizer.step()`.

        Raises NonFiniteError, or returns the totals with `skipped` set: then the step must be left
        out. After an overflow in fp16 too: the scaler has seen it, and lowers its factor.
        """
        if totals.stop:
            self._stop()
        overflow = scaler is not None and totals.bad_grad_norm and not totals.bad_loss
        bad = not totals.skipped and (totals.bad_loss or totals.bad_grad_norm) and not overflow
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if overflow else 0
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if bad else 0
        if bad:
            stop = self.nonfinite == "stop" or self._skipped_in_a_row > MOST_IN_A_ROW
            keep = self._skipped_in_a_row <= MOST_IN_A_ROW
            text, is_mine = describe_nonfinite(window, totals, self.directory, keep=keep)
            if stop:
                raise_nonfinite(text, self.directory, is_mine)
            if rank() == 0:
                warn(f"left out on all processes: {text}")
                self._report("running", f"not finite, left out: {text}")
            totals = totals._replace(skipped=True)
        if overflow:
            totals = totals._replace(skipped=True)
        if self._overflows_in_a_row > MOST_OVERFLOWS_IN_A_ROW:
            text = f"update {window.step}: fp16 overflows {MOST_OVERFLOWS_IN_A_ROW} times in a row"
            raise_nonfinite(text, self.directory, is_mine=False)
        if totals.skipped and scaler is not None:
            scaler.update()  # it has unscaled the gradients, and expects a step after that
        return totals

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """An evaluation's batches, up to a signal to any process; each one is progress.

        After it, `agree_to_stop` tells whether the evaluation is whole.
        """
        for number, batch in enumerate(loader, start=1):
            mark("evaluate", micro_step=number)
            yield batch
            # The next forward of a sharded model is entered by all processes, or by none.
            stop = self.agree_to_stop() if self._is_sharded else self.stop_requested
            if stop:
                break
        mark("evaluate reduce")

    def agree_to_stop(self) -> bool:
        """Whether any process has been told to stop; called by all of them."""
        flag = torch.tensor(int(self.stop_requested or self.stopping))
        device = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        if number_of_processes() > 1 and torch.distributed.get_backend() == "nccl":
            flag = flag.to(device)
        if all_reduce_sum(flag).item():
            self._stop()
        return self.stopping

    def _stop(self) -> None:
        self.stopping = True
        self.reason = self.reason or "a signal on another process"

    # ---- With --------------------------------------------------------------------------------

    def watching(self, report: Callable[[str, str], None]) -> "Guard":
        """For `with`: report(state, reason) writes status.json (Run.report)."""
        self._report = report
        return self

    def __enter__(self) -> "Guard":
        self._board = NoteBoard(f"guard/{next(_numbers)}")
        self._watch = HangWatch(self._board, self.hang_timeout, threading.get_ident())
        marks.start()
        self._listen_to_signals()
        for target in (self._hear, self._look):
            self._threads.append(threading.Thread(target=target, name="guard", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        how = f"{kind.__name__}: {error}" if kind else "stopped" if self.stopping else "finished"
        self._watch.leave(how)
        if kind is not None:
            self._end_with_error(error, how)
        atexit.unregister(end_loader_processes)  # once, and before what waits for them
        atexit.register(end_loader_processes)
        self._closed.set()
        self._mouth.send(b"\0")
        for thread in self._threads:
            thread.join(timeout=2.0)
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._handlers.items():
                # The launcher may send one more while this process is about to end.
                ending = self.stopping and errors.ends_the_process
                signal.signal(number, signal.SIG_IGN if ending else handler)
        self._ears.close()
        self._mouth.close()

    def _end_with_error(self, error: BaseException, how: str) -> None:
        if _follows_from_a_peer(error):
            time.sleep(PEER_SECONDS)  # the launcher names whoever fails first
        if rank() > 0:  # the main process may be the one that died
            self._report_for_main(how)

    # ---- Signals -----------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers in the main thread only
        # The thread hears of a signal at once, even while this one waits in a collective.
        self._wakeup_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, lambda number, frame: None)
            if hasattr(signal, "siginterrupt"):
                signal.siginterrupt(number, False)

    def _hear(self) -> None:
        while not self._closed.is_set():
            if select.select([self._ears], [], [], 0.5)[0]:
                for number in self._ears.recv(4096):
                    if number in SIGNALS and not self._closed.is_set():
                        self._on_signal(signal.Signals(number).name)
            self._check_launcher()
            self._check_stuck()

    def _on_signal(self, name: str) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._request_stop(f"{name} on rank {rank()}")
        elif now - self._first_signal > SAME_SIGNAL_SECONDS:
            self._leave(f"{name} again: stopped at once, without saving")

    def _request_stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.stop_requested = True
        if rank() == 0 and not self.stopping:
            text = f"{reason}: saving after this update; another signal later stops at once\n"
            os.write(2, text.encode())

    def _check_launcher(self) -> None:
        """A launcher that was killed, or one of a single process, leaves this process behind."""
        if not _launcher or os.getppid() == _launcher:
            return
        now = time.monotonic()
        if self._orphan_since is None:
            self._orphan_since = now
            self._request_stop(f"the launcher of rank {rank()} has ended")
        elif now - self._orphan_since > ORPHAN_SECONDS:
            self._leave("the launcher has ended, and this process could not save and stop")

    def _check_stuck(self) -> None:
        """After a signal, no progress: it came because a peer died, say, and kills will follow."""
        started = self._first_signal or self._orphan_since
        if started is None or latest().phase == "save":
            return
        stuck = min(self._watch.idle_seconds, time.monotonic() - started) > STUCK_SECONDS
        if stuck and rank() == 0 and not self._told_stuck:
            self._told_stuck = True
            self._report("failed", f"{self.reason}, and no progress since: a process may have died")

    # ---- Hangs -------------------------------------------------------------------------------

    def _look(self) -> None:
        before = time.monotonic()
        posted = False
        while not self._closed.wait(min(self._watch.interval, 1.0)):
            now = time.monotonic()
            elapsed, before = now - before, now
            if self.stop_requested and not posted:
                posted = True
                self._board.post("stop", self.reason)
            elif not self.stop_requested and (reason := self._board.read("stop")):
                self._request_stop(reason)
            if self._watch.tick(elapsed) and self.hang_timeout and not self._closed.is_set():
                self._hang()

    def _hang(self) -> None:
        """Say where this process stands and end it; rank 0, or who is there, names the cause."""
        place, line = self._watch.place(), script_line(self._watch.main_thread)
        self._watch.post()
        file = self.directory / "hang" / f"rank_{rank()}.txt"
        heading = f"rank {rank()}: no progress for {place.idle_seconds:.0f} s: {place}; {line}"

        def tell() -> None:
            os.write(2, f"hang: {heading}; all stacks: {file}\n".encode())
            write_stacks(file, heading)

        _within(10.0, tell)
        time.sleep(2 * self._watch.interval)  # until the others have said where they stand
        for other in self._watch.peers:
            self._watch._look_at(other, 0.0)
        verdict = self._watch.verdict()
        if self._board.is_first("verdict"):
            command = continue_command(self.directory)
            text = (
                f"hang: {verdict}\nhang: to see more of the communication, run it again with\n"
                f"  NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL {command}\n"
            )
            os.write(2, text.encode())
        self._watch.wait_for_others(5.0)
        self._leave(f"no progress for {place.idle_seconds:.0f} s; {verdict}")

    # ---- The end -----------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        """End this process now, from a thread: the main one may be stuck for ever."""

        def tell() -> None:
            os.write(2, f"error: [rank {rank()}] {reason}\n".encode())
            get_error_handler().record_exception(ExplainedError(reason))  # the launcher shows it
            if rank() == 0:
                self._report("failed", reason)
            else:
                self._report_for_main(reason)

        _within(10.0, tell)
        end_loader_processes()  # one may be what hangs
        os._exit(ERROR)

    def _report_for_main(self, reason: str) -> None:
        """Write the status when the main process does not: it may be gone."""
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            status = read_json(self.directory / "status.json") or {}
            if status.get("state") != "running":
                return
            time.sleep(0.2)
        self._report("failed", f"rank {rank()}: {reason}")


def _follows_from_a_peer(error: BaseException) -> bool:
    """Whether a collective has failed because another process has ended."""
    words = ("closed by peer", "Connection reset", "Broken pipe", "NCCL", "Gloo", "ncclRemote")
    return number_of_processes() > 1 and any(word in str(error) for word in words)


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Do it, but do not wait longer: the disk may be what hangs."""

    def safely() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=safely, daemon=True)
    thread.start()
    thread.join(seconds)
