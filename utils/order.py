"""Sample order and per-sample random numbers, as functions of (seed, epoch, index) alone.

Neither the number of processes, nor workers, nor a resume can change them: nothing is drawn from a
generator that somebody else could advance. Random numbers come from a counter-based hash (the
finaliser of SplitMix64, Steele et al. 2014); the order of an epoch is a keyed Feistel permutation
with cycle walking (Black and Rogaway 2002), computed where it is read and never stored.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy
import torch
from torch.utils.data import Sampler

from utils.errors import UsageError
from utils.plan import BatchPlan

ORDER_VERSION = 1  # kept in every checkpoint's manifest; raise it when any number here would change
FEISTEL_ROUNDS = 12
BLOCK = 1 << 13  # positions computed at once: per window the calls would cost more than the numbers

Integers = TypeVar("Integers", torch.Tensor, numpy.ndarray)  # int64; both wrap around

_MASK = (1 << 64) - 1
_SAMPLE_STREAM = 0x5A3B
_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch's integers are signed and wrap around."""
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Integers, bits: int) -> Integers:
    """Logical right shift of int64 (torch's and numpy's own keep the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Integers) -> Integers:
    """SplitMix64's finaliser on int64, modulo 2^64."""
    x = (x ^ _shift(x, 30)) * _signed(_MULTIPLY_1)
    x = (x ^ _shift(x, 27)) * _signed(_MULTIPLY_2)
    return x ^ _shift(x, 31)


def _key(*words: int) -> int:
    """A 64-bit key from integers, as a signed value; the same finaliser, in Python's integers."""
    state = 0
    for word in words:
        x = (state + (word & _MASK) + _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _MASK
        x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _MASK
        state = x ^ (x >> 31)
    return _signed(state)


def hash64(ids: torch.Tensor, seed: int, epoch: int, stream: int) -> torch.Tensor:
    """64 random bits for each sample, int64, on the device of `ids`.

    Args:
        ids: int64 sample indices, any shape.
        stream: which random number of the sample: 0 for the crop's row, 1 for its column, say.
    """
    key = _key(seed, epoch, stream)
    if ids.device.type != "cpu":
        return _mix(_mix(ids * _signed(_GOLDEN) + key))
    # numpy's calls take less time than torch's for a batch's few numbers.
    values = ids.flatten().numpy() * _signed(_GOLDEN) + key
    return torch.from_numpy(_mix(_mix(values))).view_as(ids)


def random_integers(
    ids: torch.Tensor, high: int, *, seed: int, epoch: int, stream: int
) -> torch.Tensor:
    """A random integer in [0, high) for each sample; int64, high at most 2^31."""
    return (_shift(hash64(ids, seed, epoch, stream), 32) * high) >> 32


def random_uniform(ids: torch.Tensor, *, seed: int, epoch: int, stream: int) -> torch.Tensor:
    """A random number in [0, 1) for each sample, in the default dtype (24 random bits)."""
    bits = _shift(hash64(ids, seed, epoch, stream), 40)
    return bits.to(torch.get_default_dtype()) / (1 << 24)


class SampleIndex(int):
    """A sample's index that carries its epoch to where the sample is read.

    A loader's workers live for many epochs and read ahead: nothing else can tell them which epoch
    an index belongs to. In all else it is an int; a plain one counts as of epoch 0.
    """

    epoch: int

    def __new__(cls, index: int, epoch: int | None = None):
        self = super().__new__(cls, index)
        self.epoch = getattr(index, "epoch", 0) if epoch is None else epoch
        return self


@contextmanager
def seeded_for_sample(index: int, seed: int) -> Iterator[None]:
    """Seed the generators of Python's `random`, numpy and torch (its CPU) for one sample.

    So any transform, of torchvision v2 say, draws the same numbers for (seed, epoch, index)
    whatever worker or process runs it. After it, the generators are as they were.

    Args:
        index: a SampleIndex; a plain int is of epoch 0.
    """
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # torch.rand draws other numbers in another dtype
    key = _key(seed, SampleIndex(index).epoch, index, _SAMPLE_STREAM) & _MASK
    random.seed(key)
    numpy.random.seed([key >> 32, key & 0xFFFFFFFF])
    torch.default_generator.manual_seed(key)  # torch.manual_seed would seed GPUs as well
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def digest(ids: torch.Tensor) -> int:
    """Order-free fingerprint of a set of samples: the sum of their hashes modulo 2^64."""
    return int(hash64(ids, 0, 0, 0).sum()) & _MASK


class SampleOrder:
    """Epoch e's permutation of `num_examples` samples, a function of (seed, e).

    Costs no memory and no start-up time in `num_examples` (10^9 samples seek in milliseconds).
    """

    def __init__(self, num_examples: int, seed: int):
        self.num_examples = num_examples
        self.seed = seed
        self._block: tuple[int, int] | None = None
        self._block_ids = torch.empty(0, dtype=torch.int64)

    def permute(self, positions: torch.Tensor, epoch: int) -> torch.Tensor:
        """The sample at each position (int64, in [0, num_examples)) of the epoch."""
        bits = max(2, (self.num_examples - 1).bit_length())
        low = bits // 2
        widths = (low, bits - low)  # bits of the half that a round changes, in turn
        keys = [_key(self.seed, epoch, round_, 0xFE15) for round_ in range(FEISTEL_ROUNDS)]

        def feistel(x: torch.Tensor) -> torch.Tensor:
            halves = [x & ((1 << low) - 1), x >> low]
            for round_, key in enumerate(keys):
                changed, other = round_ % 2, 1 - round_ % 2
                noise = _shift(_mix(halves[other] * _signed(_GOLDEN) + key), 64 - widths[changed])
                halves[changed] = halves[changed] ^ noise
            return (halves[1] << low) | halves[0]

        ids = feistel(positions)
        while True:  # cycle walking: the domain is the next power of two, fewer than 2x too large
            outside = (ids >= self.num_examples).nonzero().squeeze(1)
            if len(outside) == 0:
                return ids
            ids[outside] = feistel(ids[outside])

    def ids(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Samples at positions start..stop-1 of the epoch; int64 (stop - start,)."""
        parts = []
        while start < stop:
            block = (epoch, start // BLOCK)
            if self._block != block:
                first = block[1] * BLOCK
                positions = torch.arange(first, min(first + BLOCK, self.num_examples))
                self._block, self._block_ids = block, self.permute(positions, epoch)
            offset = start % BLOCK
            parts.append(self._block_ids[offset : offset + stop - start])
            start += len(parts[-1])
        return torch.cat(parts)


class MicroBatchSampler(Sampler[list[int]]):
    """This rank's micro-batches of the updates start_step+1 .. total_steps, epoch after epoch.

    Update s takes the next `global_batch_size` samples of its epoch, its window; micro-step a on
    rank r takes window[(a * P + r) * m : +m]. The last, incomplete window of an epoch is left out.
    Use as a DataLoader's `batch_sampler`, outside `accelerator.prepare`: it is sharded already.

    carry_epoch: yield SampleIndex instead of int, for data sets that augment where they read.
    """

    def __init__(
        self,
        order: SampleOrder,
        plan: BatchPlan,
        rank: int,
        total_steps: int,
        *,
        carry_epoch: bool = False,
    ):
        self.steps_per_epoch = steps_per_epoch(order.num_examples, plan.global_batch_size)
        self.order = order
        self.plan = plan
        self.rank = rank
        self.total_steps = total_steps
        self.carry_epoch = carry_epoch
        self.start_step = 0  # updates already done: set it before iterating, after a resume

    def epoch_of(self, step: int) -> int:
        """Epoch (from 0) of update `step` (from 1)."""
        return (step - 1) // self.steps_per_epoch

    def __len__(self) -> int:
        return (self.total_steps - self.start_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        m, processes = self.plan.micro_batch_size, self.plan.num_processes
        for step in range(self.start_step + 1, self.total_steps + 1):
            window = (step - 1) % self.steps_per_epoch * self.plan.global_batch_size
            epoch = self.epoch_of(step)
            for micro_step in range(self.plan.accumulation):
                start = window + (micro_step * processes + self.rank) * m
                yield self.indices(self.order.ids(epoch, start, start + m).tolist(), epoch)

    def indices(self, ids: list[int], epoch: int) -> list[int]:
        """These samples as the data set is asked for them in this epoch."""
        return [SampleIndex(id_, epoch) for id_ in ids] if self.carry_epoch else ids


class ShardSampler(Sampler[int]):
    """Every P-th sample from this rank's own: all samples once over all ranks, none padded.

    With `even` all ranks have equally many, as the forward passes of a sharded model are entered by
    all of them: the last index of some is then num_examples or more, for which the data set hands
    out something without any label.
    """

    def __init__(self, num_examples: int, num_processes: int, rank: int, even: bool = False):
        longest = -(-num_examples // num_processes)
        end = longest * num_processes if even else num_examples
        self.indices = range(rank, end, num_processes)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Complete windows in an epoch; UsageError when there is none."""
    if num_examples < global_batch_size:
        raise UsageError(
            f"the training set has {num_examples} examples, fewer than one update takes "
            f"(global_batch_size={global_batch_size}); use {num_examples} or less"
        )
    return num_examples // global_batch_size
