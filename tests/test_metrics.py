"""Sums over processes, exact counts."""

import time

import pytest
import torch

from utils.metrics import (
    ConfusionMatrix,
    Speed,
    Sums,
    intersection_over_union,
    peak_memory_bytes,
)

CPU = torch.device("cpu")


def make_sums() -> Sums:
    return Sums(CPU, floats=("loss", "error"), counts=("correct", "num_examples"))


def sums_of_a_rank(empty: int | None = None) -> dict:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    sums = make_sums()
    if rank != empty:
        for part in range(3):
            sums.add(
                loss=torch.tensor(0.1 * (rank + 1) + part, dtype=torch.float64),
                num_examples=torch.tensor(2**24 + 1 + rank),  # float32 would lose the 1
                correct=torch.tensor(2**53 + 1) * (part == 0),  # float64 would
            )
    return sums.reduce()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("empty", [None, 0])
def test_totals_are_exact_and_equal_on_all_ranks(pool, size, empty):
    replies = pool.run(size, sums_of_a_rank, empty)
    ranks = [rank for rank in range(size) if rank != empty]
    expected = {
        "loss": sum(0.1 * (rank + 1) + part for rank in ranks for part in range(3)),
        "error": 0.0,
        "num_examples": sum(3 * (2**24 + 1 + rank) for rank in ranks),
        "correct": (2**53 + 1) * len(ranks),
    }
    for total in replies:
        assert total == {**expected, "loss": pytest.approx(expected["loss"], rel=1e-15)}
        assert type(total["num_examples"]) is int and type(total["loss"]) is float


def test_float32_losses_are_summed_in_float64():
    sums = make_sums()
    sums.add(loss=torch.tensor(2.0**24))
    for _ in range(3):
        sums.add(loss=torch.tensor(1.0))
    assert sums.reduce()["loss"] == 2**24 + 3


def test_only_floats_or_only_counts():
    sums = Sums(CPU, floats=(), counts=("n",))
    sums.add(n=torch.tensor(True))
    assert sums.reduce() == {"n": 1}
    assert Sums(CPU, floats=("x",), counts=()).reduce() == {"x": 0.0}


def test_wrong_names_and_kinds_are_refused():
    with pytest.raises(KeyError, match="acuracy"):
        make_sums().add(acuracy=torch.tensor(1))
    with pytest.raises(RuntimeError):  # a count that is no integer
        make_sums().add(correct=torch.tensor(0.5))


def test_gradients_are_not_kept():
    weight = torch.ones((), requires_grad=True)
    sums = make_sums()
    sums.add(loss=weight * 2)
    assert not sums.floats["loss"].requires_grad


def test_speed_counts_updates_only(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    speed = Speed(global_batch_size=32)

    def update(seconds, wait):
        clock[0] += seconds
        speed.count(wait)

    update(2.0, 0.5)
    update(2.0, 0.5)
    clock[0] += 50  # an evaluation
    speed.resume()
    update(4.0, 1.0)
    assert speed.examples_per_second == 3 * 32 / 8
    assert speed.metrics() == {"perf/examples_per_second": 12.0, "perf/data_wait_fraction": 0.25}
    update(1.0, 1.0)  # counted from the last line of metrics on
    assert speed.metrics() == {"perf/examples_per_second": 32.0, "perf/data_wait_fraction": 1.0}


def test_peak_memory_grows_with_use():
    before = peak_memory_bytes(CPU)
    block = torch.ones(64 << 20, dtype=torch.uint8)  # touched: resident
    assert 10 << 20 < before <= peak_memory_bytes(CPU) < 1 << 40
    assert block.numel() == 64 << 20


def confusion_of_a_rank(truth, prediction) -> list:
    import torch.distributed as dist

    matrix = ConfusionMatrix(3, CPU)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    for a, b in zip(truth[own], prediction[own], strict=True):
        matrix.add(a, b, ignore_index=255)
    return matrix.reduce().tolist()


def test_confusion_matrix_of_all_processes(pool):
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(3, (7, 4, 5), generator=generator).to(torch.uint8)
    truth[torch.rand(7, 4, 5, generator=generator) < 0.3] = 255
    prediction = torch.randint(3, (7, 4, 5), generator=generator)
    expected = [[int(((truth == i) & (prediction == j)).sum()) for j in range(3)] for i in range(3)]
    assert sum(map(sum, expected)) == int((truth != 255).sum()) < truth.numel()
    assert pool.run(2, confusion_of_a_rank, truth, prediction) == [expected] * 2


def test_absent_classes_have_no_intersection_over_union():
    matrix = torch.tensor([[6, 0, 2], [0, 0, 0], [0, 0, 0]])
    iou = intersection_over_union(matrix, ["a", "b", "c"])
    assert iou == {"a": 6 / 8, "c": 0.0}  # c is predicted where it is not; b is nowhere
