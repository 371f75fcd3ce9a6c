"""What is NaN or infinite in an update, on which process, from which samples."""

import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from utils import checkpoint
from utils.distributed import gather_objects, rank
from utils.errors import ExplainedError
from utils.window import Totals, Window

CURES = (
    "usual cures: a larger --warmup-fraction, a lower --lr, a larger --bn-group, bf16 instead of "
    "fp16, --max-grad-norm 1; --nonfinite skip leaves such updates out"
)


class NonFiniteError(ExplainedError):
    """A loss or gradient is NaN or infinite; raised by all processes before the optimizer steps."""


def describe_nonfinite(
    window: Window, totals: Totals, directory: Path, *, keep: bool
) -> tuple[str, bool]:
    """What is not finite where, and whether it comes from this process; all of them call it.

    With `keep` the micro-batches that have it go to RUN/nonfinite/, to reproduce it.
    """
    inputs, micro_steps = _find_bad(window)
    kept = micro_steps or ([] if totals.bad_loss else list(range(len(window.batches))))
    path = directory / "nonfinite" / f"step_{window.step:08d}_rank_{rank()}.pt"
    if kept and keep:
        batches = [{k: v.cpu() for k, v in window.batches[i].items()} for i in kept]
        with suppress(OSError):  # a full disk must not hide this error
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": window.step, "epoch": window.epoch, "batches": batches}, path)
    ids = [i for m in micro_steps for i in window.batches[m]["id"].tolist()]
    found = gather_objects((inputs, [m + 1 for m in micro_steps], ids))
    text = [f"update {window.step}: loss {totals.loss}, gradient norm {totals.grad_norm}"]
    first_cause = [r for r, (inputs, _, _) in enumerate(found) if inputs]
    culprits = first_cause or [r for r, (_, micro_steps, _) in enumerate(found) if micro_steps]
    for r in culprits:
        inputs, micro_steps, ids = found[r]
        what = f"inputs not finite, sample ids {inputs}" if inputs else f"sample ids {ids}"
        text.append(f"rank {r}, micro-step {', '.join(map(str, micro_steps))}: {what}")
    if not culprits:
        text.append("all losses are finite: the gradient is not")
    saved = directory / "nonfinite" / f"step_{window.step:08d}_rank_*.pt"
    text.append(f"the micro-batches are in {saved}")
    return "; ".join(text), rank() in culprits


def raise_nonfinite(text: str, directory: Path, is_mine: bool) -> NoReturn:
    """End the run on all processes: with the last checkpoint, the cures, and `text` before them."""
    newest = checkpoint.newest_name(directory / "checkpoints")
    error = NonFiniteError(
        f"{text}; the weights are as before this update; last checkpoint: {newest}; {CURES}"
    )
    error.quiet = not (is_mine or rank() == 0)
    if not is_mine:
        time.sleep(1.0)  # the launcher names whoever ends first
    raise error


def _find_bad(window: Window) -> tuple[list[int], list[int]]:
    """Of this process: ids of samples with inputs that are not finite; bad micro-steps from 0."""
    ids, micro_steps = [], []
    losses = window.losses if window.losses is not None else torch.zeros(0)
    for i in range(len(window.batches)):
        batch = window.batches[i]
        bad = torch.zeros_like(batch["id"], dtype=torch.bool)
        for value in batch.values():
            if value.is_floating_point() and len(value) == len(bad):
                bad |= (
                    ~value.flatten(1).isfinite().all(dim=1) if value.ndim > 1 else ~value.isfinite()
                )
        ids += batch["id"][bad].tolist()
        own_loss = losses[i] if len(losses) == len(window.batches) else losses.sum()
        if bad.any() or not own_loss.isfinite():
            micro_steps.append(i)
    return ids, micro_steps
