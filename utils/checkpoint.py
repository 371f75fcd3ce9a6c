"""Crash-safe checkpoints: RUN/checkpoints/step_00000200/, complete ones only.

One is written into a hidden temporary folder, synced to disk, and only then renamed, so a kill at
any moment leaves the older ones and never half of a new one. Loading executes nothing.
"""

import hashlib
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from utils.console import warn
from utils.distributed import gather_objects, on_main_process, rank, world_size
from utils.errors import ExplainedError, UsageError, first_line
from utils.files import fsync_directory, read_json, read_tensors, write_json
from utils.machines import is_first_on_disk, on_local_main_processes
from utils.marks import mark
from utils.order import ORDER_VERSION
from utils.rundir import is_restart
from utils.sharding import is_sharded, parted_moments, parted_weights, whole
from utils.start import seed_dropout

MANIFEST, MODEL, TRAINING = "manifest.json", "model.pt", "training.pt"
PREFIX = "step_"
# Hidden names: one being written; one superseded. Both are removed by the next save.
TEMPORARY, DISCARDED = ".writing_", ".discarded_"
MANIFEST_TYPES = {"step": int, "total_steps": int, "order_version": int, "recipe": dict}

# Flags that say how to run, not what is learnt: they may change at a resume. `dataset`, `tokenizer`
# are compared by content (the fingerprint), epochs and max_steps by the updates that they mean.
FREE_FLAGS = frozenset(
    "dataset epochs max_steps micro_batch_size num_workers output_dir resume stop_after save_every"
    " keep_checkpoints eval_every log_every eval_only tracker find_unused_parameters comm_hook"
    " bn_group nonfinite hang_timeout verify_data bad_images profile export predict"
    " save_on_each_node tokenizer sample activation_checkpointing".split()
)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    manifest: dict[str, Any]


def recipe_of(flags: dict[str, Any], **derived: Any) -> dict[str, Any]:
    """What must not change at a resume: the flags of the recipe, and derived values by name."""
    return {name: value for name, value in flags.items() if name not in FREE_FLAGS} | derived


def save_checkpoint(
    directory: Path,
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    extra: dict[str, Any],
    manifest: dict[str, Any],
    keep: int,
    score: float | None = None,
    on_each_node: bool = False,
) -> float:
    """Save the state after update `step`; called by all processes, written by the main one.

    Args:
        directory: RUN/checkpoints.
        model: unwrapped, plain parameter names. Where processes hold parts of it, the whole of it
            and of the optimizer's state passes through the writer's memory: a checkpoint is the
            same whatever the engine, and is continued by another.
        extra: small values of the script's own (tensors, numbers, strings, lists and dicts).
        manifest: "recipe", "total_steps" and whatever else a reader should know of the run.
        keep: how many of the newest checkpoints stay, at least 1.
        score: the metric of this very state, where it has been evaluated; higher is better. The
            best of the saved ones stays too.
        on_each_node: written once on each disk: machines share none, or not all of them one.

    Returns the seconds that it took. A failure (full disk, lost permission) raises on every process
    and leaves the older ones.
    """
    mark("save")
    start = time.perf_counter()
    is_writer = is_first_on_disk(directory, TEMPORARY) if on_each_node else rank() == 0
    weights, moments = whole([model.state_dict(), optimizer.state_dict()], keep=is_writer)
    states, tokens = zip(*gather_objects((_generator_states(), os.urandom(8).hex())), strict=True)

    def write() -> None:
        final = directory / f"{PREFIX}{step:08d}"
        temporary = directory / f"{TEMPORARY}{final.name}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_hidden(directory)
            temporary.mkdir()
            training = {
                "optimizer": moments,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "generators": list(states),
                "extra": extra,
            }
            files = {
                MODEL: _write_tensors(temporary / MODEL, weights),
                TRAINING: _write_tensors(temporary / TRAINING, training),
            }
            content = {
                **manifest,
                "step": step,
                "save_id": tokens[0],  # the same on every machine
                "score": score,
                "order_version": ORDER_VERSION,
                "world_size": world_size(),
                "files": files,
            }
            write_json(temporary / MANIFEST, content)
            mark("save")
            fsync_directory(temporary)
            if final.exists():
                _discard(final)
            os.replace(temporary, final)
            fsync_directory(directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ExplainedError(
                f"checkpoint of step {step} could not be written to {directory} ({error}); the "
                "older ones are intact: make space and run the same command again"
            ) from error
        older = sorted((p for p in _numbered(directory) if _step_of(p) <= step), key=_step_of)
        best = max(older, key=lambda path: (_score_of(path), _step_of(path)))  # or the newest
        for superseded in older[: -max(keep, 1)]:
            if superseded != best:
                _discard(superseded)
        _remove_hidden(directory)

    if on_each_node:
        on_local_main_processes(lambda: write() if is_writer else None)
    else:
        on_main_process(write)
    mark("step")
    return time.perf_counter() - start


def newest_name(directory: Path) -> str:
    """The newest complete checkpoint of RUN/checkpoints, unread, for a message."""
    return max((path.name for path in _numbered(directory)), default="none yet")


def find_checkpoint(path: Path, on_each_node: bool = False) -> Checkpoint | None:
    """The newest usable checkpoint of a run (RUN or RUN/checkpoints), or the one at `path`.

    The main process looks, and decides for all. A broken, foreign or half copied one is skipped
    with a line that names the file and the reason; None when there is none.

    Args:
        on_each_node: each machine looks on its own disk; the newest one that all of them have.
    """
    if on_each_node:
        return _find_common(path)

    def look() -> Checkpoint | None:
        usable = (_usable(candidate, path) for candidate in _candidates(path))
        return next((found for found in usable if found is not None), None)

    return on_main_process(look)


def _find_common(path: Path) -> Checkpoint | None:
    """The newest one that all machines have, each on its own disk; or at `path`."""
    own = on_local_main_processes(lambda: _candidates(path))
    for one in sorted({one for candidates in own for one in candidates}, key=_step_of)[::-1]:
        found = on_local_main_processes(lambda one=one: _usable(one, path))
        absent = [str(machine) for machine, usable in enumerate(found) if usable is None]
        ids = {usable.manifest.get("save_id") for usable in found if usable is not None}
        if not absent and len(ids) == 1:
            return found[0]
        if rank() == 0:
            reason = f"not on machine {', '.join(absent)}" if absent else "of different saves"
            warn(f"checkpoint {one} skipped: {reason}")
    return None


def _folder(path: Path) -> Path:
    """Where the checkpoints are, of RUN or RUN/checkpoints."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _candidates(path: Path) -> list[Path]:
    """Checkpoints, unread, the newest first; `path` alone if it is one."""
    if (path / MANIFEST).exists() or path.name.startswith(PREFIX):
        return [path]
    return sorted(_folder(path).glob(f"{PREFIX}*"), key=_step_of, reverse=True)


def _usable(candidate: Path, asked_for: Path) -> Checkpoint | None:
    """The checkpoint, or None with a line that says why not."""
    try:
        manifest = _verify(candidate)
        if candidate != asked_for and manifest["step"] != _step_of(candidate):
            raise ValueError(f"its name is not that of step {manifest['step']}")
        return Checkpoint(candidate, manifest["step"], manifest)
    except (ValueError, OSError) as reason:
        warn(f"checkpoint {candidate} skipped: {reason}")
        return None


def set_aside_newer(directory: Path, step: int) -> None:
    """Hide the checkpoints after update `step`, from which a run goes on (main process only).

    They are broken, or of a course that the run is taken back from: it makes them anew. Until its
    next save they can be had back by renaming.
    """
    for path in _numbered(directory):
        if _step_of(path) > step:
            warn(f"{path} is newer than update {step}: set aside as {_discard(path).name}")


def check_same_recipe(checkpoint: Checkpoint, recipe: dict[str, Any], total_steps: int) -> None:
    """UsageError when this command would continue another recipe; names both values."""
    saved = checkpoint.manifest["recipe"]
    changed = [
        f"{name}={recipe.get(name)!r:.300} but the checkpoint was made with "
        f"{saved.get(name)!r:.300}"
        for name in sorted({*saved, *recipe})
        if saved.get(name) != recipe.get(name)
    ]
    if checkpoint.manifest["order_version"] != ORDER_VERSION:
        changed.append(
            f"the sample order has version {ORDER_VERSION} but the checkpoint was made with "
            f"{checkpoint.manifest['order_version']} (use that version of this repository)"
        )
    if total_steps < checkpoint.manifest["total_steps"]:
        changed.append(
            f"total_steps={total_steps} but the checkpoint was made for "
            f"{checkpoint.manifest['total_steps']} (more are allowed, fewer are not)"
        )
    if changed:
        raise UsageError(
            f"{checkpoint.path} cannot be continued: {'; '.join(changed)}. Use the same values, "
            "or start anew with another --output-dir"
        )


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Restore everything on this process and return `extra`; without an optimizer, the model only.

    The dropout generators continue where each rank's stood; on another number of processes, or on
    another kind of device, they are seeded anew from (seed, step, rank).
    """
    mmap = is_sharded(model.state_dict())  # each process then reads its own part of the files
    weights, training = (_read(checkpoint.path / name, mmap) for name in (MODEL, TRAINING))
    try:
        model.load_state_dict(parted_weights(weights, model))
        if optimizer is not None:
            optimizer.load_state_dict(parted_moments(training["optimizer"], optimizer))
    except (RuntimeError, ValueError) as error:  # keys or shapes; groups of parameters
        reason = str(error).strip().splitlines()[-1].strip()
        raise UsageError(f"{checkpoint.path} is of another model: {reason}") from error
    if optimizer is not None:
        if scaler is not None and training["scaler"] is not None:
            scaler.load_state_dict(training["scaler"])
        states = training["generators"]
        mine = states[rank()] if rank() < len(states) else {}
        if len(states) == world_size() and mine.keys() == _generator_states().keys():
            torch.set_rng_state(mine["cpu"])
            if "cuda" in mine:
                torch.cuda.set_rng_state(mine["cuda"])
            if "mps" in mine:
                torch.mps.set_rng_state(mine["mps"])
        else:
            seed_dropout(seed, rank(), checkpoint.step)
    return training["extra"]


def resume_path(resume: str, directory: Path) -> Path | None:
    """Where `--resume` says to look: None for a fresh start; UsageError for a path without one.

    After a restart by the launcher it is the run itself, once that has saved anything.
    """
    has_run = on_main_process(lambda: bool(_numbered(directory / "checkpoints")))
    if resume == "auto" or (is_restart() and has_run):
        return directory
    if resume == "never":
        return None
    path = Path(resume).expanduser()
    if not on_main_process(path.is_dir):
        raise UsageError(f"--resume {resume}: no such run or checkpoint folder")
    return path


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def _write_tensors(path: Path, value: Any) -> dict[str, Any]:
    """Write and sync a file; its size and checksum."""
    mark("save")
    try:
        with path.open("wb") as file:
            torch.save(value, file)
            file.flush()
            mark("save")
            os.fsync(file.fileno())
    except RuntimeError as error:  # what torch's writer makes of a full disk
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path.name}, {free:,} bytes free: {first_line(error)}") from error
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _read(path: Path, mmap: bool = False) -> Any:
    try:
        return read_tensors(path, mmap=mmap)
    except FileNotFoundError as reason:  # it was there on the main process
        raise ExplainedError(
            f"{path} is not on this machine: --output-dir on a disk that all machines share, or "
            "--save-on-each-node (and a copy of the run's folder, where there is none yet)"
        ) from reason
    except (OSError, ValueError) as reason:
        raise ExplainedError(f"{path} cannot be read: {reason}") from reason


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for a folder that only looks like one."""
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if digits.isdecimal() else -1


def _score_of(path: Path) -> float:
    """The score in a checkpoint's manifest; -inf where there is none."""
    manifest = read_json(path / MANIFEST)
    score = manifest.get("score") if isinstance(manifest, dict) else None
    return score if isinstance(score, int | float) and score == score else -math.inf


def _numbered(directory: Path) -> list[Path]:
    return [path for path in directory.glob(f"{PREFIX}*") if _step_of(path) >= 0]


def _discard(path: Path) -> Path:
    """Rename a checkpoint, so that no kill leaves half of it under a name that counts."""
    return path.rename(path.with_name(f"{DISCARDED}{path.name}"))


def _remove_hidden(directory: Path) -> None:
    """Remove what a killed save has left, and what has been discarded."""
    for path in (*directory.glob(f"{TEMPORARY}*"), *directory.glob(f"{DISCARDED}*")):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:  # no reason to lose a run: the next save tries again
            warn(f"{path} not removed: {error}")


def _verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all as it says; ValueError with the reason."""
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST} is missing or broken")
    for key, kind in MANIFEST_TYPES.items():
        if not isinstance(manifest.get(key), kind):
            raise ValueError(f"{MANIFEST} has no {key}")
    for name in (MODEL, TRAINING):
        file, expected = path / name, manifest["files"].get(name)
        if not isinstance(expected, dict):
            raise ValueError(f"{MANIFEST} does not list {name}")
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != expected.get("bytes"):
            raise ValueError(f"{name} has {file.stat().st_size} bytes, not {expected.get('bytes')}")
        if _sha256(file) != expected.get("sha256"):
            raise ValueError(f"{name} does not match its checksum")
        read_tensors(file, mmap=True)
    return manifest
