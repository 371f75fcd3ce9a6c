"""Sums over all processes divided by true counts: the only way a metric leaves a script."""

import sys
import time

import psutil
import torch

from utils.distributed import all_reduce_sum


class Sums:
    """Named sums, collected on the device without a host read and reduced once at the end.

    Integers (counts) are summed in int64, everything else in float64 (on the CPU where the
    device has none). Every process must add the same names; one with no data adds zeros by
    naming them in the constructor.
    """

    def __init__(self, device: torch.device, *, floats: tuple[str, ...], counts: tuple[str, ...]):
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.floats = {
            name: torch.zeros((), dtype=torch.float64, device=self.device) for name in floats
        }
        self.counts = {
            name: torch.zeros((), dtype=torch.int64, device=self.device) for name in counts
        }

    def add(self, **values: torch.Tensor) -> None:
        """Add 0-d tensors to the sums of the same names."""
        for name, value in values.items():
            group = self.floats if name in self.floats else self.counts
            group[name] += value.detach().to(self.device)

    def reduce(self) -> dict[str, float | int]:
        """Totals over all processes; to be called by all of them."""
        totals: dict[str, float | int] = {}
        for group in (self.floats, self.counts):
            if group:
                sums = all_reduce_sum(torch.stack(list(group.values())))
                totals.update(zip(group, sums.tolist(), strict=True))
        return totals


class ConfusionMatrix:
    """How often each class was taken for each, collected on the device and reduced once.

    Args:
        num_classes: classes are 0 to num_classes - 1, of truth and prediction.
    """

    def __init__(self, num_classes: int, device: torch.device):
        self.num_classes = num_classes
        self.device = torch.device("cpu") if device.type == "mps" else device
        # One more than needed: for what is ignored.
        self._cells = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=self.device)

    def add(self, truth: torch.Tensor, prediction: torch.Tensor, ignore_index: int) -> None:
        """Count the elements of two integer tensors of one shape, where truth is not ignored.

        Without a host read: what is ignored is counted in a cell of its own, which is dropped, and
        bincount would read the largest value.
        """
        truth, prediction = truth.to(self.device), prediction.to(self.device)
        cells = truth.long() * self.num_classes + prediction
        cells = cells.masked_fill(truth == ignore_index, len(self._cells) - 1).flatten()
        self._cells.scatter_add_(0, cells, torch.ones_like(cells))

    def own(self) -> torch.Tensor:
        """Counts of this process alone, int64 (truth, prediction)."""
        return self._cells[:-1].view(self.num_classes, self.num_classes)

    def reduce(self) -> torch.Tensor:
        """Counts over all processes, int64 (truth, prediction) on the CPU; all of them call it."""
        return all_reduce_sum(self.own().clone()).cpu()


def intersection_over_union(matrix: torch.Tensor, classes: list[str]) -> dict[str, float]:
    """By class, from a confusion matrix; without those that neither truth nor prediction has
    (their union is empty, and a mean over the classes leaves them out)."""
    correct = matrix.diagonal()
    union = matrix.sum(0) + matrix.sum(1) - correct
    figures = zip(classes, correct.tolist(), union.tolist(), strict=True)
    return {name: hits / size for name, hits, size in figures if size}


class Speed:
    """Throughput of the updates since the last line of metrics, other work left out."""

    def __init__(self, global_batch_size: int):
        self.global_batch_size = global_batch_size
        self._updates, self._seconds, self._wait = 0, 0.0, 0.0
        self._mark = time.perf_counter()
        self.examples_per_second = 0.0

    def count(self, wait_seconds: float) -> None:
        """An update is done; of its time, `wait_seconds` went into waiting for data."""
        now = time.perf_counter()
        self._updates += 1
        self._seconds += now - self._mark
        self._wait += wait_seconds
        self._mark = now
        self.examples_per_second = self._updates * self.global_batch_size / self._seconds

    def resume(self) -> None:
        """Forget the time since the last update: it was evaluation, saving or logging."""
        self._mark = time.perf_counter()

    def metrics(self) -> dict[str, float]:
        """The figures for a line of metrics; the next one starts from zero."""
        values = {
            "perf/examples_per_second": self.examples_per_second,
            "perf/data_wait_fraction": self._wait / self._seconds,
        }
        self._updates, self._seconds, self._wait = 0, 0.0, 0.0
        return values


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: on the GPU as torch allocated it, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().peak_wset  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
