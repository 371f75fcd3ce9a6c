"""Flags that mean the same in every script, and the refusal of values out of range."""

from dataclasses import dataclass
from typing import Any, Literal

from utils.errors import UsageError

BatchNormGroup = int | Literal["auto", "device", "global"]


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
    save_every: int = 500  # updates between checkpoints; one at the end in any case
    keep_checkpoints: int = 2  # newest checkpoints that stay, and the best one
    eval_every: int = 0  # updates between evaluations, one at the end; 0 = once an epoch
    log_every: int = 1  # updates between lines of metrics
    tracker: Literal["wandb", "tensorboard", "none"] = "wandb"  # offline without a key or network
    nonfinite: Literal["stop", "skip"] = "stop"  # at a NaN or infinite loss or gradient
    hang_timeout: float = 600.0  # seconds without any progress, then stacks and an end; 0 = off
    # Communication
    find_unused_parameters: bool = False  # for models in which some parameters get no gradient
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"  # how gradients are sent


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
) -> None:
    """Raise UsageError for a value out of range; the arguments are names separated by spaces."""
    rules = (
        (f"{positive} {POSITIVE}", lambda value: value > 0, "be greater than 0"),
        (f"{not_negative} {NOT_NEGATIVE}", lambda value: value >= 0, "not be negative"),
        (below_one, lambda value: 0 <= value < 1, "be at least 0 and less than 1"),
        (from_minus_one, lambda value: value >= -1, "be at least -1"),
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
