"""Flags that mean the same in every script, and the refusal of values out of range."""

import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from utils.checkpoint import find_checkpoint
from utils.errors import UsageError
from utils.export import check_packages
from utils.start import processes_asked_for

BatchNormGroup = int | Literal["auto", "device", "global"]
Flags = TypeVar("Flags", bound="RunFlags")
ACTIONS = ("preflight", "eval_only", "export", "predict")  # in place of training: one at most


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How a run is kept, watched and stopped; a script's Config adds data, model and recipe."""

    # Run
    output_dir: str = ""  # the run directory; default runs/<script>-<date-time>
    resume: str = "auto"  # auto = newest checkpoint in the run directory; never; or a path
    preflight: bool = False  # check everything, print the report, exit 0 or 1 without training
    profile: str = ""  # trace updates FIRST:LAST (10:14) and say what their time went into
    stop_after: int = 0  # save and stop after update N, as a preemption would; 0 = off
    eval_only: bool = False  # evaluate the resumed checkpoint, write the metrics, exit
    export: Literal["none", "safetensors", "onnx", "torch-export"] = "none"  # of --resume RUN; exit
    predict: str = ""  # an image or a folder of them, by the model of --resume RUN; exit
    save_every: int = 500  # updates between checkpoints; one at the end in any case
    keep_checkpoints: int = 2  # newest checkpoints that stay, and the best one
    save_on_each_node: bool = False  # where the machines share no disk; resume needs all of them
    eval_every: int = 0  # updates between evaluations, one at the end; 0 = once an epoch
    log_every: int = 1  # updates between lines of metrics
    tracker: Literal["wandb", "tensorboard", "none"] = "wandb"  # offline without a key or network
    nonfinite: Literal["stop", "skip"] = "stop"  # at a NaN or infinite loss or gradient
    hang_timeout: float = 600.0  # seconds without any progress, then stacks and an end; 0 = off
    # Communication
    find_unused_parameters: bool = False  # for models in which some parameters get no gradient
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"  # how gradients are sent

    def as_in_run(self: Flags) -> Flags:
        """For --export and --predict: the flags that the run was made with; else these.

        Those are the script's own, of data, model and recipe; one that is given here stays (a
        data set that has moved, say; another recipe is refused as at any resume). `resume` is then
        the checkpoint itself. UsageError where the action cannot work, before anything is done.
        """
        given = [name for name in ACTIONS if getattr(self, name) not in (False, "", "none")]
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{names}: one at a time; leave all but one out")
        if given not in (["export"], ["predict"]):
            return self
        action = f"--{given[0]} {getattr(self, given[0])}"
        if self.predict and not Path(self.predict).expanduser().exists():
            raise UsageError(f"{action}: no such file or folder")
        check_packages(self.export)
        processes = processes_asked_for()
        if processes > 1:
            command = shlex.join(["python", *sys.argv])
            raise UsageError(f"{action} runs in one process, not in {processes}: `{command}`")
        path = self.output_dir if self.resume == "auto" else self.resume
        if path in ("", "never"):
            raise UsageError(f"{action} needs a run or a checkpoint: --resume RUN")
        found = find_checkpoint(Path(path).expanduser())
        if found is None:
            raise UsageError(f"{action}: no usable checkpoint in {path}")
        saved, group = found.manifest.get("flags"), found.manifest["recipe"].get("bn_group")
        if not isinstance(saved, dict):
            raise UsageError(f"{action}: {found.path / 'manifest.json'} has no flags of its run")
        saved |= {"verify_data": False}  # the few samples that are read say it themselves
        if isinstance(group, int):  # resolved. Several processes' micro-batches may have shared it
            micro = max(group, found.manifest.get("micro_batch_size", 0))
            saved |= {"bn_group": group, "micro_batch_size": micro}
        own = [field for field in fields(self) if field.name not in RunFlags.__dataclass_fields__]
        left_out = [field.name for field in own if getattr(self, field.name) == field.default]
        values = {name: saved[name] for name in left_out if name in saved}
        return replace(self, resume=str(found.path), **values)


# Of RunFlags; a script names those of its own.
POSITIVE = "save_every keep_checkpoints log_every"
NOT_NEGATIVE = "stop_after eval_every hang_timeout"


def check_flags(
    flags: dict[str, Any],
    *,
    positive: str = "",
    not_negative: str = "",
    below_one: str = "",
    from_minus_one: str = "",
    share: str = "",
    from_one: str = "",
) -> None:
    """Raise UsageError for a value out of range; the arguments are names separated by spaces."""
    numbers = " ".join(name for name, value in flags.items() if isinstance(value, (int, float)))
    rules = (
        (numbers, lambda value: abs(value) < 2**63, "be a number below 2**63"),
        (f"{positive} {POSITIVE}", lambda value: value > 0, "be greater than 0"),
        (f"{not_negative} {NOT_NEGATIVE}", lambda value: value >= 0, "not be negative"),
        (below_one, lambda value: 0 <= value < 1, "be at least 0 and less than 1"),
        (from_minus_one, lambda value: value >= -1, "be at least -1"),
        (from_one, lambda value: value >= 1, "be at least 1"),
        (share, lambda value: 0 < value <= 1, "be greater than 0 and at most 1"),
        ("profile", _is_span, "be FIRST:LAST, updates counted from 1, such as 10:14"),
    )
    for names, is_good, rule in rules:
        for name in names.split():
            if not is_good(flags[name]):
                raise UsageError(f"--{name.replace('_', '-')} {flags[name]} must {rule}")
    if flags["comm_hook"] == "powersgd" and flags["nonfinite"] == "skip":
        raise UsageError(
            "--comm-hook powersgd keeps what it has not sent yet: after one gradient that is not "
            "finite all are; leave out --nonfinite skip, or use --comm-hook bf16"
        )


def _is_span(text: str) -> bool:
    """Whether it is "", or two numbers in order, from 1, with a colon between them."""
    first, colon, last = text.partition(":")
    numbers = first.isdecimal() and last.isdecimal()
    return not text or (bool(colon) and numbers and 1 <= int(first) <= int(last))
