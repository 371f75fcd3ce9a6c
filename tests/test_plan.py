"""Batch arithmetic, and running out of memory: every suggestion is tried out."""

import re

import pytest
import torch

from utils.batchnorm import resolve_group
from utils.errors import ExplainedError, UsageError
from utils.plan import BatchPlan, explain_out_of_memory, plan_batches, smaller_micro_batch


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro", [0, 1, 3, 4, 16])
@pytest.mark.parametrize("total", [1, 2, 5, 12, 48, 96, 100])
def test_layouts_and_suggestions(total, micro, processes):
    unit = (micro or 1) * processes
    if total % unit == 0:
        plan = plan_batches(total, micro, processes)
        assert plan.num_processes * plan.micro_batch_size * plan.accumulation == total
        assert plan.micro_batch_size == (micro or total // processes)
        assert (plan.global_batch_size, plan.num_processes) == (total, processes)
        assert micro or plan.accumulation == 1
        return
    with pytest.raises(UsageError) as caught:
        plan_batches(total, micro, processes)
    message, suggestions = str(caught.value).split("; use ")
    assert f"global_batch_size={total} " in message and f"{processes} processes" in message
    assert not micro or f"micro_batch_size={micro} x" in message
    suggested = [int(number) for number in re.findall(r"\d+", suggestions)]
    assert suggested and all(abs(number - total) < unit for number in suggested)
    for number in suggested:
        plan_batches(number, micro, processes)


def test_the_example_of_the_design():
    message = r"^global_batch_size=500 is not a multiple of micro_batch_size=64 x 4 processes; use "
    with pytest.raises(UsageError, match=message + "512 or 256$"):
        plan_batches(500, 64, 4)
    with pytest.raises(UsageError, match="global_batch_size=500 .* 3 processes; use 501 or 498$"):
        plan_batches(500, 0, 3)
    with pytest.raises(UsageError, match="global_batch_size=2 .* 4 processes; use 4$"):
        plan_batches(2, 0, 4)


@pytest.mark.parametrize("total, micro", [(0, 0), (-4, 2), (8, -1)])
def test_sizes_out_of_range(total, micro):
    with pytest.raises(UsageError, match=f"global_batch_size={total} and micro_batch_size={micro}"):
        plan_batches(total, micro, 1)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_smaller_micro_batch_keeps_the_recipe(processes):
    found = 0
    for micro in (1, 2, 3, 6, 8, 12, 32):
        for accumulation in (1, 2, 3):
            total = processes * micro * accumulation
            groups = [n for n in range(1, total + 1) if works(n, micro, processes)]
            for group in [0, *groups]:
                text = smaller_micro_batch(BatchPlan(total, processes, micro, accumulation), group)
                allowed = [
                    m
                    for m in range(1, micro // 2 + 1)
                    if total % (m * processes) == 0 and (not group or works(group, m, processes))
                ]
                flags = re.search(
                    r"--micro-batch-size (\d+)(?: --bn-group (\d+))? needs less", text
                )
                assert bool(flags) == bool(allowed), text
                if flags:
                    found += 1
                    assert int(flags[1]) == max(allowed)
                    assert int(flags[2] or 0) == group
                elif micro > 1:
                    assert f"no smaller one keeps bn_group={group} on {processes} proc" in text
    assert found > 20


def works(group: int, micro: int, processes: int) -> bool:
    """Whether BatchNorm groups accept the layout, by their own rule."""
    try:
        return resolve_group(group, micro, processes)[0] == group
    except UsageError:
        return False


PLAN = BatchPlan(256, 2, 64, 2)


def raise_error(error):
    raise error


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),  # the real thing, on the CPU
        lambda: raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda: raise_error(RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)")),
        lambda: raise_error(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x")),
        lambda: raise_error(MemoryError()),
    ],
)
def test_out_of_memory_names_the_flag(fail):
    with pytest.raises(ExplainedError) as caught:
        with explain_out_of_memory(PLAN, 32):
            fail()
    assert re.fullmatch(
        r"out of memory with micro_batch_size=64 \(update \d+, .*; peak memory \d+\.\d\d GiB\): "
        "--micro-batch-size 32 --bn-group 32 needs less and keeps the recipe",
        str(caught.value),
    )
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("memory")]
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught:
        with explain_out_of_memory(PLAN, 32):
            raise error
    assert caught.value is error
    with explain_out_of_memory(PLAN, 32):
        pass


def test_nothing_smaller_than_one():
    assert "one example is the least" in smaller_micro_batch(BatchPlan(8, 2, 1, 4), 1)
