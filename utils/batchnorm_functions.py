"""BatchNorm's arithmetic by groups: plain, ghost split, synchronised (utils/batchnorm.py).

Each implementation gives the output and a row (2C + 1): the sum over its groups of the means and of
the unbiased variances, and the number of groups. The rows of a window are added up.

In shape comments: B examples of this rank's micro-batch, C channels, R ranks that share.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from utils.distributed import collective_timeout, rank, world_size

HALF = (torch.float16, torch.bfloat16)
LARGE_CHUNK = 2**20  # elements

# Ranks that share -> (the default process group it was made under, the subgroup of this rank).
# Layers know the number of ranks only: what holds a process group can't be copied or pickled.
_subgroups: dict[int, tuple[weakref.ref, weakref.ref]] = {}


def subgroup(ranks: int) -> Any:
    """The process group of this rank and its neighbours. All ranks make it on their first use."""
    world, processes = dist.group.WORLD, world_size()
    if processes % ranks:
        raise RuntimeError(
            f"this BatchNorm was converted to share statistics over {ranks} processes, but here "
            f"are {processes}: call convert_batchnorm again, or revert_batchnorm"
        )
    if ranks == processes:
        return world
    known = _subgroups.get(ranks)
    group = known[1]() if known and known[0]() is world else None
    if group is None:
        blocks = [list(range(first, first + ranks)) for first in range(0, processes, ranks)]
        timeout = collective_timeout()  # else the backend's (NCCL: 10 minutes)
        group = [dist.new_group(block, timeout) for block in blocks][rank() // ranks]
        _subgroups[ranks] = weakref.ref(world), weakref.ref(group)
    return group


def row_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in HALF else x.dtype


def at_least_float32(vector: Tensor | None) -> Tensor | None:
    return vector.float() if vector is not None and vector.dtype in HALF else vector


def plain(x: Tensor, weight, bias, eps: float, mean, variance) -> Tensor:
    """BatchNorm of all of x (B, C, ...), B > 0, by torch's own op.

    It writes mean and unbiased variance over what was in `mean` and `variance` (C), if given.
    """
    return F.batch_norm(x, mean, variance, weight, bias, True, 1.0, eps)


def chunked(x: Tensor, weight, bias, eps: float, group: int) -> tuple[Tensor, Tensor]:
    """Plain BatchNorm of each chunk of `group` examples of x (B, C, ...), by torch's own op."""
    chunks, channels = x.split(group), x.shape[1]
    rows = x.new_zeros(len(chunks), 2 * channels + 1, dtype=statistics_dtype(x))
    rows[:, -1] = 1 if len(x) else 0
    outputs = []
    for chunk, row in zip(chunks, rows, strict=True):
        # Momentum 1 writes this chunk's mean and unbiased variance over the zeros.
        mean, variance = row[:channels], row[channels:-1]
        outputs.append(F.batch_norm(chunk, mean, variance, weight, bias, True, 1.0, eps))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output, rows.sum(0, dtype=row_dtype(x))


class GhostSplit(torch.autograd.Function):
    """`chunked` without its copies: each chunk's result is written into its slice of the whole
    (torch.cat is one more pass over the data, forward and backward)."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        x = _dense(x)  # torch 2.14 writes wrong numbers into an output with other strides
        chunks, channels = x.split(group), x.shape[1]
        if len(chunks[-1]) * x[0, 0].numel() == 1:
            raise ValueError(f"one value per channel in the last chunk of {tuple(x.shape)}")
        output = torch.empty_like(x)
        rows = x.new_zeros(len(chunks), 2 * channels + 1, dtype=statistics_dtype(x))
        rows[:, -1] = 1
        saved = rows.new_empty(len(chunks), 2, channels)  # mean, 1 / deviation
        for chunk, out, row, save in zip(chunks, output.split(group), rows, saved, strict=True):
            mean, variance = row[:channels], row[channels:-1]
            out = (out, *save)
            torch.native_batch_norm(chunk, weight, bias, mean, variance, True, 1.0, eps, out=out)
        ctx.save_for_backward(x, weight, saved)
        ctx.eps, ctx.group = eps, group
        row = rows.sum(0, dtype=row_dtype(x))
        ctx.mark_non_differentiable(row)
        return output, row

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        x, weight, saved = ctx.saved_tensors
        dx, sums = torch.empty_like(x), saved.new_zeros(2, x.shape[1])  # of weight and bias
        # On a CPU, torch spends more time on a large new tensor for each chunk's gradient than on
        # the arithmetic: there it only reduces, and the gradient goes straight into its slice.
        large = ctx.group * x[0].numel() >= LARGE_CHUNK
        ours = large and x.device.type == "cpu" and x.dtype not in HALF
        parts = (tensor.split(ctx.group) for tensor in (dx, dy, x))
        for dx_chunk, dy_chunk, chunk, (mean, invstd) in zip(*parts, saved, strict=True):
            gradient, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy_chunk, chunk, weight, None, None, mean, invstd, True, ctx.eps,
                [not ours, True, True],
            )  # fmt: skip
            sums += torch.stack([dweight, dbias])
            if not ours:
                dx_chunk.copy_(gradient)
                continue
            scale = invstd if weight is None else invstd * weight
            factor = -scale * len(mean) / chunk.numel()
            vectors = mean, factor * invstd * dweight, factor * dbias, scale
            _write_gradient(dx_chunk, dy_chunk, chunk, *_per_channel(x, *vectors))
        return _needed(ctx, dx, *sums)


def _write_gradient(dx, dy, x, mean, slope, shift, scale) -> None:
    """dx = (x - mean) * slope + shift + dy * scale, in place, by blocks that stay in the cache."""
    block_size = 2**17 if x.device.type == "cpu" else x.numel()  # half a MB of float32
    examples = max(1, block_size // x[0].numel())
    # At the size of an example, else each run of the inner loop is one channel of one example.
    mean, slope, shift, scale = (
        torch.empty_like(dx[:1]).copy_(v) for v in (mean, slope, shift, scale)
    )
    for block, dy_block, x_block in zip(*(t.split(examples) for t in (dx, dy, x)), strict=True):
        torch.sub(x_block, mean, out=block)
        torch.addcmul(shift, block, slope, out=block).addcmul_(dy_block, scale)


def _needed(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of (x, weight, bias), None where none is wanted, and for two more arguments."""
    pairs = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if needed else None for gradient, needed in pairs), None, None


class _Synchronised(torch.autograd.Function):
    """BatchNorm of x (B, C, ...) over the micro-batches of R ranks; B may differ, and may be 0.

    One collective forward, one backward (if x needs a gradient); the gradients of weight and bias
    stay local, DDP sums them. On CUDA the passes over x are the kernels of torch.nn.SyncBatchNorm
    (torch/nn/modules/_functions.py). Elsewhere x is first shifted by a centre near its mean, so
    that float32 stays exact where the mean is much larger than the deviation. Whatever has C
    elements is float64. The host reads nothing.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps, ranks):
        kernel = _has_kernels(x) and x.numel() > 0
        x = _dense(x) if kernel else x
        dims, channels = [d for d in range(x.dim()) if d != 1], x.shape[1]
        count, shifted = x.numel() // channels, x
        centre = x.new_zeros(channels, dtype=statistics_dtype(x))
        local = x.new_zeros(2 * channels + 1, dtype=row_dtype(x))  # mean, M2, count
        local[-1] = count
        if kernel:
            local[:channels], invstd = torch.batch_norm_stats(x, eps)
            local[channels:-1] = (invstd.to(local.dtype).pow(-2) - eps).clamp(min=0) * count
        elif count:
            centre = x.mean(dims, dtype=centre.dtype)
            shifted = x - _per_channel(x, centre)[0]
            offset = shifted.mean(dims).to(local.dtype)
            local[:channels] = centre + offset
            local[channels:-1] = (shifted * shifted).sum(dims) - count * offset.square()

        gathered = local.new_empty(ranks, len(local))
        # The second name is deprecated from torch 2.14 on, the first is missing before.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered.view(-1), local, group=subgroup(ranks))
        means, squares, counts = gathered.split([channels, channels, 1], dim=1)  # (R, C), (R, 1)
        total = counts.sum()
        # Chan, Golub and LeVeque 1979: M2 of a union, without a difference of large squares.
        mean = (means * counts).sum(0) / total.clamp(min=1)
        squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        invstd = (squares / total.clamp(min=1) + eps).rsqrt()
        row = torch.cat([mean, squares / (total - 1).clamp(min=1), total.clamp(max=1).view(1)])

        output = torch.empty_like(x)
        if kernel:
            centre = mean.to(centre.dtype)
            output = torch.batch_norm_elemt(x, weight, bias, centre, invstd.to(centre.dtype), eps)
        elif count:
            scale = invstd if weight is None else invstd * weight
            shift = (centre - mean) * scale + (0 if bias is None else bias)
            scale, shift = _per_channel(x, scale, shift)
            output = torch.addcmul(shift, shifted, scale, out=shifted).to(x.dtype)
        ctx.save_for_backward(x, weight, centre, mean, invstd, counts)
        ctx.ranks = ranks
        ctx.mark_non_differentiable(row)
        return output, row

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        x, weight, centre, mean, invstd, counts = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        kernel = _has_kernels(x) and x.numel() > 0
        vectors = centre, invstd.to(centre.dtype), weight
        sums = mean.new_zeros(2, x.shape[1])  # of dy and dy * (x - mean), here over this rank
        if kernel:
            dy, affine = _dense(dy), weight is not None
            reduced = torch.batch_norm_backward_reduce(dy, x, *vectors, True, affine, affine)
            sums[0], sums[1] = reduced[:2]
        elif x.numel():
            sums[0] = dy.sum(dims, dtype=centre.dtype)
            sums[1] = (dy * (x - _per_channel(x, centre)[0])).sum(dims)
        sums[1] += (centre - mean) * sums[0]
        dbias, dweight = sums[0].to(centre.dtype), (sums[1] * invstd).to(centre.dtype)
        sums = sums.clone()  # not dbias, which is a part of it in float64
        if not ctx.needs_input_grad[0]:
            return _needed(ctx, None, dweight, dbias)
        dist.all_reduce(sums, group=subgroup(ctx.ranks))
        dx = torch.empty_like(x)
        if kernel:
            both, counts = sums.to(centre.dtype), counts.to(torch.int32).contiguous()
            dx = torch.batch_norm_backward_elemt(dy, x, *vectors, both[0], both[1], counts)
        elif x.numel():
            # scale * (dy - mean(dy) - (x - mean) * invstd^2 * mean(dy * (x - mean)))
            scale = invstd if weight is None else invstd * weight
            slope = -scale * invstd.square() * sums[1] / counts.sum()
            shift = (centre - mean) * slope - scale * sums[0] / counts.sum()
            dx = torch.empty_like(x, dtype=centre.dtype)
            _write_gradient(dx, dy, x, *_per_channel(x, centre, slope, shift, scale))
            dx = dx.to(x.dtype)
        return _needed(ctx, dx, dweight, dbias)


def _per_channel(x: Tensor, *vectors: Tensor) -> list[Tensor]:
    """Vectors (C) in the shape and dtype that broadcast along x (B, C, ...)."""
    shape = 1, -1, *[1] * (x.dim() - 2)
    return [vector.to(statistics_dtype(x)).view(shape) for vector in vectors]


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _dense(x: Tensor) -> Tensor:
    """What torch's kernels take: channels_last as it is, anything else contiguous."""
    formats = torch.channels_last, torch.channels_last_3d
    return x if any(x.is_contiguous(memory_format=f) for f in formats) else x.contiguous()


# torch.compile breaks its graph here. torch.compiler.disable would do, but imports dynamo at once.
@torch._disable_dynamo  # type: ignore
def synchronised(*args) -> Any:
    return _Synchronised.apply(*args)
