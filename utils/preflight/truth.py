"""The gradient of a window in one process: the truth that the distributed one is compared with."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from utils.batchnorm_layers import GroupBatchNorm
from utils.preflight.job import Job
from utils.window import Batch

EXAMPLES = 32  # about so many in the small window, over all processes and micro-steps
MOST_EXAMPLES = 1024  # more are not gathered in one process
Gradients = dict[str, Tensor]


def small_size(job: Job) -> int:
    """Examples of a small micro-batch: where they fit, two groups of BatchNorm, so that the split
    is part of it; else a part of one group, which is then the group."""
    plan, group = job.plan, job.bn_plan.group
    per_example = plan.num_processes * plan.accumulation
    wanted = min(plan.micro_batch_size, max(2, EXAMPLES // per_example))
    if not job.bn_plan.num_layers or group >= plan.micro_batch_size:
        return wanted
    return 2 * group if 2 * group * per_example <= 2 * EXAMPLES else min(group, wanted)


def small_batches(job: Job, step: int) -> tuple[Tensor, list[Batch]]:
    """This process's ids and micro-batches of update `step`, from the script's loader, cut."""
    size = small_size(job)
    start_step, job.sampler.start_step = job.sampler.start_step, step - 1
    try:
        window = next(iter(job.train_loader))
    finally:
        job.sampler.start_step = start_step
    batches = [{key: value[:size] for key, value in b.items()} for b in window.batches]
    return torch.cat([batch["id"] for batch in batches]), batches


def plain_copy(job: Job) -> nn.Module:
    """The model as one process has it: no DDP, no autocast, BatchNorm within the process."""
    model = copy.deepcopy(job.plain_model)
    for name in ("forward", "_original_forward"):  # what `prepare` has put there for autocast
        model.__dict__.pop(name, None)
    for layer in model.modules():
        if isinstance(layer, GroupBatchNorm):
            layer.bn_ranks = 1
    return model


def emulate_groups(job: Job, model: nn.Module) -> None:
    """BatchNorm groups of the small window, in a process that holds whole micro-steps of it."""
    size, group = small_size(job), job.bn_plan.group
    in_group = size * job.bn_plan.ranks_sharing if job.bn_plan.ranks_sharing > 1 else group
    for layer in model.modules():
        if isinstance(layer, GroupBatchNorm):
            layer.bn_group = min(in_group, size * job.bn_plan.ranks_sharing)


def perturb(model: nn.Module, seed: int = 0) -> None:
    """Move the weights off their start, the same way on all ranks.

    Fresh models have weights that are zero on purpose (the last BatchNorm of a residual block),
    behind which all gradients are zero, right or wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            spread = float(p.detach().float().std(correction=0)) if p.numel() > 1 else 0.0
            p.add_(0.1 * (spread or 1.0) * noise.to(p.device, p.dtype))


def merge(everyone: list[list[Batch]], device: torch.device, dtype: torch.dtype | None):
    """Micro-steps of all processes as one batch each, in the order of ranks."""
    steps = []
    for micro_step in zip(*everyone, strict=True):
        step = {k: torch.cat([b[k] for b in micro_step]).to(device) for k in micro_step[0]}
        if dtype is not None:
            step = {k: v.to(dtype) if v.is_floating_point() else v for k, v in step.items()}
        steps.append(step)
    return steps


def window_loss(job: Job, model: nn.Module, steps: list[Batch], backward: bool) -> Tensor:
    """(sum of the losses) / (valid elements) of the window; gradients are added up."""
    count = torch.stack([job.count_valid(step) for step in steps]).sum().clamp(min=1)
    total: Any = 0.0
    for step in steps:
        loss, _ = job.compute_loss(model, step)
        if backward:
            (loss / count).backward()
        total = total + loss.detach() / count
    return total


def true_gradient(job: Job, model: nn.Module, steps: list[Batch]) -> Gradients:
    """Of the window's loss, by name of the parameter."""
    model.zero_grad(set_to_none=True)
    window_loss(job, model, steps, backward=True)
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def slope_error(job: Job, model: nn.Module, steps: list[Batch], gradient: Gradients) -> float:
    """How far the gradient is from the loss's own slope, along a random direction near it.

    In float64. What is cut out of the graph on purpose (a stop-gradient) shows as well.
    """
    generator = torch.Generator().manual_seed(1)
    norm = float(torch.stack([g.norm() for g in gradient.values()]).norm())
    parameters = dict(model.named_parameters())
    direction = {}
    for name, g in gradient.items():
        noise = torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g.device, g.dtype)
        direction[name] = g * (1 + noise / 2) + noise * (0.3 * norm / max(1, g.numel()) ** 0.5)
    size = float(torch.stack([d.norm() for d in direction.values()]).norm())
    weights = float(torch.stack([parameters[n].detach().norm() for n in gradient]).norm())
    step = 1e-7 * max(weights, 1e-3) / max(size, 1e-300)

    @torch.no_grad()
    def moved(by: float) -> None:
        for name, d in direction.items():
            parameters[name].add_(d, alpha=by)

    with torch.no_grad():
        moved(step)
        above = window_loss(job, model, steps, backward=False)
        moved(-2 * step)
        below = window_loss(job, model, steps, backward=False)
        moved(step)
    slope = float(above - below) / (2 * step)
    expected = float(sum((g * direction[name]).sum() for name, g in gradient.items()))
    return abs(slope - expected) / max(abs(slope), abs(expected), 1e-300)


def spread_counts(job: Job, batches: list[Batch]) -> bool:
    """Take the labels off every second example of every second micro-batch, in place.

    So the numbers of valid elements differ between processes and micro-steps, as they do in real
    data and as shows a wrong weight. False where `ignore_index` labels are no part of the task.
    """
    key, done = job.label, False
    for micro_step, batch in enumerate(batches):
        labels = batch.get(key)
        if labels is None or labels.dtype != torch.int64 or len(labels) < 2:
            return False
        trial = {**batch, key: labels.clone()}
        trial[key][::2] = job.ignore_index
        if int(job.count_valid(trial)) >= int(job.count_valid(batch)):
            return False
        index = micro_step * job.plan.num_processes + job.accelerator.process_index
        if index % 2 == 1:
            batch[key] = trial[key]
        done = True
    return done


def sum_ratio(job: Job, model: nn.Module, batch: Batch) -> float | None:
    """The loss of a batch over that of its two halves together, in evaluation: 1 for a sum."""
    size = len(batch["id"])
    if size < 2 or any(len(value) != size for value in batch.values()):
        return None
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        model.eval()
        whole, first, second = (
            float(job.compute_loss(model, {k: v[part] for k, v in batch.items()})[0])
            for part in (slice(None), slice(size // 2), slice(size // 2, None))
        )
    for module, mode in modes.items():
        module.training = mode
    return whole / (first + second) if first + second else None
