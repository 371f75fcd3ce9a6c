"""What a run leaves behind: its directory, config.json, metrics.jsonl, status.json, a tracker.

Only the main process writes; every process may call everything here.
"""

import importlib.util
import json
import math
import netrc
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from utils.distributed import on_main_process, rank
from utils.errors import UsageError
from utils.files import read_json, write_json

CONFIG, METRICS, STATUS = "config.json", "metrics.jsonl", "status.json"
HEARTBEAT_SECONDS = 10.0
TRACKERS = ("wandb", "tensorboard", "none")
PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "numpy", "wandb")


def choose_directory(output_dir: str, resume: str, script: str) -> Path:
    """The run directory, the same on all processes; nothing is created yet.

    `output_dir`, or the run that `--resume PATH` belongs to, or runs/<script>-<date-time>.
    Raises UsageError when it cannot be written, or holds a run that `--resume never` would end.
    """

    def choose() -> Path:
        if output_dir:
            directory = Path(output_dir).expanduser()
        elif resume not in ("auto", "never"):
            path = Path(resume)
            inside_run = path.parent.name == "checkpoints"
            directory = path.parent.parent if inside_run else path
        elif os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise UsageError(
                "--max_restarts needs an explicit --output-dir: a restarted job would otherwise "
                "start again in a new directory"
            )
        else:
            stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
            directory = Path("runs") / f"{script}-{stamp}"
            twin = 1
            while directory.exists():
                twin += 1
                directory = Path("runs") / f"{script}-{stamp}-{twin}"
        ancestor = directory
        while not ancestor.exists() and ancestor != ancestor.parent:
            ancestor = ancestor.parent
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
            raise UsageError(f"--output-dir {directory}: {ancestor} is not a writable folder")
        if resume == "never" and any((directory / "checkpoints").glob("step_*")):
            raise UsageError(
                f"--output-dir {directory} already holds a run; choose another directory, or leave "
                "--resume never out to continue it"
            )
        return directory

    return on_main_process(choose)


def continue_command(directory: Path, drop: tuple[str, ...] = ("stop-after", "resume")) -> str:
    """The command that continues this run: as it was typed, launcher included, with --output-dir.

    The launcher's own command line is the parent process's, where this script was launched.
    """
    script = sys.argv[0]
    words = [Path(sys.executable).name, *sys.argv]
    for ancestor in psutil.Process().parents()[:2]:
        try:
            line = ancestor.cmdline()
        except psutil.Error:
            continue
        if script in line and any("launch" in word or "torchrun" in word for word in line):
            words = line[1:] if "python" in Path(line[0]).name else line
            if words[0] == "-m":
                words = [Path(line[0]).name, *words]
            else:
                words[0] = Path(words[0]).name
            break
    dropped = {f"--{name}" for name in (*drop, "output-dir")}
    start = words.index(script) + 1 if script in words else 1
    kept, flags = words[:start], iter(words[start:])
    for word in flags:
        name, _, value = word.replace("_", "-").partition("=")
        if name in dropped:
            if not value:
                next(flags, None)
        else:
            kept.append(word)
    return shlex.join([*kept, "--output-dir", str(directory)])


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
        self._is_main = rank() == 0
        self._read_only = read_only
        self._tracker: Any = None
        self._metrics: Any = None
        self._ended: tuple[str, str] | None = None
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, daemon=True)
        on_main_process(lambda: self._open({**config, **environment()}, tracker))

    def _open(self, config: dict[str, Any], tracker: str) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            before = read_json(self.directory / CONFIG) or {}
            path = self.directory / METRICS
            lines = [] if not path.exists() else path.read_text(encoding="utf-8").splitlines()
            self._logged = set()
            kept = []
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # torn by a kill
                if self._read_only or entry["step"] <= self.step:
                    kept.append(line + "\n")
                    self._logged.update((entry["step"], key) for key in entry)
            temporary = path.with_name(f".{METRICS}.tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, path)
            self._metrics = path.open("a", encoding="utf-8")
            if self._read_only:
                return
            name = config.get("wandb_run_id") or before.get("wandb_run_id") or _new_run_id()
            write_json(self.directory / CONFIG, {**config, "wandb_run_id": name})
            self._write_status("running", "")
        except OSError as error:
            raise UsageError(f"--output-dir {self.directory} cannot be written: {error}") from error
        self._heartbeat.start()
        self._start_tracker(tracker, config, name)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None and self._ended is None:
            self._ended = ("failed", f"{kind.__name__}: {error}")
        self.close()

    def log(self, step: int, values: dict[str, float | int | str]) -> None:
        """Write metrics of update `step` to metrics.jsonl and the tracker."""
        if not self._is_main:
            return
        fresh = {key: v for key, v in values.items() if (step, key) not in self._logged}
        if not fresh:
            return
        self._logged.update((step, key) for key in fresh)
        json_values = {key: _json_value(value) for key, value in fresh.items()}
        self._metrics.write(json.dumps({"step": step, **json_values}) + "\n")
        self._metrics.flush()
        if self._tracker is not None:
            try:
                self._tracker.log({"step": step, **fresh}, step=step)
            except Exception as failure:
                self._leave_tracker(failure)

    def flush(self) -> None:
        """Put the metrics on disk: before a checkpoint of the same update is."""
        if self._is_main:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def end(self, state: str, reason: str = "") -> None:
        """Say how the run ends: "finished" or "preempted" (an exception makes it "failed")."""
        self._ended = (state, reason)

    def close(self) -> None:
        """Write the final status and close the tracker."""
        if not self._is_main or self._closed.is_set():
            return
        self._closed.set()
        self._metrics.close()
        if self._read_only:
            return
        self._heartbeat.join()
        self._write_status(*(self._ended or ("failed", "ended without a word")))
        if self._tracker is not None:
            try:
                self._tracker.finish()
            except Exception as failure:
                self._leave_tracker(failure)

    def tracker_line(self) -> str:
        """How to look at the tracker's run, for the end of the console output; "" without."""
        folders = sorted((self.directory / "wandb").glob("offline-run-*"))
        if self._is_main and folders:
            return f"wandb (offline): upload it with  wandb sync {shlex.quote(str(folders[-1]))}"
        return ""

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            self._write_status("running", "")

    def _write_status(self, state: str, reason: str) -> None:
        status = {"state": state, "step": self.step, "reason": reason}
        status |= {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time()}
        try:
            write_json(self.directory / STATUS, status)
        except OSError as error:  # a full disk must not hide the error that it caused
            print(f"warning: {STATUS} not written: {error}", file=sys.stderr, flush=True)

    def _start_tracker(self, kind: str, config: dict[str, Any], run_id: str) -> None:
        if kind == "none":
            return
        try:
            if kind == "wandb":
                self._tracker = _open_wandb(self.directory, run_id)
            else:
                from accelerate.tracking import TensorBoardTracker

                self._tracker = TensorBoardTracker("tensorboard", logging_dir=self.directory)
                self._tracker.start()
            self._tracker.store_init_configuration(_flat(config))
        except Exception as failure:
            self._leave_tracker(failure)

    def _leave_tracker(self, failure: Exception) -> None:
        self._tracker = None
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        print(
            f"warning: the tracker failed and is left behind ({reason}); metrics.jsonl goes on",
            file=sys.stderr,
            flush=True,
        )


def check_tracker(name: str) -> str:
    """The tracker that can be used: UsageError for an optional package that is not installed."""
    if name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tracker tensorboard needs its package: pip install tensorboard")
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        if rank() == 0:
            print("warning: wandb is not installed (pip install wandb): going on without it")
        return "none"
    return name


def environment() -> dict[str, Any]:
    """Versions and the git commit of this repository, for config.json."""
    from importlib import metadata

    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    root = Path(__file__).resolve().parents[1]
    try:
        git = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        commit = git.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {"versions": versions, "git_commit": commit}


def is_finished(directory: Path) -> bool:
    """Whether the run in `directory` came to its end; the main process looks for all."""
    status = on_main_process(lambda: read_json(directory / STATUS)) or {}
    return status.get("state") == "finished"


def _open_wandb(directory: Path, run_id: str) -> Any:
    """A wandb run in `directory`: online with a key, else (or when it cannot connect) offline."""
    import wandb
    from accelerate.tracking import WandBTracker

    offline = "WANDB_MODE" not in os.environ and not _has_wandb_key()
    for mode in ("offline",) if offline else (os.environ.get("WANDB_MODE", "online"), "offline"):
        tracker = WandBTracker(
            os.environ.get("WANDB_PROJECT", directory.resolve().parent.name or "runs"),
            dir=str(directory),
            id=run_id,
            name=directory.name,
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
        )
        try:
            tracker.start()
            return tracker
        except Exception:
            if mode == "offline":
                raise
            print("warning: wandb cannot be reached; the run is kept offline", file=sys.stderr)
    return None


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _new_run_id() -> str:
    return os.urandom(4).hex()


def _json_value(value: Any) -> Any:
    """NaN and infinity have no place in JSON: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Nested values as JSON text: trackers take plain values only."""
    plain = (bool, int, float, str)
    return {
        key: value if isinstance(value, plain) else json.dumps(value)
        for key, value in config.items()
    }
