"""The checks of the model: equal on all ranks, every parameter in use, BatchNorm as planned."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torchvision.ops import FrozenBatchNorm2d

from utils.batchnorm_layers import GroupBatchNorm
from utils.preflight.job import FAIL, NOT_CHECKED, PASS, WARN, Finding, Job, Steps
from utils.preflight.runner import name_ranks
from utils.preflight.state import fingerprint, restored
from utils.preflight.truth import plain_copy, small_batches

# Statistics of fewer examples are noisy (Wu and He 2018, arxiv.org/abs/1803.08494).
SMALL_GROUP = 8


def model(job: Job) -> Steps:
    """Parameters, buffers and dtypes are the same on all ranks: as built, and now."""
    everyone = yield (job.built, {} if job.is_sharded else fingerprint(job.plain_model))
    finding = _compare(
        [built for built, _ in everyone],
        "when it was built",
        "set one seed for all ranks before the model is built (torch.manual_seed(cfg.seed)), and "
        "load the same file everywhere (DDP has copied rank 0's weights since)",
    ) or _compare(
        [now for _, now in everyone],
        "now",
        "change weights before accelerator.prepare, or on all ranks alike; load a checkpoint on "
        "all of them",
    )
    if finding:
        return finding
    if job.is_sharded:
        return Finding(NOT_CHECKED, "as built: the same; sharded since, so no rank has all of it")
    count = sum(p.numel() for p in job.plain_model.parameters())
    return Finding(PASS, f"{count:,} parameters, bit for bit the same on all ranks")


def _compare(everyone: list[dict[str, str]], when: str, remedy: str) -> Finding | None:
    for rank, own in enumerate(everyone):
        names = [n for n in everyone[0].keys() | own.keys() if own.get(n) != everyone[0].get(n)]
        if names:
            first = next((name for name in everyone[0] if name in names), names[0])
            return Finding(
                FAIL,
                f"{when}, {len(names)} of {len(everyone[0])} tensors of rank {rank} have other "
                f"weights than rank 0's, {first} the first",
                remedy,
            )
    return None


def unused(job: Job) -> Steps:
    """Every trainable parameter gets a gradient, on every rank."""
    if job.is_sharded:
        yield None
        return Finding(NOT_CHECKED, "the model is sharded: no process can run it alone")
    without: set[str] | None = None
    with restored(job):
        copy = plain_copy(job)
        for layer in copy.modules():  # of one example, statistics could not be made
            layer.training = layer.training and not isinstance(layer, GroupBatchNorm)
        trainable = [name for name, p in copy.named_parameters() if p.requires_grad]
        for batch in small_batches(job, 1)[1]:
            copy.zero_grad(set_to_none=True)
            with job.accelerator.autocast():
                loss, _ = job.compute_loss(copy, batch)
            loss.backward()
            missing = {n for n, p in copy.named_parameters() if p.requires_grad and p.grad is None}
            without = missing if without is None else without & missing
    in_ddp = isinstance(getattr(job.model, "_orig_mod", job.model), DistributedDataParallel)
    everyone = yield sorted(without or ())
    return judge_unused(everyone, len(trainable), job.find_unused_parameters, in_ddp)


def judge_unused(
    everyone: list[list[str]], count: int, finds_unused: bool, in_ddp: bool
) -> Finding:
    """From the names of the parameters without a gradient, by rank.

    Without DDP (one process) they are merely not trained; with it, the next update raises.
    """
    somewhere = sorted(set().union(*everyone))
    everywhere = sorted(set(everyone[0]).intersection(*everyone))
    partly = [name for name in somewhere if name not in everywhere]
    advice = "; use them all, or freeze them (requires_grad_(False)); or --find-unused-parameters"
    if not somewhere:
        if finds_unused and in_ddp and len(everyone) > 1:
            return Finding(
                WARN,
                f"all {count} parameters get a gradient",
                "leave out --find-unused-parameters: it searches the graph at every update",
            )
        return Finding(PASS, f"all {count} trainable parameters get a gradient on every rank")
    if partly:
        ranks = [rank for rank, names in enumerate(everyone) if partly[0] in names]
        seen = f"{len(partly)} parameters ({partly[0]}) get no gradient on {name_ranks(ranks)}"
        remedy = "DDP waits for them: take the same way through the model on all ranks" + advice
    else:
        seen = f"{len(everywhere)} of {count} parameters get no gradient: {everywhere[0]}"
        remedy = "a head that the loss does not use, or a detach() or no_grad() behind it" + advice
    if finds_unused:
        return Finding(PASS, f"{seen} (--find-unused-parameters is on)")
    return Finding(FAIL if in_ddp else WARN, seen, remedy)


def batchnorm(job: Job) -> Steps:
    """The layers are converted, before prepare; the groups are large enough."""
    planned = {layer for _, layer in job.bn_plan.layers}
    plain, others, foreign = [], [], []
    for name, layer in job.plain_model.named_modules():
        if isinstance(layer, GroupBatchNorm):
            foreign += [] if layer in planned or layer.bn_frozen else [name]
        elif isinstance(layer, _BatchNorm):
            is_fixed = not layer.training and job.plain_model.training
            plain += [] if is_fixed else [name]
        elif isinstance(layer, FrozenBatchNorm2d):
            continue  # it never moves its statistics
        elif layer._buffers.get("running_mean") is not None:
            others.append((name, type(layer).__name__))
    everyone = yield {
        "plain": plain,
        "others": others,
        "foreign": foreign,
        "broadcast": _broadcast_buffers(job.model),
    }
    return judge_batchnorm(everyone[0], job)


def _broadcast_buffers(wrapped: nn.Module) -> list[str]:
    """BatchNorm buffers that DDP would overwrite with rank 0's at every forward."""
    ddp: Any = getattr(wrapped, "_orig_mod", wrapped)
    if not isinstance(ddp, DistributedDataParallel):
        return []
    return [
        f"{path}.{name}"
        for path, layer in ddp.module.named_modules()
        if isinstance(layer, GroupBatchNorm)
        for name, _ in layer.named_buffers(recurse=False)
        if f"{path}.{name}" not in ddp.parameters_to_ignore
    ]


def judge_batchnorm(facts: dict[str, Any], job: Job) -> Finding:
    """From one rank's facts: the ranks' models are the same (see the check of the model)."""
    plan = job.bn_plan
    order = "build the whole model, then convert_batchnorm, then the optimizer, then prepare"
    if facts["plain"]:
        return Finding(
            FAIL,
            f"BatchNorm layer '{facts['plain'][0]}' is not converted: each process normalises by "
            "its own samples",
            f"it was added after convert_batchnorm: {order}",
        )
    if facts["foreign"] or facts["broadcast"]:
        name = (facts["foreign"] + facts["broadcast"])[0]
        return Finding(
            FAIL,
            f"DistributedDataParallel does not know of the conversion ('{name}'), or another plan "
            "holds the layer",
            f"convert_batchnorm, once, before accelerator.prepare: {order}",
        )
    if facts["others"]:
        name, kind = facts["others"][0]
        return Finding(
            WARN,
            f"'{name}', of class {kind}, has running statistics of its own: each process moves "
            "them by its own samples",
            "use torch.nn.BatchNorm1d, 2d or 3d, which convert_batchnorm knows",
        )
    if not plan.num_layers:
        return Finding(PASS, plan.describe())
    if plan.group < SMALL_GROUP:
        return Finding(
            WARN,
            f"{plan.describe()}: statistics of {plan.group} examples are noisy",
            "raise --bn-group to 16 or more (over several ranks: it is synchronised then), or "
            "use GroupNorm",
        )
    return Finding(PASS, plan.describe())
