"""Loader processes and the signals that launchers send to them."""

import multiprocessing
import os
import random
import signal
import time

import psutil
import pytest
import torch.distributed as dist

from utils.loaders import SIGNALS, SteadyLoader, ignore_signals


def signalled_first(worker_id: int) -> None:
    """As from a launcher that stops everything while a loader process is starting."""
    os.kill(os.getpid(), signal.SIGTERM)
    ignore_signals(worker_id)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no masks on this system")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_while_it_starts_does_not_end_it(method):
    loader = SteadyLoader(range(4), num_workers=1)
    loader.worker_init_fn = signalled_first
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS)  # not held any more


def stuck_children(forks: int) -> int:
    """How many children of os.fork, right after a collective, do not come to their first line."""
    rank, stuck = dist.get_rank(), 0
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[rank % min(len(cores), 2)]})  # gloo's threads must wait
    try:
        for number in range(forks):
            dist.all_gather_object([None] * dist.get_world_size(), number)
            deadline = time.perf_counter() + random.Random(number + rank).choice((0, 1e-4, 1e-3))
            while time.perf_counter() < deadline:
                pass
            pid = os.fork()
            if not pid:
                os._exit(0)
            try:
                psutil.Process(pid).wait(timeout=5.0)
            except psutil.TimeoutExpired:
                stuck += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    finally:
        os.sched_setaffinity(0, cores)
    return stuck


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot pin a process to a core")
def test_a_fork_right_after_a_collective_does_not_hang(pool):
    """gh-112275: about one fork in 60 did, in CPython 3.11.7 and four processes on two cores."""
    assert pool.run(4, stuck_children, 150) == [0, 0, 0, 0]
