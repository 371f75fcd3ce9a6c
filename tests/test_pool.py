"""The pool itself: right worlds, clean workers, and failures that are seen."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist


def world() -> tuple:
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"], dist.get_backend()


def leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)


def look() -> tuple:
    return (
        "LEFT_BEHIND" in os.environ,
        torch.get_default_dtype() is torch.float32,
        torch.are_deterministic_algorithms_enabled(),
        dist.is_initialized(),
    )


def accelerate_world() -> tuple:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.process_index, accelerator.num_processes


def fail_on(bad: int) -> int:
    if dist.get_rank() == bad:
        raise ValueError("planned failure")
    return dist.get_rank()


def die_on(bad: int) -> None:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    if dist.get_rank() == 0:
        threading.Event().wait()  # for ever


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_worlds(pool, size):
    assert pool.run(size, world) == [(i, size, str(i), "gloo") for i in range(size)]
    assert pool.run(size, accelerate_world, init=False) == [(i, size) for i in range(size)]


def test_nothing_is_left_to_the_next_call(pool):
    pool.run(2, leave_traces)
    assert pool.run(2, look, init=False) == [(False, True, False, False)] * 2


def test_failures_are_seen_and_the_pool_goes_on(pool):
    with pytest.raises(AssertionError, match="rank 1: (?s:.*)planned failure") as caught:
        pool.run(2, fail_on, 1)
    assert "ValueError" in str(caught.value) and "rank 0" not in str(caught.value)
    assert [reply[0] for reply in pool.run(2, world)] == [0, 1]


@pytest.mark.slow  # new workers each time
def test_deaths_and_hangs_are_seen(pool):
    with pytest.raises(AssertionError, match="rank 1: the worker process died"):
        pool.run(2, die_on, 1)
    with pytest.raises(AssertionError, match=r"rank 0: no answer \(hung\?\)"):
        pool.run(2, hang, timeout=20)
    assert [reply[0] for reply in pool.run(2, world)] == [0, 1]
