"""One update: its micro-batches, its global count, its loss scale.

An update's gradient is (gradient of the sum of all losses) / (valid elements of the whole window,
over all processes), however the window is split. The counts are therefore known before the first
backward, and each micro-step's loss sum is scaled by P * A / total: `accelerator.backward` divides
by A (the accumulation), DistributedDataParallel by P (the processes).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader

from utils.distributed import all_reduce_sum, world_size
from utils.order import MicroBatchSampler, digest

Batch = dict[str, torch.Tensor]


class Totals(NamedTuple):
    """An update's figures over all processes, on the host."""

    count: int  # valid elements of the window
    loss: float  # mean over them, NaN for none
    grad_norm: float  # of the global gradient, before clipping
    digest: int  # of the samples consumed (utils/order.py)
    wait_seconds: float  # mean over the processes of the time spent waiting for this window
    skipped: bool = False  # whether the update left the weights as they were


@dataclass
class Window:
    """One update's share of this process.

    Attributes:
        step: this update's number, from 1; `epoch`: from 0.
        batches: `accumulation` micro-batches on the device.
        total: int64 0-d tensor, valid elements of the window over all processes; not read yet.
        scale: 0-d tensor P * A / total, the factor of each micro-step's loss sum.
        digest: of this process's samples.
        wait_seconds: how long this process waited for the data.
    """

    step: int
    epoch: int
    batches: list[Batch]
    total: torch.Tensor
    scale: torch.Tensor
    digest: int
    wait_seconds: float

    def reduce(self, loss_sum: torch.Tensor, grad_norm: torch.Tensor) -> Totals:
        """Sum the update's figures over all processes: one reduction, and its one host read.

        Args:
            loss_sum: 0-d, this process's sum of losses over the window.
            grad_norm: 0-d, of the gradient after its synchronisation, equal on all processes.
        """
        device = _float64_device(loss_sum.device)
        # The digest travels as two 32-bit halves, whose sums float64 holds exactly.
        own = [float(self.digest >> 32), float(self.digest & 0xFFFFFFFF), self.wait_seconds]
        sums = torch.cat(
            [
                loss_sum.detach().to(device, torch.float64).reshape(1),
                torch.tensor(own, dtype=torch.float64).to(device, non_blocking=True),
            ]
        )
        all_reduce_sum(sums)
        shared = torch.stack([self.total.to(device).double(), grad_norm.to(device).double()])
        loss, high, low, wait, count, norm = torch.cat([sums, shared]).tolist()  # the host read
        return Totals(
            count=int(count),
            loss=loss / count if count else math.nan,
            grad_norm=norm,
            digest=((int(high) << 32) + int(low)) % (1 << 64),
            wait_seconds=wait / world_size(),
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
        plan = self.sampler.plan
        micro_batches = iter(self.loader)
        for step in range(self.sampler.start_step + 1, self.sampler.total_steps + 1):
            start_time = time.perf_counter()
            epoch = self.sampler.epoch_of(step)
            fetched = [next(micro_batches) for _ in range(plan.accumulation)]
            batches = [self.transform(to_device(batch, self.device), epoch) for batch in fetched]
            wait_seconds = time.perf_counter() - start_time
            ids = torch.cat([batch["id"] for batch in fetched])
            yield self.make_window(step, batches, ids, wait_seconds)

    def make_window(
        self, step: int, batches: list[Batch], ids: torch.Tensor, wait_seconds: float = 0.0
    ) -> Window:
        """The window of these micro-batches; all processes call it, the host reads nothing."""
        plan = self.sampler.plan
        total = torch.stack([self.count_valid(batch) for batch in batches]).sum()
        all_reduce_sum(total)
        return Window(
            step=step,
            epoch=self.sampler.epoch_of(step),
            batches=batches,
            total=total,
            scale=plan.num_processes * plan.accumulation / total.clamp(min=1),
            digest=digest(ids),
            wait_seconds=wait_seconds,
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; copies from pinned memory do not block."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def _float64_device(device: torch.device) -> torch.device:
    """Where sums in float64 are made: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device
