"""One update: its micro-batches, its global count, its loss scale.

An update's gradient is (gradient of the sum of all losses) / (valid elements of the whole window,
over all processes), however the window is split. The counts are therefore known before the first
backward, and each micro-step's loss sum is scaled by P * A / total: `accelerator.backward` divides
by A (the accumulation), DistributedDataParallel and FSDP2 by P (the processes).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from utils.distributed import all_reduce_sum, start_all_reduce_sum, world_size
from utils.marks import mark
from utils.order import MicroBatchSampler, digest
from utils.sharding import put_together

# Those whose gradients are in `.grad`, whole or as DTensors.
PLAIN_ENGINES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,  # FSDP2
)
Batch = dict[str, torch.Tensor]


class Totals(NamedTuple):
    """An update's figures over all processes, on the host."""

    count: int  # valid elements of the window
    loss: float  # mean over them, NaN for none
    grad_norm: float  # of the global gradient, before clipping
    digest: int  # of the samples consumed (utils/order.py)
    wait_seconds: float  # mean over the processes of the time spent waiting for this window
    skipped: bool = False  # whether the update left (or must leave) the weights as they were
    stop: bool = False  # whether a process has been told to stop
    bad_loss: bool = False  # whether the loss of any process is NaN or infinite
    bad_grad_norm: bool = False  # whether the gradient's norm is, on any process


class MicroBatches(list[Batch]):
    """A window's micro-batches; handing one out marks where this process stands."""

    def __init__(self, batches: list[Batch], step: int):
        super().__init__(batches)
        self.step = step

    def __iter__(self) -> Iterator[Batch]:
        for micro_step, batch in enumerate(super().__iter__(), start=1):
            mark("forward", self.step, micro_step)
            yield batch


@dataclass
class Window:
    """One update's share of this process.

    Attributes:
        step: this update's number, from 1; `epoch`: from 0.
        batches: `accumulation` micro-batches on the device.
        counted: waits for the number of valid elements over all processes (int64, 0-d), which is
            on its way while the first forward computes.
        shares: P * A, the number of micro-batches of the window over all processes.
        digest: of this process's samples.
        wait_seconds: how long this process waited for the data.
        prepare_next: fetches the next window's data while the accelerator computes this one.
        losses: this process's loss sums as `reduce` was given them, on the device.
    """

    step: int
    epoch: int
    batches: list[Batch]
    counted: Callable[[], torch.Tensor]
    shares: int
    digest: int
    wait_seconds: float
    prepare_next: Callable[[], None] = lambda: None
    losses: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """Valid elements of the window over all processes: int64, 0-d; not read by the host."""
        return self.counted()

    @property
    def scale(self) -> torch.Tensor:
        """The factor of each micro-step's loss sum: 0-d, P * A / total."""
        return self.shares / self.total.clamp(min=1)

    def reduce(
        self,
        losses: torch.Tensor,
        grad_norm: torch.Tensor | None,
        stop: bool = False,
        statistics: torch.Tensor | None = None,
    ) -> Totals:
        """Sum the update's figures over all processes: one reduction, and its one host read.

        Args:
            losses: this process's sums of losses, 0-d for the window or one for each micro-step.
            grad_norm: 0-d, of the gradient after its synchronisation, equal on all processes, or
                a DTensor; None (some engines do not tell it) is logged as NaN.
            stop: whether this process has been told to stop (utils/guard.py).
            statistics: float64, 1-d: summed in place on the way (BatchNormPlan.statistics).
        """
        self.prepare_next()
        mark("reduce", self.step)
        device = _float64_device(losses.device)
        self.losses = losses.detach().to(device).double().reshape(-1)
        # The digest travels as two 32-bit halves, whose sums float64 holds exactly.
        host = [float(self.digest >> 32), float(self.digest & 0xFFFFFFFF), self.wait_seconds, stop]
        parts = [torch.tensor(host, dtype=torch.float64).to(device, non_blocking=True)]
        parts += [self.losses.sum().reshape(1)]
        if grad_norm is not None:
            parts += [put_together(grad_norm).detach().to(device).double().reshape(1)]
        if statistics is None or world_size() == 1:
            sums = all_reduce_sum(torch.cat(parts))
        else:
            both = all_reduce_sum(torch.cat([*parts, statistics]))
            sums, summed = both.split([len(both) - len(statistics), len(statistics)])
            statistics.copy_(summed)
        # The host read.
        read = torch.cat([self.total.to(device).double().reshape(1), sums]).tolist()
        count, high, low, wait, stops, loss, *norm = read
        mark("step", self.step)
        return Totals(
            count=int(count),
            loss=loss / count if count else math.nan,
            grad_norm=norm[0] / world_size() if norm else math.nan,  # the same on each
            digest=((int(high) << 32) + int(low)) % (1 << 64),
            wait_seconds=wait / world_size(),
            skipped=not count,  # nothing to learn from
            stop=stops > 0,
            bad_loss=not math.isfinite(loss),
            bad_grad_norm=bool(norm) and not math.isfinite(norm[0]),
        )


class WindowLoader:
    """Hands out whole windows from a DataLoader of this rank's micro-batches.

    Args:
        loader: its batch sampler is a MicroBatchSampler, which says where to start; yields dicts
            with "id" (int64 sample indices).
        count_valid: the script's own; the counts are summed over all processes before the window
            is handed out, without a host read.
        transform: called as transform(batch, epoch) on the device (augmentation).
    """

    def __init__(
        self,
        loader: DataLoader,
        device: torch.device,
        count_valid: Callable[[Batch], torch.Tensor],
        transform: Callable[[Batch, int], Batch] = lambda batch, epoch: batch,
    ):
        assert isinstance(loader.batch_sampler, MicroBatchSampler)
        self.loader = loader
        self.sampler = loader.batch_sampler
        self.device = device
        self.count_valid = count_valid
        self.transform = transform

    def __iter__(self) -> Iterator[Window]:
        micro_batches = iter(self.loader)
        ahead: list[tuple[list[Batch], torch.Tensor]] = []
        late_seconds = 0.0

        def fetch(step: int) -> None:
            fetched = []
            for micro_step in range(1, self.sampler.plan.accumulation + 1):
                mark("data", step, micro_step)
                fetched.append(next(micro_batches))
            ids = torch.cat([batch["id"] for batch in fetched])
            epoch = self.sampler.epoch_of(step)
            batches = [self.transform(to_device(batch, self.device), epoch) for batch in fetched]
            ahead.append((batches, ids))

        def fetch_behind(step: int) -> None:
            """Fetch while the accelerator is busy with what has been queued before."""
            nonlocal late_seconds
            queued = torch.Event(self.device)
            queued.record()
            start_time = time.perf_counter()
            fetch(step)
            # It has come to the end of its queue meanwhile: at most this long ago.
            late_seconds = time.perf_counter() - start_time if queued.query() else 0.0

        for step in range(self.sampler.start_step + 1, self.sampler.total_steps + 1):
            start_time = time.perf_counter()
            if not ahead:
                fetch(step)
            batches, ids = ahead.pop()
            wait_seconds = time.perf_counter() - start_time + late_seconds
            window = self.make_window(step, batches, ids, wait_seconds)
            if self.device.type != "cpu" and step < self.sampler.total_steps:
                window.prepare_next = partial(fetch_behind, step + 1)
            yield window
        mark("finish")

    def make_window(
        self, step: int, batches: list[Batch], ids: torch.Tensor, wait_seconds: float = 0.0
    ) -> Window:
        """The window of these micro-batches; all processes call it, the host reads nothing."""
        plan = self.sampler.plan
        total = torch.stack([self.count_valid(batch) for batch in batches]).sum()
        return Window(
            step=step,
            epoch=self.sampler.epoch_of(step),
            batches=MicroBatches(batches, step),
            counted=start_all_reduce_sum(total),
            shares=plan.num_processes * plan.accumulation,
            digest=digest(ids),
            wait_seconds=wait_seconds,
        )


def gradient_norm(accelerator: Accelerator, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Norm of the global gradient, 0-d, for where nothing is clipped.

    accelerator.clip_grad_norm_(parameters, inf) gives the same, and writes every gradient once
    more. Of sharded gradients it is a DTensor, which `Window.reduce` takes too. Engines that keep
    the gradients to themselves know the norm.
    """
    if accelerator.distributed_type in PLAIN_ENGINES:
        accelerator.unscale_gradients()
        gradients = [p.grad for p in parameters if p.grad is not None]
        # As torch.nn.utils.get_total_norm does, without its dozens of calls for the devices.
        norms = torch._foreach_norm(gradients)  # type: ignore
        return torch.linalg.vector_norm(torch.stack(norms))
    return accelerator.clip_grad_norm_(parameters, math.inf)  # type: ignore[return-value]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; copies from pinned memory do not block."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def _float64_device(device: torch.device) -> torch.device:
    """Where sums in float64 are made: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device
