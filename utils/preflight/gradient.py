"""The check of the gradient: the script's own update, distributed, against one process."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from utils.preflight.job import FAIL, NOT_CHECKED, Finding, Job, Steps, read_samples
from utils.preflight.state import (
    checksum,
    full_precision,
    generator_states,
    inner_optimizer,
    restored,
    without_dropout,
)
from utils.preflight.truth import (
    MOST_EXAMPLES,
    Gradients,
    emulate_groups,
    merge,
    perturb,
    plain_copy,
    slope_error,
    small_batches,
    small_size,
    spread_counts,
    sum_ratio,
    true_gradient,
)
from utils.preflight.verdict import MOST_NOISE, SMALL, judge_gradient
from utils.window import Batch, to_device

# Relative error of a parameter's gradient. What rounding does to this very gradient is measured
# (float32 against float64, in one process) and NOISE times as much is allowed on top. Where that
# would excuse nearly anything (MOST_NOISE), a parameter whose error is not SMALL is left out. As
# configured, twice the rounding of that precision in one process is allowed where it is more than
# LOOSE.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-9}
NOISE = 10.0
LOOSE = {"bf16": 2e-2, "fp16": 1e-2}  # of the whole gradient, as configured
MOST_OVERFLOWS = 16  # of fp16, each of which halves the scale and makes no step
COMPARED = 4  # samples of a batch, with the data set's own


def gradient(job: Job) -> Steps:
    """A small window through the script's own `update`, and the same samples in one process."""
    plan, size = job.plan, small_size(job)
    examples = size * plan.num_processes * plan.accumulation
    if job.is_sharded or examples > MOST_EXAMPLES:
        yield None
        seen = "the model is sharded" if job.is_sharded else f"{examples} examples at the least"
        return Finding(NOT_CHECKED, f"{seen}: one process cannot hold the truth to compare with")
    step = job.total_steps // 2 + 1
    with restored(job):
        ids, batches = small_batches(job, min(step, job.total_steps))
        whole = batches[0]
        batches = [dict(batch) for batch in batches]
        spread_counts(job, batches)
        content = [checksum(v) for b in batches for k, v in b.items() if k not in ("id", job.label)]
        mine = [{key: value.cpu() for key, value in batch.items()} for batch in batches]
        other = _other_sample(job, whole, job.sampler.epoch_of(min(step, job.total_steps)))
        everyone = yield {"ids": ids.cpu(), "content": content, "batches": mine, "other": other}
        repeated = _same_samples(everyone)
        if repeated is not None:
            return repeated
        merged = [answer["batches"] for answer in everyone]
        with _prepared(job):
            facts = _strict(job, batches, whole, ids, min(step, job.total_steps), merged)
        answers = yield facts
        finding = judge_gradient(answers, plan.num_processes, plan.accumulation, job)
        if finding.result == FAIL:
            return finding
        precision = job.accelerator.mixed_precision
        if precision in LOOSE or job.comm_hook != "no":
            with _prepared(job):
                facts = _loose(job, batches, ids, min(step, job.total_steps), merged)
            answers = yield facts
            worst, rounding = max(answers)
            bound = max(LOOSE.get(precision, LOOSE["bf16"]), 2 * rounding)
            name = precision if precision in LOOSE else f"{job.comm_hook} hook"
            if not worst <= bound:
                return Finding(
                    FAIL,
                    f"as configured ({name}) the gradient is {worst:.1e} off, above {bound:.1e}",
                    "compare a few hundred updates with --mixed_precision no and --comm-hook none",
                )
            finding = finding._replace(seen=f"{finding.seen}; as configured ({name}) {worst:.0e}")
        return finding


def _same_samples(everyone: list[dict[str, Any]]) -> Finding | None:
    ids = torch.cat([answer["ids"] for answer in everyone])
    contents = [tuple(answer["content"]) for answer in everyone]
    twice = len(contents) > 1 and len(set(contents)) < len(contents)
    remedy = (
        "a data set must read the samples it is asked for, or ranks see the same samples; nothing "
        "after the loader may broadcast or exchange them"
    )
    for rank, other in enumerate(answer["other"] for answer in everyone):
        if other is not None:
            seen = f"rank {rank}: sample {other} of the batch is not what the data set has there"
            return Finding(FAIL, seen, remedy)
    if twice:
        return Finding(FAIL, "several ranks see the same samples in one update", remedy)
    if len(ids.unique()) < len(ids):
        return Finding(FAIL, "an update has the same samples twice", remedy)
    return None


def _other_sample(job: Job, batch: Batch, epoch: int) -> int | None:
    """A sample of this batch whose content is another than when it is read alone, twice alike."""
    loader = job.train_loader
    for row, sample in list(enumerate(batch["id"].tolist()))[:COMPARED]:
        index = job.sampler.indices([sample], epoch)
        once, again = (
            loader.transform(to_device(read_samples(loader.loader, index), job.device), epoch)
            for _ in range(2)
        )
        for key, value in batch.items():
            same_shape = once[key].shape[1:] == value.shape[1:]
            if same_shape and torch.equal(once[key], again[key]):
                if not torch.allclose(once[key][0], value[row], rtol=1e-3, equal_nan=True):
                    return sample
    return None


@contextmanager
def _prepared(job: Job) -> Iterator[None]:
    """Perturbed weights and no dropout, for a while."""
    with restored(job), without_dropout(job.plain_model):
        perturb(job.plain_model)
        yield


def own_gradients(job: Job, batches: list[Batch], ids, step: int) -> list[Gradients]:
    """What the optimizer is given in `update`, one set for each step that it makes."""
    optimizer, accelerator, model = inner_optimizer(job), job.accelerator, job.plain_model
    seen: list[Gradients] = []

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        named = model.named_parameters()
        seen.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})
        job.rates_used[step] = [group["lr"] for group in optimizer.param_groups]

    clip = accelerator.clip_grad_norm_
    accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: clip(  # type: ignore
        parameters, math.inf, norm_type
    )
    handle = optimizer.register_step_pre_hook(before_step)
    try:
        optimizer.zero_grad()
        job.update(job.train_loader.make_window(step, batches, ids))
    finally:
        handle.remove()
        del accelerator.clip_grad_norm_
    return seen


def _strict(job, batches, whole, ids, step, merged) -> dict[str, Any]:
    """Errors by parameter, in full precision, and what tells the causes apart."""
    model = job.plain_model
    copy = plain_copy(job)
    facts: dict[str, Any] = {"sum": sum_ratio(job, copy, whole)}
    with full_precision(model), without_dropout(copy):
        seen = own_gradients(job, batches, ids, step)
        facts["steps"] = len(seen)
        if len(seen) != 1:
            return facts
        emulate_groups(job, copy)
        before = generator_states()["torch"]
        plain = true_gradient(job, copy, merge(merged, job.device, None))
        facts["random"] = not torch.equal(before, generator_states()["torch"])
        exact, facts["slope"] = _in_float64(job, copy, merged)
    ours = seen[0]
    facts["checksum"] = {name: checksum(g) for name, g in ours.items()}
    names = [n for n in plain if n in ours]
    facts["missing"] = sorted(set(plain) ^ set(ours))
    facts |= _errors(ours, plain, exact or plain, names, exact is not None)
    return facts


def _in_float64(job: Job, copy: nn.Module, merged) -> tuple[Gradients | None, float | None]:
    """The truth without rounding, where the device and the model have float64, and its slope."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        copy.double()
        steps = merge(merged, job.device, torch.float64)
        exact = true_gradient(job, copy, steps)
        if not all(g.dtype == torch.float64 for g in exact.values()):
            return None, None
        return exact, slope_error(job, copy, steps, exact)
    except (RuntimeError, TypeError, NotImplementedError):
        return None, None
    finally:
        torch.set_default_dtype(default)


def _errors(ours, plain, exact, names, measured: bool) -> dict[str, Any]:
    """Compare; a small gradient is measured by a thousandth of its share in the whole one, as
    those that are zero but for rounding (a bias in front of BatchNorm) have no size of their own.
    """
    ours, plain, exact = ({n: g[n].double().cpu() for n in names} for g in (ours, plain, exact))
    norms = {n: float(exact[n].norm()) for n in names}
    whole = math.sqrt(sum(norm**2 for norm in norms.values())) or 1.0
    floor = 1e-3 * whole / math.sqrt(max(1, len(names)))
    bound = BOUNDS.get(torch.get_default_dtype(), 1e-5)
    worst, excess, worst_name, largest = 0.0, 0.0, "", 0.0
    shaky = noisy = left_out = 0
    for name in names:
        size = max(norms[name], floor)
        noise = float((plain[name] - exact[name]).norm()) / size if measured else 1e-5
        error = float((ours[name] - exact[name]).norm()) / size
        shaky += noise > SMALL
        if error > SMALL:
            noisy += noise > SMALL
            left_out += noise > MOST_NOISE
            if noise > MOST_NOISE:
                continue
        largest = max(largest, error)
        if not error <= excess * (bound + NOISE * noise):
            worst, excess, worst_name = error, error / (bound + NOISE * noise), name
    product = sum(float((ours[n] * exact[n]).sum()) for n in names)
    ratio = product / whole**2
    rest = math.sqrt(sum(float((ours[n] - ratio * exact[n]).norm()) ** 2 for n in names)) / whole
    return {
        "error": worst,
        "excess": excess,
        "name": worst_name,
        "largest": largest,
        "shaky": shaky,
        "noisy": noisy,
        "left_out": left_out,
        "count": len(names),
        "ratio": ratio,
        "rest": rest / max(abs(ratio), 1e-12),
    }


def _loose(job, batches, ids, step, merged) -> tuple[float, float]:
    """Relative error of the whole gradient with the precision and the hook as configured, and
    what the precision alone does to it in one process."""
    copy = plain_copy(job)
    emulate_groups(job, copy)
    with without_dropout(copy):
        seen: list[Gradients] = []
        for _ in range(MOST_OVERFLOWS if job.accelerator.scaler is not None else 1):
            seen = seen or own_gradients(job, batches, ids, step)
        steps = merge(merged, job.device, None)
        autocast = job.accelerator.autocast if job.accelerator.native_amp else nullcontext
        with autocast():
            truth = true_gradient(job, copy, steps)
        exact = true_gradient(job, copy, steps)
    if len(seen) != 1:
        return math.inf, 0.0
    whole = _distance(exact)
    return _distance(seen[0], truth) / whole, _distance(truth, exact) / whole


def _distance(one: Gradients, other: Gradients | None = None) -> float:
    squares = (
        float((g - other[n] if other else g).double().norm()) ** 2
        for n, g in one.items()
        if other is None or n in other
    )
    return math.sqrt(sum(squares))
