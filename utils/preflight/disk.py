"""The checks of what a run leaves behind: checkpoints that load again, and the tracker."""

import copy
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from utils import checkpoint
from utils.backends import has_wandb_key
from utils.preflight.job import FAIL, PASS, WARN, Finding, Job, Steps
from utils.preflight.report import size_text
from utils.preflight.runner import name_ranks
from utils.preflight.state import fingerprint, restored, zero_parts
from utils.sharding import numel

FOLDER = ".preflight"  # in the run directory, removed afterwards
SAVE_SECONDS = 30.0  # that a launcher leaves after SIGTERM


def checkpoints(job: Job) -> Steps:
    """Save, load and compare in the run directory; space for all that is kept; seen by all."""
    folder = (yield str(job.directory / f"{FOLDER}-{uuid.uuid4().hex[:8]}"))[0]
    path = Path(folder)
    main, each = job.accelerator.is_main_process, bool(job.flags.get("save_on_each_node"))
    try:
        if main:
            path.mkdir(parents=True)
            (path / "seen").write_text("by all", encoding="utf-8")
        yield None
        everyone = yield (path / "seen").is_file()  # written by rank 0, on its machine
        missing = [rank for rank, sees in enumerate(everyone) if not sees]
        if missing and not each:
            return Finding(
                FAIL,
                f"{name_ranks(missing)} cannot see what rank 0 writes to {job.directory}",
                "give an --output-dir on a file system that all machines share, or "
                "--save-on-each-node",
            )
        facts = _save_and_load(job, path, each)
        everyone = yield facts
        return _judge(everyone, job)
    except OSError as error:
        return Finding(
            FAIL,
            f"{job.directory} cannot be written: {error}",
            "give an --output-dir with permission to write and space",
        )
    finally:
        if main or each:
            shutil.rmtree(path, ignore_errors=True)


def _save_and_load(job: Job, path: Path, on_each_node: bool) -> dict[str, Any]:
    """A real checkpoint, loaded into a copy of the model; where it is sharded, into itself."""
    start = time.perf_counter()
    checkpoint.save_checkpoint(
        path,
        1,
        model=job.plain_model,
        optimizer=job.optimizer,
        scaler=job.accelerator.scaler,
        extra={"digest": 0},
        manifest={"recipe": {}, "total_steps": job.total_steps},
        keep=1,
        on_each_node=on_each_node,
    )
    seconds = time.perf_counter() - start
    found = checkpoint.find_checkpoint(path, on_each_node)
    if found is None:
        return {"missing": True}
    ours = fingerprint(job.plain_model)
    with restored(job):
        model = job.plain_model if job.is_sharded else copy.deepcopy(job.plain_model)
        with torch.no_grad():
            for tensor in (*zero_parts(job), *model.parameters(), *model.buffers()):
                tensor.zero_()
        checkpoint.load_checkpoint(found, model=model)
        loaded = fingerprint(model)
    names = job.plain_model.state_dict().keys()  # not the buffers that are left out on purpose
    size = sum(file.stat().st_size for file in found.path.iterdir())
    # Momentum and the like come with the first update: at most twice the weights, as in Adam.
    weights = sum(numel(p) * p.element_size() for p in job.plain_model.parameters())
    return {
        "missing": False,
        "differs": [name for name in names if name in ours and ours[name] != loaded[name]],
        "seconds": seconds,
        "bytes": size + (0 if job.optimizer.state_dict()["state"] else 2 * weights),
        "free": shutil.disk_usage(path).free,
    }


def _judge(everyone: list[dict[str, Any]], job: Job) -> Finding:
    for rank, facts in enumerate(everyone):
        if facts["missing"] or facts["differs"]:
            what = facts["differs"][0] if facts.get("differs") else "it"
            return Finding(
                FAIL,
                f"rank {rank}: a checkpoint does not come back as it was saved ({what})",
                "see whether the file system of --output-dir loses or delays writes",
            )
    facts = everyone[0]
    kept = int(job.flags.get("keep_checkpoints") or 1) + 2  # the best, and the one being written
    needed, free = kept * facts["bytes"], facts["free"]
    seen = (
        f"saved in {facts['seconds']:.1f} s and loaded; {kept} x {size_text(facts['bytes'])} "
        f"needed, {size_text(free)} free"
    )
    if needed > free:
        return Finding(FAIL, seen, "make space, or a smaller --keep-checkpoints")
    if facts["seconds"] > SAVE_SECONDS / 2:
        return Finding(
            WARN,
            seen,
            f"a launcher kills {SAVE_SECONDS:.0f} s after SIGTERM: a faster disk, or a smaller "
            "--save-every so that little is lost",
        )
    return Finding(PASS, seen)


def tracker(job: Job) -> Steps:
    """Where the metrics go besides metrics.jsonl: one run, and its mode."""
    name = str(job.flags.get("tracker", "none"))
    everyone = yield {
        "name": name,
        "mode": os.environ.get("WANDB_MODE", ""),
        "key": has_wandb_key() if name == "wandb" else False,
        "main": job.accelerator.is_main_process,
    }
    return judge_tracker(everyone)


def judge_tracker(everyone: list[dict[str, Any]]) -> Finding:
    """From each rank's facts (see tracker)."""
    facts, writers = everyone[0], [r for r, answer in enumerate(everyone) if answer["main"]]
    if writers != [0]:
        return Finding(
            FAIL, f"{name_ranks(writers)} would open a run each", "start one launcher a machine"
        )
    if facts["name"] != "wandb":
        return Finding(PASS, f"{facts['name']}; metrics.jsonl in any case")
    if facts["mode"] == "online" and not facts["key"]:
        return Finding(
            WARN,
            "WANDB_MODE=online, but there is no key: the run would be kept offline",
            "wandb login, or WANDB_API_KEY in the environment of the job",
        )
    if facts["mode"] in ("offline", "disabled", "dryrun") or not facts["key"]:
        why = f"WANDB_MODE={facts['mode']}" if facts["mode"] else "no key"
        return Finding(PASS, f"wandb, offline ({why}): `wandb sync` uploads the run later")
    return Finding(PASS, "wandb, online; offline where it cannot be reached")
