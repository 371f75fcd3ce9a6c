"""The layers that `convert_batchnorm` makes of torch's (utils/batchnorm.py), and what they collect.

In shape comments: C channels.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.batchnorm_functions import (
    GhostSplit,
    at_least_float32,
    chunked,
    plain,
    row_dtype,
    statistics_dtype,
    synchronised,
)


class GroupBatchNorm(_BatchNorm):
    """A BatchNorm layer that `convert_batchnorm` has turned into this class, in place.

    Parameters, buffers, names and hooks are the original's. In evaluation it does what the
    original does; in training it normalises by groups and adds their statistics to `bn_window`,
    from which `BatchNormPlan.update_running_statistics` moves the running ones.
    """

    bn_group: int  # examples that share statistics
    bn_ranks: int  # neighbouring ranks that share them; 1: none
    bn_frozen: bool  # stays in evaluation mode
    bn_window: "WindowStatistics | None"  # None: collects nothing
    bn_dims: int = 0  # dimensions of the last input, kept where the class does not tell them

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        args = input, at_least_float32(self.weight), at_least_float32(self.bias), self.eps
        window = self.bn_window
        one_group = self.bn_ranks == 1 and 0 < len(input) <= self.bn_group
        if one_group and not torch.compiler.is_compiling():
            return plain(*args, *(window.next_row() if window is not None else (None, None)))
        if self.bn_ranks > 1:
            output, row = synchronised(*args, self.bn_ranks)
        elif one_group or len(input) == 0 or torch.compiler.is_compiling():
            output, row = chunked(*args, self.bn_group)
        else:
            output, row = GhostSplit.apply(*args, self.bn_group)  # type: ignore
        if window is not None and not _is_recomputing():
            window.sums.add_(row)
        return output

    def train(self, mode: bool = True):
        return super().train(mode and not self.bn_frozen)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.bn_window is not None and isinstance(self.running_mean, Tensor):
            if not self.bn_window.fits(self.running_mean):  # moved or cast before training
                self.bn_window = WindowStatistics(self.running_mean)
        return self


class WindowStatistics:
    """What one layer has collected in this window: the sum of its rows (2C + 1).

    The row of the last forward stays apart: torch's op writes mean and variance into it, which
    costs a training step nothing, and most windows have no more than one forward.

    Args:
        like: the layer's running mean (C).
    """

    def __init__(self, like: Tensor):
        channels = len(like)
        self.sums = like.new_zeros(2 * channels + 1, dtype=row_dtype(like))
        self.last = torch.ones_like(self.sums, dtype=statistics_dtype(like))  # its count stays 1
        self.values = self.last[:-1]
        self.mean_and_variance = self.values.split(channels)
        self.has_last = False

    def fits(self, like: Tensor) -> bool:
        """Whether it is where the layer is, in the dtype in which torch's op writes."""
        return self.last.device == like.device and self.last.dtype == statistics_dtype(like)

    def next_row(self) -> tuple[Tensor, ...]:
        """Where the next forward writes its mean and unbiased variance (C)."""
        if _is_recomputing():  # what is written has been collected
            return self.values.clone().split(len(self.values) // 2)
        if self.has_last:
            self.sums.add_(self.last)
        self.has_last = True
        return self.mean_and_variance

    def total(self) -> Tensor:
        return self.sums + self.last if self.has_last else self.sums.clone()


class GroupBatchNorm1d(GroupBatchNorm, nn.BatchNorm1d): ...


class GroupBatchNorm2d(GroupBatchNorm, nn.BatchNorm2d): ...


class GroupBatchNorm3d(GroupBatchNorm, nn.BatchNorm3d): ...


class GroupSyncBatchNorm(GroupBatchNorm):
    """From torch.nn.SyncBatchNorm; no subclass of it, which DDP refuses on a CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        self.bn_dims = input.dim()


GROUPED = {
    nn.BatchNorm1d: GroupBatchNorm1d,
    nn.BatchNorm2d: GroupBatchNorm2d,
    nn.BatchNorm3d: GroupBatchNorm3d,
    nn.SyncBatchNorm: GroupSyncBatchNorm,
}
PLAIN = {grouped: plain for plain, grouped in GROUPED.items()}
PLAIN_OF_DIMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _is_recomputing() -> bool:
    """Whether activation checkpointing runs this forward again, inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
