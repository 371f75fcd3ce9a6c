"""BatchNorm over a declared number of examples, the same on every layout of processes.

A group of N consecutive examples of the update's window shares its statistics, whatever the
micro-batch m of a process: m > N splits the micro-batch into contiguous chunks (ghost BatchNorm,
Hoffer et al. 2017, arxiv.org/abs/1705.08741), m = N is plain BatchNorm, m < N synchronises N/m
neighbouring ranks. Running statistics take one momentum step per update, with the mean over all
groups of the window, so they are the same on every rank and in every layout.

    group, advice = resolve_group(cfg.bn_group, micro_batch_size, num_processes)
    plan = convert_batchnorm(model, group, micro_batch_size)   # before optimizer and prepare
    ...                                                        # forwards and backwards of a window
    totals = window.reduce(..., plan.statistics())             # over the processes, in place
    plan.update_running_statistics()                           # or plan.discard_statistics()

The layers are in utils/batchnorm_layers.py, their arithmetic in utils/batchnorm_functions.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torchvision.ops import FrozenBatchNorm2d

from utils.batchnorm_functions import subgroup
from utils.batchnorm_layers import (
    GROUPED,
    PLAIN,
    PLAIN_OF_DIMS,
    GroupBatchNorm,
    WindowStatistics,
)
from utils.distributed import all_reduce_sum, broadcast_object, world_size
from utils.errors import UsageError

NO_LAYERS = "no BatchNorm layers"


def resolve_group(group: int | str, micro_batch_size: int, num_processes: int) -> tuple[int, str]:
    """The number of examples that share statistics, and a line of advice to print ("" if none).

    `group` is a number, "auto", "device" (one micro-batch) or "global" (one micro-step of all
    processes). UsageError where the layout cannot honour it.
    """
    m, processes = micro_batch_size, num_processes
    advice = ""
    if group == "auto":
        group = "global" if processes > 1 and m < 16 else "device"
        if processes > 1 and 16 <= m < 64:
            advice = (
                f"bn_group=auto: each process normalises its own {m} examples, so the result "
                "depends on the layout; set a number, or global if training is unstable"
            )
    if group in ("device", "global"):
        return m * processes if group == "global" else m, advice
    if not str(group).isdecimal() or int(group) < 1:
        raise UsageError(f"bn_group={group} is not a positive number, auto, device or global")
    size = int(group)
    valid = [n for n in range(1, m + 1) if m % n == 0]
    valid += [m * ranks for ranks in range(2, processes + 1) if processes % ranks == 0]
    if size not in valid:
        below, above = [n for n in valid if n < size], [n for n in valid if n > size]
        nearest = below[-1:] + above[:1] if above else below[-2:]
        raise UsageError(
            f"bn_group={size} cannot be honoured by {processes} processes x micro_batch_size={m}; "
            f"use {' or '.join(map(str, nearest))}"
        )
    return size, ""


# ---- Conversion and plan --------------------------------------------------------------------


def convert_batchnorm(model: nn.Module, group: int, micro_batch_size: int) -> "BatchNormPlan":
    """Turn the BatchNorm layers of `model` into groups of `group` examples, in place.

    Every rank calls it, before the optimizer is built and before `accelerator.prepare`, with the
    very module that goes to `prepare`: BatchNorm's buffers become rank 0's here, and DDP, which
    knows them by name, leaves them alone. Calling it again plans anew. Layers in evaluation mode
    stay frozen if the model is in training mode or they have nothing to train; torchvision's
    FrozenBatchNorm2d is left as it is, and counted with them.
    UsageError: a layout that cannot honour `group`, an unknown BatchNorm class, a model that is
    already wrapped or compiled.
    """
    processes = world_size()
    resolve_group(group, micro_batch_size, processes)
    for module in model.modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled or isinstance(module, DistributedDataParallel):
            raise UsageError(
                f"the model holds a {type(module).__name__} that is already wrapped or compiled; "
                "call convert_batchnorm before accelerator.prepare and torch.compile"
            )
    named = [(name, x) for name, x in model.named_modules() if isinstance(x, _BatchNorm)]
    for name, layer in named:
        if type(layer) not in GROUPED and type(layer) not in PLAIN:
            raise UsageError(
                f"BatchNorm layer '{name}' is a {type(layer).__module__}.{type(layer).__qualname__}"
                ", a class that convert_batchnorm does not know; use torch.nn.BatchNorm1d, 2d or 3d"
                " there (after one forward, if it is a lazy one)"
            )
    fixed_layers = sum(isinstance(layer, FrozenBatchNorm2d) for layer in model.modules())
    ranks = max(1, group // micro_batch_size)
    active = []
    for name, layer in named:
        parameters = [p.requires_grad for p in (layer.weight, layer.bias) if p is not None]
        fixed = bool(parameters) and not any(parameters)
        frozen = not layer.training and (model.training or fixed)
        if isinstance(layer, GroupBatchNorm):
            frozen = frozen or layer.bn_frozen
        else:
            layer.__dict__.pop("process_group", None)  # torch.nn.SyncBatchNorm's
            layer.__class__ = GROUPED[type(layer)]
        layer.bn_group, layer.bn_ranks, layer.bn_frozen = group, ranks, frozen  # type: ignore
        mean = None if frozen else layer.running_mean
        layer.bn_window = None if mean is None else WindowStatistics(mean)  # type: ignore
        active += [] if frozen else [(name, layer)]
    _exempt_from_broadcast(model)
    if ranks > 1:
        subgroup(ranks)  # made now, while all ranks are here
    implementation = "plain" if group == micro_batch_size else "ghost split"
    return BatchNormPlan(
        group=group,
        micro_batch_size=micro_batch_size,
        num_processes=processes,
        num_layers=len(active),
        num_frozen=len(named) - len(active) + fixed_layers,
        implementation="synchronised" if ranks > 1 else implementation,
        ranks_sharing=ranks,
        layers=active,
    )


def revert_batchnorm(model: nn.Module) -> None:
    """Make the layers plain again, in place, for export or another trainer.

    A converted torch.nn.SyncBatchNorm becomes the plain class that fits the inputs it has seen;
    it is a torch.nn.SyncBatchNorm again if it has seen none.
    """
    names = _buffers(model)
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [n for n in ignored if n not in names]  # type: ignore
    for layer in model.modules():
        if isinstance(layer, GroupBatchNorm):
            plain = PLAIN[type(layer)]
            if plain is nn.SyncBatchNorm:
                plain = PLAIN_OF_DIMS.get(layer.bn_dims, plain)
                if plain is nn.SyncBatchNorm:
                    layer.__dict__["process_group"] = None
            for name in [name for name in layer.__dict__ if name.startswith("bn_")]:
                del layer.__dict__[name]
            layer.__class__ = plain  # type: ignore


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's buffers by the names that DDP will see, those of shared layers too."""
    return {
        name: buffer
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, GroupBatchNorm)
        for name, buffer in layer.named_buffers(path, recurse=False)
    }


@torch.no_grad()
def _exempt_from_broadcast(model: nn.Module) -> None:
    """Make BatchNorm's buffers rank 0's once, and have DDP never broadcast them."""
    buffers = _buffers(model)
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *buffers}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    # As objects: the model is still on the CPU here, and NCCL takes no CPU tensors.
    ours = [buffer for buffer in buffers.values() if not buffer.is_meta]
    values = broadcast_object([buffer.cpu() for buffer in ours])
    for buffer, value in zip(ours, values, strict=True):
        buffer.copy_(value)


@dataclass
class BatchNormPlan:
    """What the conversion made, what it costs, and the one place that moves running statistics."""

    group: int  # examples that share statistics
    micro_batch_size: int
    num_processes: int
    num_layers: int  # that normalise by groups; frozen ones are counted apart
    num_frozen: int
    implementation: str  # plain, ghost split or synchronised
    ranks_sharing: int  # neighbouring ranks whose examples form one group; 1: none
    layers: list[tuple[str, GroupBatchNorm]] = field(repr=False)  # without the frozen ones
    _taken: Tensor | None = field(default=None, init=False, repr=False)  # by `statistics`
    _places: tuple[Tensor, ...] | None = field(default=None, init=False, repr=False)

    @property
    def _tracked(self) -> list[GroupBatchNorm]:
        return [layer for _, layer in self.layers if layer.bn_window is not None]

    @property
    def _windows(self) -> list[WindowStatistics]:
        return [layer.bn_window for _, layer in self.layers if layer.bn_window is not None]

    def collectives_per_update(self, accumulation: int) -> int:
        """Collectives that each rank enters per update for BatchNorm.

        Two per layer and micro-step where synchronised (a layer whose input needs no gradient
        saves one, activation checkpointing adds one), and one for all running statistics, which
        the scripts' update shares with its other figures.
        """
        synchronised = 2 * accumulation * self.num_layers if self.ranks_sharing > 1 else 0
        return synchronised + (1 if self.num_processes > 1 and self._tracked else 0)

    def bytes_per_update(self, accumulation: int) -> int:
        """Bytes that a rank puts into these collectives (before the backend multiplies them)."""
        numbers = 0
        if self.ranks_sharing > 1:  # forward 2C + 1, backward 2C
            numbers += accumulation * sum(4 * layer.num_features + 1 for _, layer in self.layers)
        if self.num_processes > 1:
            numbers += sum(2 * layer.num_features + 1 for layer in self._tracked)
        return 8 * numbers  # float64

    def describe(self) -> str:
        """One line for the console."""
        parts = [f"{self.num_layers} layers, group {self.group}: {self.implementation}"]
        if self.ranks_sharing > 1:
            parts += [f"over {self.ranks_sharing} ranks x {self.micro_batch_size}"]
            parts += [f"({2 * self.num_layers} collectives per micro-step)"]
        elif self.implementation == "ghost split":
            parts += [f"of {self.micro_batch_size} into {self.micro_batch_size // self.group}"]
        parts += [f"+ {self.num_frozen} frozen"] if self.num_frozen else []
        if not self.num_layers:
            return f"{self.num_frozen} layers, all frozen" if self.num_frozen else NO_LAYERS
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The plan for config.json; "ranks" are those that share statistics."""
        plan = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        size, fixed_bytes = self.ranks_sharing, self.bytes_per_update(0)
        plan["ranks"] = [list(range(i, i + size)) for i in range(0, self.num_processes, size)]
        plan["bytes_per_update"] = fixed_bytes
        plan["bytes_per_micro_step"] = self.bytes_per_update(1) - fixed_bytes
        return plan

    def statistics(self) -> Tensor | None:
        """What this process has collected in the window: all layers' sums (float64, 1-d), or None.

        Whoever takes them sums them over all processes, in place, along with something else that
        is summed then (Window.reduce); `update_running_statistics` does it where nobody has.
        """
        windows = self._windows
        if not windows:
            return None
        last = [w.last if w.has_last else torch.zeros_like(w.last) for w in windows]
        self._taken = torch.cat([w.sums for w in windows]).add_(torch.cat(last))
        return self._taken

    @torch.no_grad()
    def update_running_statistics(self) -> None:
        """One momentum step with the unweighted mean over all groups of the window.

        All ranks call it once per update, after the window's last backward. A layer that no rank
        has used keeps its statistics. The host reads nothing.
        """
        layers = self._tracked
        if not layers:
            return
        totals = self._taken
        if totals is None:
            totals = all_reduce_sum(torch.cat([window.total() for window in self._windows]))
        self.discard_statistics()
        sizes = [2 * layer.num_features for layer in layers]
        if self._places is None or self._places[0].device != totals.device:
            numbers = torch.arange(len(layers)).repeat_interleave(torch.tensor(sizes))
            counts_at = torch.tensor(sizes).cumsum(0) + torch.arange(len(layers))
            places = numbers, counts_at, torch.arange(sum(sizes)) + numbers
            self._places = tuple(place.to(totals.device) for place in places)
        layer_of, count_at, value_at = self._places  # of each value, of each layer, of each value
        counts = totals.index_select(0, count_at)
        used, counts = counts > 0, counts.clamp(min=1)
        batches: list = [layer.num_batches_tracked for layer in layers]
        torch._foreach_add_(batches, list(used.to(batches[0].dtype).unbind()))  # type: ignore
        # Momentum None is the cumulative mean, as in torch.
        momenta = [math.nan if layer.momentum is None else layer.momentum for layer in layers]
        momentum = torch.tensor(momenta, dtype=counts.dtype).to(counts.device, non_blocking=True)
        if any(layer.momentum is None for layer in layers):
            momentum = torch.where(
                momentum.isnan(), 1 / torch.stack(batches).clamp(min=1), momentum
            )
        # All layers' numbers in one tensor: a few calls, not a dozen for each layer.
        running: list = [vector for la in layers for vector in (la.running_mean, la.running_var)]
        now = torch.cat(running)
        new = totals.index_select(0, value_at) / counts.index_select(0, layer_of)
        steps = (used * momentum).index_select(0, layer_of)
        moved = now.lerp(new.to(now.dtype), steps.to(now.dtype))
        moved = moved.split([len(vector) for vector in running])
        torch._foreach_copy_(running, moved)  # type: ignore

    @torch.no_grad()
    def discard_statistics(self) -> None:
        """Drop what this window has collected (a skipped update)."""
        self._taken = None
        windows = self._windows
        for window in windows:
            window.has_last = False
        if windows:  # of the last rows too: torch's op multiplies what it writes over by 0
            torch._foreach_zero_([w.sums for w in windows] + [w.values for w in windows])  # type: ignore

    def check_values_per_channel(self, forward: Callable[[], object]) -> None:
        """Refuse, before the first step, a layer that would see one value per channel.

        `forward` runs the real model on one example, in evaluation mode, without gradients.
        """
        positions: dict[nn.Module, int] = {}

        def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen = inputs[0][0, 0].numel()
            positions[layer] = min(seen, positions.get(layer, seen))

        handles = [layer.register_forward_pre_hook(record) for _, layer in self.layers]
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()
        for name, layer in self.layers:
            if self.group * positions.get(layer, 2) == 1:
                raise UsageError(
                    f"bn_group=1: BatchNorm layer '{name}' would see one value per channel in "
                    "training (1 example x 1 position); use bn_group=2 or more, or freeze it"
                )
