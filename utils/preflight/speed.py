"""The checks of the machines: the network between the ranks, and how fast the real loop is."""

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed import world_size
from utils.metrics import peak_memory_bytes
from utils.preflight.job import FAIL, NOT_CHECKED, PASS, WARN, Finding, Job, Steps
from utils.preflight.state import restored
from utils.preflight.truth import plain_copy
from utils.start import local_world_size

ROUND_TRIPS, LARGE_BYTES, REPEATS = 20, 8 << 20, 3
SLOW_SECONDS = 0.1  # for a sixteenth of it: then that is large enough
SLOW_LINK = 2.0  # times below the median bandwidth
STRAGGLER = 1.3  # times above the median time
PROBE_SECONDS, MOST_UPDATES = 8.0, 10
GROWTH_UPDATES = 4  # after which something that grows is told apart from chance
WAIT_SHARE, COMMUNICATION_SHARE = 0.5, 0.4


def network(job: Job) -> Steps:
    """Round trip and bandwidth of the real backend; several machines also by pairs."""
    if world_size() == 1:
        yield None
        return Finding(PASS, "one process: nothing to send")
    everyone = yield measure_network(job)
    return judge_network(everyone)


def measure_network(job: Job) -> dict[str, float]:
    """Seconds of a small all-reduce, bytes per second of a large one, and to the next rank."""
    small = torch.zeros(1, device=job.device)
    large = torch.zeros(LARGE_BYTES // 4, dtype=torch.float32, device=job.device)
    dist.all_reduce(small)  # the first one opens the connections
    round_trip = min(_timed(lambda: dist.all_reduce(small), job) for _ in range(ROUND_TRIPS))
    part = large[: len(large) // 16].clone()
    slow = torch.tensor(float(_timed(lambda: dist.all_reduce(part), job) > SLOW_SECONDS))
    slow = slow.to(job.device)
    dist.broadcast(slow, 0)  # one clock decides for all
    if slow.item():
        large = part
    dist.all_reduce(large)
    whole = min(_timed(lambda: dist.all_reduce(large), job) for _ in range(REPEATS))
    link = 0.0
    leaders = range(0, world_size(), local_world_size())  # the first rank of each machine
    for first in leaders if len(leaders) > 1 else ():  # one pair at a time, around the ring
        second = (first + local_world_size()) % world_size()
        if dist.get_rank() == first:
            seconds = min(
                _timed(lambda to=second: dist.send(large, to), job) for _ in range(REPEATS)
            )
            link = large.nbytes / seconds
        elif dist.get_rank() == second:
            for _ in range(REPEATS):
                dist.recv(large, first)
        dist.barrier()
    return {"round_trip": round_trip, "bandwidth": large.nbytes / whole, "link": link}


def _timed(action, job: Job) -> float:
    start = time.perf_counter()
    action()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - start


def judge_network(everyone: list[dict[str, float]]) -> Finding:
    """From each rank's figures (see measure_network)."""
    bandwidth = min(answer["bandwidth"] for answer in everyone)
    round_trip = max(answer["round_trip"] for answer in everyone)
    seen = f"round trip {1e6 * round_trip:.0f} us, all-reduce {bandwidth / 1e9:.2g} GB/s"
    links = {rank: answer["link"] for rank, answer in enumerate(everyone) if answer["link"]}
    if len(links) > 2:
        median = sorted(links.values())[len(links) // 2]
        slowest = min(links, key=lambda rank: links[rank])
        if links[slowest] * SLOW_LINK < median:
            return Finding(
                WARN,
                f"{seen}; {links[slowest] / 1e9:.2g} GB/s from the machine of rank {slowest} to "
                f"the next, {median / 1e9:.2g} in the median",
                "a slow link sets the pace of all: look at this machine's interface "
                "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)",
            )
    return Finding(PASS, seen)


def speed(job: Job) -> Steps:
    """Real updates: what they wait for, who is slow, what stays in memory."""
    if job.is_sharded:
        yield None
        return Finding(NOT_CHECKED, "the model is sharded: its state cannot be put back")
    with restored(job):
        facts = measure_updates(job)
        everyone = yield facts
    return judge_speed(everyone, job)


def measure_updates(job: Job) -> dict[str, Any]:
    """Seconds of some updates, of their parts, and tensors that are alive after each."""
    has_affinity = hasattr(os, "sched_getaffinity")
    facts: dict[str, Any] = {
        "processes": local_world_size(),
        "threads": torch.get_num_threads() * local_world_size() if job.device.type == "cpu" else 0,
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
    }
    seconds, waits, alive = [], [], []
    job.sampler.start_step = 0
    start_time = time.perf_counter()
    with _bounded(job) as windows:
        mark = time.perf_counter()
        for window in windows:
            totals = job.update(window)
            now = time.perf_counter()
            seconds.append(now - mark)
            waits.append(window.wait_seconds)
            del window, totals
            alive.append(_tensors_alive())
            # One clock decides for all, as they must all make the same number of updates.
            patience = PROBE_SECONDS if len(alive) >= GROWTH_UPDATES else 4 * PROBE_SECONDS
            late = time.perf_counter() - start_time > patience
            stop = torch.tensor(float(late), device=job.device)
            if world_size() > 1:
                dist.broadcast(stop, 0)
            if stop.item():
                break
            mark = time.perf_counter()
    steady = slice(1, None) if len(seconds) > 1 else slice(None)
    copy = plain_copy(job)
    batch = next(iter(job.train_loader)).batches[0]
    start = time.perf_counter()
    loss, _ = job.compute_loss(copy, batch)
    loss.backward()
    _timed(lambda: None, job)
    facts["alone"] = (time.perf_counter() - start) * job.plan.accumulation
    facts |= {
        "updates": len(seconds),
        "seconds": sorted(seconds[steady])[len(seconds[steady]) // 2],
        "wait": sum(waits[steady]) / max(sum(seconds[steady]), 1e-9),
        "grows": _growth(alive),
        "peak": peak_memory_bytes(job.device),
    }
    return facts


@contextmanager
def _bounded(job: Job) -> Iterator[Any]:
    """The first windows of the real loader, and no more than MOST_UPDATES."""

    def windows():
        for count, window in enumerate(job.train_loader, 1):
            yield window
            if count == MOST_UPDATES:
                return

    iterator = windows()
    try:
        yield iterator
    finally:
        iterator.close()


def _tensors_alive() -> Counter:
    gc.collect()
    return Counter(
        tuple(value.shape)
        for value in gc.get_objects()
        if issubclass(type(value), torch.Tensor)  # isinstance would ask lazy modules for a class
    )


def _growth(alive: list[Counter]) -> str:
    """The shape of tensors of which there are more after every update; "" for none."""
    if len(alive) < GROWTH_UPDATES:
        return ""
    late = alive[1:]  # the first update makes the optimizer's state
    for shape in late[-1]:
        counts = [count[shape] for count in late]
        if all(more > fewer for fewer, more in zip(counts, counts[1:], strict=False)):
            return "x".join(map(str, shape)) or "0-d"
    return ""


def judge_speed(everyone: list[dict[str, Any]], job: Job) -> Finding:
    """From each rank's figures (see measure_updates).

    Processes on a CPU take each other's cores, so who is slow is judged on accelerators only; how
    much is communication, there and between machines.
    """
    seconds = max(answer["seconds"] for answer in everyone)
    wait = max(answer["wait"] for answer in everyone)
    hours = seconds * job.total_steps / 3600
    took = f"{60 * hours:.1f} min" if hours < 1 else f"{hours:.1f} h"
    seen = (
        f"{job.plan.global_batch_size / seconds:.0f} examples/s, {took} for {job.total_steps} "
        f"updates, {wait:.0%} waiting for data"
    )
    for rank, answer in enumerate(everyone):
        if answer["grows"]:
            return Finding(
                FAIL,
                f"rank {rank}: after each update there are more tensors of shape "
                f"{answer['grows']} than before",
                "something keeps losses or outputs from step to step: store numbers (.item() "
                "after the update, or .detach()), not tensors with their graph",
            )
        if answer["threads"] > answer["cores"] and answer["threads"] > answer["processes"]:
            return Finding(
                WARN,
                f"{seen}; {answer['threads']} threads on {answer['cores']} cores",
                "a smaller OMP_NUM_THREADS, or leave it out: the script shares the cores",
            )
    if wait > WAIT_SHARE:
        return Finding(
            WARN,
            seen,
            "the data are the bottleneck: raise --num-workers, decode less, move augmentation to "
            "the device",
        )
    alone = [answer["alone"] for answer in everyone]
    on_cpu, one_machine = job.device.type == "cpu", everyone[0]["processes"] == len(everyone)
    if len(everyone) == 1 or (on_cpu and one_machine):
        return Finding(PASS, seen)
    median = sorted(alone)[(len(alone) - 1) // 2]
    if max(alone) > STRAGGLER * median and not on_cpu:
        slow = alone.index(max(alone))
        return Finding(
            WARN,
            f"{seen}; rank {slow} computes {max(alone) / median:.1f} times as long as the median",
            "a straggler sets the pace of all: another program on its device, heat, another model "
            "(nvidia-smi)",
        )
    share = max(0.0, 1 - max(alone) / seconds - wait)
    if share > COMMUNICATION_SHARE:
        return Finding(
            WARN,
            f"{seen}; communication-bound: about {share:.0%} of an update",
            "gradients travel once an update, however large it is: raise --global-batch-size, as a "
            "larger batch a device (--micro-batch-size 0), or by accumulation where the memory is "
            "full (--micro-batch-size as it is); a comm hook (--comm-hook bf16) halves their bytes",
        )
    return Finding(PASS, f"{seen}, about {share:.0%} communicating")
