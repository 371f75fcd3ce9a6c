"""Sample order and per-sample random numbers, against plain Python and numpy."""

import itertools
import pickle
import random
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader

from utils import order
from utils.errors import UsageError
from utils.order import (
    ORDER_VERSION,
    MicroBatchSampler,
    SampleIndex,
    SampleOrder,
    ShardSampler,
    digest,
    hash64,
    random_integers,
    random_uniform,
    seeded_for_sample,
    steps_per_epoch,
)
from utils.plan import plan_batches

MASK = (1 << 64) - 1
ALARM = 1e-4  # chi-square tests have fixed seeds: below this, something is wrong


# ---- An independent implementation, in Python's integers --------------------------------------


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key_of(*words: int) -> int:
    state = 0
    for word in words:
        state = mix((state + (word & MASK) + 0x9E3779B97F4A7C15) & MASK)
    return state


def hash_reference(sample: int, seed: int, epoch: int, stream: int) -> int:
    return mix(mix((sample * 0x9E3779B97F4A7C15 + key_of(seed, epoch, stream)) & MASK))


def permute_reference(position: int, n: int, seed: int, epoch: int) -> int:
    bits = max(2, (n - 1).bit_length())
    low = bits // 2
    x = position
    while True:
        right, left = x & ((1 << low) - 1), x >> low
        for round_ in range(12):
            key = key_of(seed, epoch, round_, 0xFE15)
            if round_ % 2 == 0:
                right ^= mix((left * 0x9E3779B97F4A7C15 + key) & MASK) >> (64 - low)
            else:
                left ^= mix((right * 0x9E3779B97F4A7C15 + key) & MASK) >> (64 - (bits - low))
        x = (left << low) | right
        if x < n:
            return x


def whole_epoch(n: int, seed: int, epoch: int) -> list[int]:
    return SampleOrder(n, seed).ids(epoch, 0, n).tolist()


def consumed(n, plan, rank, total, start=0, seed=3) -> list[list[int]]:
    sampler = MicroBatchSampler(SampleOrder(n, seed), plan, rank, total)
    sampler.start_step = start
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return batches


# ---- The permutation ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 97, 1000, 8191, 8192, 8193, 20_011])
def test_epoch_is_a_permutation(n):
    for seed, epoch in ((0, 0), (0, 1), (12345, 7), (-1, 2)):
        assert sorted(whole_epoch(n, seed, epoch)) == list(range(n))


@pytest.mark.parametrize("n", [2, 3, 100, 10_007])
def test_equals_the_reference(n):
    positions = range(0, n, max(1, n // 50))
    for seed, epoch in ((0, 0), (7, 3), (-5, 1)):
        expected = [permute_reference(p, n, seed, epoch) for p in positions]
        order = SampleOrder(n, seed)
        assert order.permute(torch.tensor(list(positions)), epoch).tolist() == expected
        assert [int(order.ids(epoch, p, p + 1)) for p in positions] == expected


GOLDEN = {
    "ten": [3, 8, 4, 7, 9, 2, 5, 1, 6, 0],
    "cifar": [1341, 445, 21608, 22911],
    "large": [456863506, 178867146, 274339089],
    "hash": [
        -2832196531722772578,
        -7923930202548148945,
        -2945675192894098256,
        -6659451528722526835,
    ],
    "integers": [846, 570, 840, 638],
    "digest": 4259093942909988285,
}


def test_golden_values():
    """A change of any of these needs another ORDER_VERSION, and then new values here."""
    assert ORDER_VERSION == 1
    assert whole_epoch(10, 0, 0) == GOLDEN["ten"]
    assert SampleOrder(50_000, 42).ids(3, 25_000, 25_004).tolist() == GOLDEN["cifar"]
    assert SampleOrder(10**9, 1).ids(2, 5 * 10**8, 5 * 10**8 + 3).tolist() == GOLDEN["large"]
    ids = torch.arange(4)
    assert hash64(ids, 1, 2, 3).tolist() == GOLDEN["hash"]
    assert random_integers(ids, 1000, seed=1, epoch=2, stream=3).tolist() == GOLDEN["integers"]
    assert digest(torch.arange(1000)) == GOLDEN["digest"]


def test_any_slice_in_any_order_equals_the_whole():
    n = 30_000  # several blocks
    whole = whole_epoch(n, 5, 1)
    order = SampleOrder(n, 5)
    for start, stop in ((29_990, 30_000), (0, 3), (8190, 16_400), (8192, 8193), (100, 29_000)):
        assert order.ids(1, start, stop).tolist() == whole[start:stop]
    assert order.ids(0, 0, 5).tolist() != whole[:5]  # another epoch, same block number


def test_default_dtype_does_not_matter():
    expected = whole_epoch(1000, 0, 0)
    torch.set_default_dtype(torch.float64)
    try:
        assert whole_epoch(1000, 0, 0) == expected
        uniform = random_uniform(torch.arange(5), seed=0, epoch=0, stream=0)
        assert uniform.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_billion_samples_cost_no_memory():
    tracemalloc.start()
    order = SampleOrder(10**9, 0)
    ids = order.ids(0, 999_999_000, 10**9)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 1000 and 0 <= int(ids.min()) and int(ids.max()) < 10**9
    assert order._block_ids.numel() <= 1 << 13  # torch's memory is not traced
    assert traced < 1 << 20


def test_positions_are_uniform():
    n, epochs = 23, 2500
    orders = np.array([whole_epoch(n, 9, epoch) for epoch in range(epochs)])
    counts = np.zeros((n, n))  # sample at position
    for position in range(n):
        counts[position] = np.bincount(orders[:, position], minlength=n)
    statistic = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert stats.chi2.sf(statistic, (n - 1) ** 2) > ALARM

    # Neighbours: which sample follows which, over all ordered pairs.
    pairs = orders[:, :-1] * n + orders[:, 1:]
    counts = np.bincount(pairs.ravel(), minlength=n * n).reshape(n, n)
    counts = counts[~np.eye(n, dtype=bool)]
    assert stats.chisquare(counts).pvalue > ALARM

    # Fixed points of random permutations are Poisson distributed with mean 1.
    fixed = (orders == np.arange(n)).sum(axis=1)
    assert abs(fixed.mean() - 1) < 4 / np.sqrt(epochs)
    assert abs(fixed.var() - 1) < 0.15


def test_all_orders_of_three_samples_are_equally_frequent():
    epochs = 2400
    index = {order: i for i, order in enumerate(itertools.permutations(range(3)))}
    seen = [index[tuple(whole_epoch(3, 1, epoch))] for epoch in range(epochs)]
    assert stats.chisquare(np.bincount(seen, minlength=6)).pvalue > ALARM


def test_seeds_and_epochs_are_uncorrelated():
    n = 5000
    keys = [(seed, epoch) for seed in (0, 1, 2**40) for epoch in (0, 1, 2)]
    orders = {key: np.array(whole_epoch(n, *key)) for key in keys}
    for one, other in itertools.combinations(keys, 2):
        correlation = stats.spearmanr(orders[one], orders[other]).statistic
        assert abs(correlation) < 4.5 / np.sqrt(n), (one, other)
        assert (orders[one] == orders[other]).sum() < 10, (one, other)


# ---- Windows -----------------------------------------------------------------------------------

LAYOUTS = [
    (processes, micro, 16 // (processes * micro))
    for processes in (1, 2, 4, 8, 16)
    for micro in (1, 2, 4, 8, 16)
    if processes * micro <= 16
]


@pytest.mark.parametrize("processes, micro, accumulation", LAYOUTS)
def test_window_layout(processes, micro, accumulation):
    n, total = 16 * 5 + 7, 12  # two epochs and two updates; 7 samples of each are left out
    plan = plan_batches(16, micro, processes)
    assert plan.accumulation == accumulation
    for rank in range(processes):
        batches = iter(consumed(n, plan, rank, total))
        for step in range(total):
            epoch, window = divmod(step, 5)
            ids = whole_epoch(n, 3, epoch)[window * 16 : (window + 1) * 16]
            for a in range(accumulation):
                start = (a * processes + rank) * micro
                assert next(batches) == ids[start : start + micro]
        assert next(batches, None) is None


def test_the_tail_of_an_epoch_is_left_out_and_differs():
    n, plan = 103, plan_batches(16, 0, 1)
    left_out = []
    for epoch in range(6):
        batches = consumed(n, plan, 0, 6 * (epoch + 1), start=6 * epoch)
        used = [i for batch in batches for i in batch]
        assert len(used) == len(set(used)) == 96
        left_out.append(frozenset(range(n)) - frozenset(used))
    assert len(set(left_out)) == 6
    assert len(frozenset.union(*left_out)) > 25  # of 42 at most


@pytest.mark.parametrize("start", [0, 1, 4, 5, 6, 11, 12])
def test_a_resume_continues_exactly(start):
    plan = plan_batches(16, 4, 2)
    for rank in range(2):
        whole = consumed(87, plan, rank, 12)
        assert consumed(87, plan, rank, 12, start=start) == whole[start * plan.accumulation :]


def test_epoch_of_a_step():
    sampler = MicroBatchSampler(SampleOrder(87, 0), plan_batches(16, 0, 1), 0, 12)
    assert [sampler.epoch_of(step) for step in range(1, 13)] == [0] * 5 + [1] * 5 + [2] * 2


def test_a_loader_with_workers_keeps_the_order():
    plan = plan_batches(8, 4, 1)
    sampler = MicroBatchSampler(SampleOrder(40, 0), plan, 0, 7)
    data = torch.arange(40)
    plain = [batch.tolist() for batch in DataLoader(data, batch_sampler=sampler)]
    workers = [b.tolist() for b in DataLoader(data, batch_sampler=sampler, num_workers=2)]
    assert plain == workers == list(sampler)


def test_too_few_samples():
    assert steps_per_epoch(16, 16) == 1
    with pytest.raises(UsageError, match=r"15 examples.*global_batch_size=16.*use 15 or less"):
        steps_per_epoch(15, 16)
    with pytest.raises(UsageError):
        MicroBatchSampler(SampleOrder(15, 0), plan_batches(16, 0, 1), 0, 1)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 97, 101, 128])
def test_shards_cover_everything_once(processes, n):
    shards = [ShardSampler(n, processes, rank) for rank in range(processes)]
    assert sorted(i for shard in shards for i in shard) == list(range(n))
    assert [len(list(shard)) for shard in shards] == [len(shard) for shard in shards]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


# ---- Random numbers of a sample ----------------------------------------------------------------


def test_hash_equals_the_reference():
    samples = [0, 1, 2, 49_999, 2**31, 2**40 + 1, 2**62]
    for seed, epoch, stream in ((0, 0, 0), (1, 2, 3), (2**63, 10**6, 0), (-7, 0, 5)):
        got = hash64(torch.tensor(samples), seed, epoch, stream)
        expected = [hash_reference(i, seed, epoch, stream) for i in samples]
        assert [value & MASK for value in got.tolist()] == expected


def test_numbers_do_not_depend_on_the_batch():
    ids = torch.tensor([5, 99, 3, 5, 12_345])
    draw = {"seed": 3, "epoch": 4, "stream": 1}
    together = random_integers(ids, 9, **draw)
    alone = torch.cat([random_integers(ids[i : i + 1], 9, **draw) for i in range(len(ids))])
    assert together.tolist() == alone.tolist()
    assert random_integers(ids.reshape(1, 5, 1), 9, **draw).shape == (1, 5, 1)


@pytest.mark.parametrize("high", [1, 2, 9, 1000, 2**31])
def test_random_integers_are_uniform(high):
    values = random_integers(torch.arange(200_000), high, seed=1, epoch=0, stream=0).numpy()
    assert values.min() >= 0 and values.max() < high
    bins = min(high, 256)
    counts = np.bincount(values * bins // high, minlength=bins)
    expected = np.diff(np.ceil(np.arange(bins + 1) * high / bins)) / high * len(values)
    assert high == 1 or stats.chisquare(counts, expected).pvalue > ALARM


def test_random_uniform():
    values = random_uniform(torch.arange(100_000), seed=1, epoch=0, stream=0)
    assert values.dtype == torch.float32 and 0 <= float(values.min()) and float(values.max()) < 1
    assert stats.kstest(values.double().numpy(), "uniform").pvalue > ALARM


def test_streams_seeds_and_epochs_are_independent():
    ids = torch.arange(50_000)
    draws = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1)]
    values = [
        random_integers(ids, 16, seed=s, epoch=e, stream=t).numpy().astype(int) for s, e, t in draws
    ]
    for one, other in itertools.combinations(values, 2):
        joint = np.bincount(one * 16 + other, minlength=256)
        assert stats.chisquare(joint).pvalue > ALARM
    following = values[0][:-1] * 16 + values[0][1:]  # neighbouring samples
    assert stats.chisquare(np.bincount(following, minlength=256)).pvalue > ALARM


def test_digest_is_a_sum_without_order():
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    expected = sum(hash_reference(i, 0, 0, 0) for i in range(1000)) & MASK
    assert digest(ids) == digest(torch.arange(1000)) == expected
    assert (digest(ids[:300]) + digest(ids[300:])) & MASK == expected
    assert digest(ids[:0]) == 0
    assert 0 <= expected <= MASK
    assert digest(torch.tensor([1, 1])) != digest(torch.tensor([1]))  # a repetition is seen


# ---- Transforms where samples are read ---------------------------------------------------------


class Drawing(torch.utils.data.Dataset):
    """What Python, numpy and torch draw for a sample."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        with seeded_for_sample(index, seed=5):
            drawn = [random.random(), np.random.rand(), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([float(index), SampleIndex(index).epoch, *drawn], dtype=torch.float64)


def drawn_by(workers: int, processes: int, start: int = 0) -> torch.Tensor:
    """Rows of all ranks of two epochs, sorted by (epoch, index)."""
    rows = []
    plan = plan_batches(8, 0, processes)
    for rank in range(processes):
        order = SampleOrder(20, seed=3)
        sampler = MicroBatchSampler(order, plan, rank, total_steps=4, carry_epoch=True)
        sampler.start_step = start
        loader = DataLoader(Drawing(), batch_sampler=sampler, num_workers=workers)
        rows += [row for batch in loader for row in batch]
    return torch.stack(sorted(rows, key=lambda row: row[:2].flip(0).tolist()))


def test_sample_draws_the_same_in_any_worker_and_layout():
    expected = drawn_by(workers=0, processes=1)
    assert expected[:, 1].tolist() == [0.0] * 16 + [1.0] * 16
    assert len(expected[:, 2:].flatten().unique()) == 32 * 3  # by sample, epoch and generator
    assert torch.equal(expected, drawn_by(workers=0, processes=2))
    assert torch.equal(expected, drawn_by(workers=2, processes=1))
    resumed = drawn_by(workers=0, processes=1, start=3)
    assert torch.equal(resumed, expected[torch.isin(expected[:, 2], resumed[:, 2])])


def test_generators_are_as_before():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyError), seeded_for_sample(SampleIndex(3, 4), seed=0):
        random.random(), np.random.rand(), torch.rand(3)
        raise KeyError
    assert expected[:2] == (random.random(), np.random.rand())
    assert torch.equal(expected[2], torch.rand(3))


def test_index_is_an_int_that_keeps_its_epoch():
    index = pickle.loads(pickle.dumps(SampleIndex(7, 3)))
    assert index == 7 and index.epoch == 3 and SampleIndex(index).epoch == 3
    assert SampleIndex(7).epoch == 0
    assert torch.equal(torch.tensor([index]), torch.tensor([7]))


def test_epochs_are_carried_on_request_only():
    plan = plan_batches(4, 2, 1)
    plain = MicroBatchSampler(SampleOrder(9, 0), plan, 0, 5)
    carrying = MicroBatchSampler(SampleOrder(9, 0), plan, 0, 5, carry_epoch=True)
    assert list(plain) == list(carrying)
    assert {type(i) for ids in plain for i in ids} == {int}
    assert [i.epoch for ids in carrying for i in ids] == [0] * 8 + [1] * 8 + [2] * 4


def test_hashes_on_the_cpu_are_those_of_an_accelerator():
    """The CPU has them from numpy, accelerators from torch: both wrap around alike."""
    ids = torch.cat([torch.arange(1000), 2**62 + torch.arange(1000), -torch.arange(1000)])
    for seed, epoch, stream in ((0, 0, 0), (7, 3, 2), (2**63, 10**6, 0xD40)):
        x = ids * order._signed(order._GOLDEN) + order._key(seed, epoch, stream)
        assert torch.equal(order.hash64(ids, seed, epoch, stream), order._mix(order._mix(x)))
