"""What a tracker's calls mean to wandb (online or offline) and to TensorBoard.

Both are opened through Accelerate's trackers. All of this may raise, block or hang:
utils/trackers.py calls it on a thread of its own.
"""

import hashlib
import importlib.util
import io
import json
import netrc
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from utils.checkpoint import recipe_of
from utils.console import warn
from utils.errors import ERROR, FINISHED, PREEMPTED
from utils.pictures import Picture
from utils.rundir import continue_command

# What wandb's table of runs shows of a metric: its best value and its last.
SUMMARIES = {
    "train/loss": "min,last",
    "train/grad_norm": "max,last",
    "val/loss": "min,last",
    "val/accuracy": "max,last",
    "val/accuracy_flip": "max,last",
    "val/ap": "max,last",
    "val/ap50": "max,last",
    "val/miou": "max,last",
    "val/pixel_accuracy": "max,last",
    "val/bits_per_byte": "min,last",
    "perf/examples_per_second": "mean,last",
    "perf/peak_memory_bytes": "max",
}
# In config.json, but neither recipe nor data: runs that differ in these lie side by side.
LAYOUT = set(
    "seed num_processes accumulation world_size device precision bn_plan preflight git_commit"
    " versions wandb_run_id".split()
)
LEVELS = {"failed": "ERROR"}  # of an alert; WARN for any other state
EXIT_CODES = {"finished": FINISHED, "preempted": PREEMPTED}
MOST_TAG_LETTERS = 64  # wandb refuses longer ones


def flat(config: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """The config with "outer/inner" for what is nested, and JSON for lists and None."""
    plain: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            plain |= {f"{key}/{inner}": v for inner, v in flat(value).items()}
        else:
            plain[key] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return plain


def recipe_group(config: dict[str, Any]) -> str:
    """A name for all runs of this script and recipe, whatever their seed and layout."""
    recipe = {key: value for key, value in recipe_of(config).items() if key not in LAYOUT}
    recipe["bn_group"] = config.get("bn_plan", {}).get("group")
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()
    return f"{script_name()}-{digest[:8]}"


def script_name() -> str:
    return Path(sys.argv[0]).stem or "python"


class Wandb:
    """A wandb run in `directory`: online with a key, else (or when it cannot connect) offline.

    Args:
        run_id: the same after a resume.
        job_type: train or eval.
    """

    def __init__(self, directory: Path, run_id: str, config: dict[str, Any], job_type: str):
        tags = [script_name(), Path(str(config.get("dataset", ""))).name]
        tags += [str(config.get("precision", "")), f"{config.get('world_size', 1)} processes"]
        mine = os.environ.get  # what the user has set there goes before
        options: dict[str, Any] = {
            "name": mine("WANDB_NAME", directory.name + ("-eval" if job_type == "eval" else "")),
            "group": mine("WANDB_RUN_GROUP", recipe_group(config)),
            "job_type": mine("WANDB_JOB_TYPE", job_type),
            "tags": mine("WANDB_TAGS", ",".join(tag[:MOST_TAG_LETTERS] for tag in tags if tag)),
            "notes": mine("WANDB_NOTES", f"continue with: {continue_command(directory)}"),
        }
        options["tags"] = [tag for tag in options["tags"].split(",") if tag]
        self._tracker = _open_wandb(directory, run_id, options)
        self._tracker.store_init_configuration(flat(config))
        run = self._tracker.tracker
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        for name, summary in SUMMARIES.items():
            run.define_metric(name, step_metric="step", summary=summary)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._tracker.log({"step": step, **values}, step=step)

    def show(self, step: int, picture: Picture) -> None:
        import wandb

        with PIL.Image.open(io.BytesIO(picture.png)) as image:
            values: dict[str, Any] = {"val/predictions": wandb.Image(image)}
        values["val/samples"] = wandb.Table(columns=picture.columns, data=picture.rows)
        self.log(step, values)

    def alert(self, state: str, title: str, text: str) -> None:
        self._tracker.tracker.alert(title=title, text=text, level=LEVELS.get(state, "WARN"))

    def finish(self, state: str) -> None:
        if state == "preempted":
            self._tracker.tracker.mark_preempting()
        self._tracker.tracker.finish(exit_code=EXIT_CODES.get(state, ERROR))


class TensorBoard:
    """Event files in RUN/tensorboard.

    Args:
        resume_step: what earlier files hold after it is hidden: it is logged again.
    """

    def __init__(self, directory: Path, config: dict[str, Any], resume_step: int):
        from accelerate.tracking import TensorBoardTracker

        again = {"purge_step": resume_step + 1} if resume_step else {}
        self._tracker = TensorBoardTracker("tensorboard", logging_dir=directory, **again)
        self._tracker.start()
        if not resume_step:
            self._tracker.store_init_configuration(flat(config))

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._tracker.log(values, step=step)

    def show(self, step: int, picture: Picture) -> None:
        with PIL.Image.open(io.BytesIO(picture.png)) as image:
            pixels = np.asarray(image.convert("RGB"))[None]
        self._tracker.log_images({"val/predictions": pixels}, step=step, dataformats="NHWC")
        lines = [picture.columns, ["---"] * len(picture.columns), *picture.rows]
        table = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        self._tracker.log({"val/samples": table}, step=step)

    def alert(self, state: str, title: str, text: str) -> None:
        self._tracker.log({"alert": f"{title}: {text}"})

    def finish(self, state: str) -> None:
        self._tracker.finish()


def _open_wandb(directory: Path, run_id: str, options: dict[str, Any]) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    offline = "WANDB_MODE" not in os.environ and not has_wandb_key()
    for mode in ("offline",) if offline else (os.environ.get("WANDB_MODE", "online"), "offline"):
        tracker = WandBTracker(
            os.environ.get("WANDB_PROJECT", directory.resolve().parent.name or "runs"),
            dir=str(directory),
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
            **options,
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


def wandb_commands(directory: Path) -> str:
    """How to look at the offline runs in `directory` and upload them, two lines; "" without any."""
    folders = sorted((directory / "wandb").glob("offline-run-*"))  # one for each start
    if not folders:
        return ""
    sync = f"wandb sync {shlex.join(map(str, folders))}"
    if importlib.util.find_spec("wandb.cli.leet") is None:  # before 0.31
        return f"wandb     offline; upload it with  {sync}"
    shown = directory / "wandb" if len(folders) > 1 else folders[0]
    return (
        f"wandb     offline; look at it in the terminal with  wandb leet {shlex.quote(str(shown))}"
        f"\n          upload it with  {sync}"
    )
