"""What a run leaves behind: config.json, metrics.jsonl, status.json, pictures, a tracker's run.

Only the main process writes; every process may call everything here.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.checkpoint import set_aside_newer
from utils.console import note, open_log, warn
from utils.distributed import on_main_process
from utils.environment import environment
from utils.errors import ExplainedError, UsageError, first_line
from utils.files import read_json, read_json_lines, replace_bytes, write_json, write_text
from utils.pictures import Picture
from utils.plots import Curves
from utils.trackers import Tracker

CONFIG, METRICS, STATUS = "config.json", "metrics.jsonl", "status.json"
LOG, CURVES, PREDICTIONS = "log.txt", "curves.png", "predictions.png"
HEARTBEAT_SECONDS = 10.0
PICTURE_SHARE = 0.005  # of the time of a run, that drawing may take
PICTURE_SECONDS = 0.5  # that one is expected to take
ALERT_SECONDS = 2.0  # to tell the tracker, before a process that hangs is ended


class Run:
    """The run directory, open for writing; a context manager that leaves the right status.

    Args:
        config: flags and derived values for config.json and the tracker (no secrets).
        resume_step: update that this process continues from; metrics after it are removed.
        read_only: for an evaluation of an existing run: metrics are added, nothing else changes.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        tracker: str,
        resume_step: int = 0,
        *,
        read_only: bool = False,
    ):
        self.directory = directory
        self.step = resume_step
        self._read_only = read_only
        self._ended: tuple[str, str] | None = None
        self._tracker: Tracker | None = None
        self._total_steps = config.get("total_steps", 0)
        self._start_time, self._drawing_seconds = time.monotonic(), 0.0
        self._drawing_failed = False
        self._state, self._lock = ("running", ""), threading.RLock()
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, daemon=True)
        on_main_process(lambda: self._open({**config, **environment()}, tracker))

    def _open(self, config: dict[str, Any], tracker: str) -> None:
        path = self.directory / METRICS
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            entries = [e for e in read_json_lines(path) if isinstance(e.get("step"), int)]
            if self._read_only:  # it may be running: its file is not replaced under its hands
                content = path.read_bytes() if path.exists() else b""
                torn = content and not content.endswith(b"\n")
                self._metrics = path.open("a", encoding="utf-8")
                self._metrics.write("\n" if torn else "")
            else:
                set_aside_newer(self.directory / "checkpoints", self.step)
                entries = [entry for entry in entries if entry["step"] <= self.step]
                write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
                self._metrics = path.open("a", encoding="utf-8")
                before = read_json(self.directory / CONFIG)
                before = before if isinstance(before, dict) else {}
                run_id = before.get("wandb_run_id") or os.urandom(4).hex()
                write_json(self.directory / CONFIG, {**config, "wandb_run_id": run_id})
                self._write_status("running", "")
        except OSError as error:
            raise UsageError(f"--output-dir {self.directory} cannot be written: {error}") from error
        self._curves = Curves()
        for entry in entries:
            self._curves.add(entry)
        # Keys of the latest step: a resumed run may log some of its first step's again.
        self._logged = {key for entry in entries if entry["step"] == self.step for key in entry}
        self._logged_step = self.step
        if self._read_only:
            self._tracker = Tracker(
                tracker, self.directory, os.urandom(4).hex(), config, job_type="eval"
            )
        else:
            open_log(self.directory / LOG)
            self._heartbeat.start()
            self._tracker = Tracker(tracker, self.directory, run_id, config, resume_step=self.step)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None:
            self._ended = ("failed", f"{kind.__name__}: {error}")
            self.close()
        else:  # all end together: a launcher kills the others when one has ended with an error code
            on_main_process(self.close)

    def log(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Write metrics of update `step` to metrics.jsonl and the tracker."""
        if self._tracker is None:
            return
        if step != self._logged_step:
            self._logged, self._logged_step = set(), step
        fresh = {key: value for key, value in values.items() if key not in self._logged}
        if fresh:
            self._logged.update(fresh)
            entry = {"step": step} | {key: _json_value(value) for key, value in fresh.items()}
            self._curves.add(entry)
            try:
                self._metrics.write(json.dumps(entry) + "\n")
                self._metrics.flush()
            except OSError as error:
                path = self.directory / METRICS
                raise ExplainedError(f"{path} cannot be written: {error}") from error
        # The tracker's thread last: it would compete with the writing. To a tracker an evaluation
        # is a run of its own, which has none of the values yet.
        if shown := dict(values) if self._read_only else fresh:
            self._tracker.log(step, shown)

    def draw(self, step: int, draw_picture: Callable[[], Picture] | None = None) -> None:
        """Draw the curves, and the picture of the evaluation after update `step`, where it has one.

        Before the last update, the picture waits until drawing has taken less than its share of the
        run's time. A failure costs the picture, not the run. The main process does, every one may
        call it.
        """
        if self._tracker is None:
            return
        start_time = time.monotonic()
        allowed = PICTURE_SHARE * (start_time - self._start_time)
        last = self._read_only or step >= self._total_steps
        try:
            if not self._read_only:
                replace_bytes(self.directory / CURVES, self._curves.draw())
            due = last or self._drawing_seconds + PICTURE_SECONDS <= allowed
            if draw_picture is not None and due:
                picture = draw_picture()
                self._tracker.show(step, picture)
                if not self._read_only:
                    replace_bytes(self.directory / PREDICTIONS, picture.png)
        except Exception as failure:
            if not self._drawing_failed:
                warn(f"pictures not drawn: {first_line(failure)}")
            self._drawing_failed = True
        self._drawing_seconds += time.monotonic() - start_time

    def flush(self) -> None:
        """Put the metrics on disk: before a checkpoint of the same update is. All ranks call it."""

        def sync() -> None:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

        on_main_process(sync)

    def end(self, state: str, reason: str = "") -> None:
        """Say how the run ends: "finished" or "preempted" (an exception makes it "failed")."""
        self._ended = (state, reason)

    def close(self) -> None:
        """Write the final status and close the tracker."""
        if self._tracker is None or self._closed.is_set():
            return
        default = ("finished", "") if self._read_only else ("failed", "ended without a word")
        state, reason = self._ended or default
        self._closed.set()
        try:
            self._metrics.close()
        except OSError as error:  # a full disk, again, must not hide the error that it caused
            warn(f"{METRICS} not closed: {error}")
        if not self._read_only:
            self._heartbeat.join()
            self._write_status(state, reason)
            if state != "finished":
                note(f"{state}: {reason}")
                self._tracker.alert(state, reason)
        self._tracker.finish(state)

    def report(self, state: str, reason: str) -> None:
        """What status.json says from now on until the end; from any thread (utils/guard.py)."""
        with self._lock:
            self._state = (state, reason)
            if not self._read_only and not self._closed.is_set():
                self._write_status(state, reason)
        if reason and self._tracker is not None:
            self._tracker.alert(state, reason, ALERT_SECONDS if state == "failed" else 0.0)

    def tracker_line(self) -> str:
        """How to look at the tracker's run, for the end of the console output; "" without."""
        return self._tracker.line() if self._tracker is not None else ""

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with self._lock:
                self._write_status(*self._state)

    def _write_status(self, state: str, reason: str) -> None:
        status = {"state": state, "step": self.step, "reason": reason}
        status |= {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time()}
        try:
            write_json(self.directory / STATUS, status)
        except OSError as error:
            warn(f"{STATUS} not written: {error}")


def is_finished(directory: Path) -> bool:
    """Whether the run in `directory` came to its end; the main process looks for all."""
    status = on_main_process(lambda: read_json(directory / STATUS)) or {}
    return status.get("state") == "finished"


def _json_value(value: Any) -> Any:
    """NaN and infinity have no place in JSON: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
