"""wandb (online or offline) and TensorBoard, which may fail without harm to the run."""

import importlib.util
import json
import netrc
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.console import warn
from utils.distributed import rank
from utils.errors import UsageError, first_line


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
    """A second copy of the metrics, for the main process: the truth is metrics.jsonl.

    A failure is warned of once and counted; the next call is tried all the same.

    Args:
        kind: wandb, tensorboard or none.
        run_id: of wandb, the same after a resume.
    """

    def __init__(self, kind: str, directory: Path, run_id: str, config: dict[str, Any]):
        self.directory = directory
        self.failures = 0
        self._tracker: Any = None
        if kind != "none":
            self._attempt(lambda: self._open(kind, run_id, config))

    def log(self, step: int, values: dict[str, float | int | str]) -> None:
        if self._tracker is not None:
            self._attempt(lambda: self._tracker.log({"step": step, **values}, step=step))

    def finish(self) -> None:
        if self._tracker is not None:
            self._attempt(self._tracker.finish)
        if self.failures > 1:
            warn(f"the tracker failed {self.failures} times in all; metrics.jsonl is complete")

    def line(self) -> str:
        """How to look at the run, for the end of the console output; "" when there is nothing."""
        folders = sorted((self.directory / "wandb").glob("offline-run-*"))  # one for each start
        if folders:
            return f"wandb (offline): upload it with  wandb sync {shlex.join(map(str, folders))}"
        return ""

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as failure:
            self.failures += 1
            if self.failures == 1:
                warn(f"the tracker failed ({first_line(failure)}); the run and metrics.jsonl go on")

    def _open(self, kind: str, run_id: str, config: dict[str, Any]) -> None:
        if kind == "wandb":
            tracker = _open_wandb(self.directory, run_id)
        else:
            from accelerate.tracking import TensorBoardTracker

            tracker = TensorBoardTracker("tensorboard", logging_dir=self.directory)
            tracker.start()
        self._tracker = tracker
        plain = (bool, int, float, str)
        tracker.store_init_configuration(
            {k: v if isinstance(v, plain) else json.dumps(v) for k, v in config.items()}
        )


def _open_wandb(directory: Path, run_id: str) -> Any:
    """A wandb run in `directory`: online with a key, else (or when it cannot connect) offline."""
    import wandb
    from accelerate.tracking import WandBTracker

    offline = "WANDB_MODE" not in os.environ and not has_wandb_key()
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
            warn("wandb cannot be reached; the run is kept offline")
            wandb.teardown()  # else the failed attempt holds on to the run's id
    return None


def has_wandb_key() -> bool:
    """Whether there is a key for wandb's server: in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    url = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    try:
        hosts = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return hosts.authenticators(url.split("//")[-1].split("/")[0]) is not None
