"""How cifar.py and its parts grow: python tests/benchmarks/scaling.py (4 minutes on two cores).

Five tables, in Markdown: the sample order (seconds and memory against the number of samples),
processes (a core each, the global batch fixed), accumulation (seconds and gradient bytes of an
update), checkpoints (bytes and seconds against the number of parameters), and the share of the
gradient sum that hides behind the backward pass. ResNet-18 of torchvision, unchanged; what is
compared runs in turn, round by round.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve other processes

import psutil
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root, so utils/ imports

from tests.benchmarks import common
from tests.pool import WorkerPool
from utils import checkpoint
from utils.order import MicroBatchSampler, SampleOrder
from utils.plan import plan_batches
from utils.small_images import ImageData

GLOBAL_BATCH = 256
SMALLEST_GROUP = 16  # examples that share BatchNorm statistics, where the micro-batch varies
Rows = list[list[object]]


# ---- Sample order ----------------------------------------------------------------------------


def seek(count: int) -> tuple[float, float, float]:
    """First micro-batch after a resume in the epoch's middle, the later ones: s; growth: bytes."""
    memory = psutil.Process().memory_info
    before, start = memory().rss, time.perf_counter()
    plan = plan_batches(GLOBAL_BATCH, 0, 1)
    sampler = MicroBatchSampler(SampleOrder(count, seed=0), plan, rank=0, total_steps=10**9)
    sampler.start_step = sampler.steps_per_epoch // 2
    batches = iter(sampler)
    next(batches)
    first = time.perf_counter() - start
    start, updates = time.perf_counter(), min(1000, sampler.steps_per_epoch // 2)
    for _ in islice(batches, updates):
        pass
    return first, (time.perf_counter() - start) / updates, memory().rss - before


def order(largest: int) -> Rows:
    rows: Rows = []
    for exponent in range(4, largest + 1):
        pool = WorkerPool()  # a fresh process
        pool.run(1, seek, 10**4, init=False)  # pays for torch's own first calls
        [(first, later, grown)] = pool.run(1, seek, 10**exponent, init=False)
        pool.close()
        stored = f"{8 * 10**exponent / 1e6:,.2f}"  # an int64 permutation
        rows.append([f"10^{exponent}", f"{first * 1e3:.1f}", f"{later * 1e6:.0f}"])
        rows[-1] += [f"{grown / 1e6:.1f}", stored]
    return rows


# ---- cifar.py: processes, accumulation -------------------------------------------------------


def train(pace: common.Pace, flags: dict[str, Any], data: ImageData, directory: Path) -> None:
    """One process of cifar.py; every process has one core, where the system can see to it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: common.world()[1]])
    common.as_launched("float32")
    common.train_ours_in_blocks(pace, data, directory, **flags)


def processes(sizes: list[int], data: ImageData, rounds: int, updates: int) -> Rows:
    flags = {"global_batch_size": GLOBAL_BATCH}
    seconds = common.race([(size, train, (flags, data)) for size in sizes], rounds, updates)
    rows: Rows = []
    for size, column in zip(sizes, seconds, strict=True):
        ratios = [one / (own * size) for one, own in zip(seconds[0], column, strict=True)]
        low, median, high = common.quartiles(ratios)
        images = GLOBAL_BATCH * updates / statistics.median(column)
        rows.append([size, f"{images:.0f}", f"{median:.2f} ({low:.2f} to {high:.2f})"])
    return rows


def gradient_bytes(data: ImageData, directory: Path, flags: dict[str, Any], updates: int) -> float:
    """What a process gives into the gradient sums of an update, counted by a hook of DDP."""
    common.as_launched("float32")
    sent, build = [], DistributedDataParallel.__init__

    def count(group, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    def build_counted(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.register_comm_hook(None, count)

    with patch.object(DistributedDataParallel, "__init__", build_counted):
        common.train_ours(data, directory, lambda windows: islice(windows, updates), **flags)
    return sum(sent) / updates


def accumulation(steps: list[int], data: ImageData, rounds: int, updates: int) -> Rows:
    shared = {"global_batch_size": GLOBAL_BATCH, "bn_group": SMALLEST_GROUP}
    flags = [{**shared, "micro_batch_size": GLOBAL_BATCH // (2 * step)} for step in steps]
    seconds = common.race([(2, train, (own, data)) for own in flags], rounds, updates)
    rows: Rows = []
    for step, own, column in zip(steps, flags, seconds, strict=True):
        pool = WorkerPool()
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory, "run")
            sent, _ = pool.run(2, gradient_bytes, data, run, own, 2, init=False, timeout=600.0)
        pool.close()
        low, median, high = common.quartiles([block / updates for block in column])
        micro = own["micro_batch_size"]
        rows.append([step, micro, f"{median:.3f} ({low:.3f} to {high:.3f})", f"{sent / 1e6:.1f}"])
    return rows


# ---- Checkpoints -----------------------------------------------------------------------------


def checkpoints(names: list[str], rounds: int) -> Rows:
    """Of SGD with momentum; the files are written through to the disk."""
    rows: Rows = []
    for name in names:
        model = common.build_model(name)
        optimizer = torch.optim.SGD(common.parameter_groups(model), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        saving, loading, size = [], [], 0
        with tempfile.TemporaryDirectory() as directory:
            for step in range(1, rounds + 1):
                saving.append(
                    checkpoint.save_checkpoint(
                        Path(directory, "checkpoints"),
                        step,
                        model=model,
                        optimizer=optimizer,
                        scaler=None,
                        extra={},
                        manifest={"recipe": {}, "total_steps": rounds},
                        keep=1,
                    )
                )
                found = checkpoint.find_checkpoint(Path(directory))
                assert found is not None
                start = time.perf_counter()
                checkpoint.load_checkpoint(found, model=model, optimizer=optimizer)
                loading.append(time.perf_counter() - start)
                size = sum(file.stat().st_size for file in found.path.iterdir())
        count = sum(parameter.numel() for parameter in model.parameters())
        times = [f"{statistics.median(seconds):.2f}" for seconds in (saving, loading)]
        rows.append([name, f"{count / 1e6:.1f}", f"{size / 1e6:.0f}", *times])
    return rows


# ---- Gradient sum ----------------------------------------------------------------------------


def build_wrapped() -> DistributedDataParallel:
    model = common.build_model().to(memory_format=torch.channels_last)
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sum_nothing(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP: its buckets without their sum (no_sync would do without the buckets too)."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def overlap(rounds: int) -> dict[str, list[float]]:
    """Seconds of forward and backward with and without the gradient sum, and of the sum alone."""
    torch.set_num_threads(max(1, common.cores() // dist.get_world_size()))
    model, silent = (build_wrapped() for _ in range(2))
    silent.register_comm_hook(None, sum_nothing)
    images = torch.randn(common.MICRO_BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    gradient = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))

    def with_sum() -> None:
        model(images).sum().backward()

    def without_sum() -> None:
        silent(images).sum().backward()

    def sum_alone() -> None:  # by DDP's bucket size
        works = [dist.all_reduce(part, async_op=True) for part in gradient.split(25 * 2**18)]
        for work in works:
            work.wait()

    parts = [("with", with_sum), ("without", without_sum), ("alone", sum_alone)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in parts}
    for round_ in range(-2, rounds):
        for name, part in parts if round_ % 2 else reversed(parts):  # each after each other
            model.zero_grad()
            silent.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            part()
            dist.barrier()
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def gradient_sum(sizes: list[int], rounds: int) -> Rows:
    rows: Rows = []
    for size in sizes:
        pool = WorkerPool()
        seconds, *_ = pool.run(size, overlap, rounds, timeout=1800.0)
        pool.close()
        pairs = zip(seconds["with"], seconds["without"], strict=True)
        added = common.median_interval([both - compute for both, compute in pairs])
        alone = statistics.median(seconds["alone"])
        median, high, low = (1 - difference / alone for difference in added)
        times = [f"{statistics.median(column) * 1e3:.0f}" for column in seconds.values()]
        rows.append([size, *times, f"{median:.0%} ({low:.0%} to {high:.0%})"])
    return rows


HEADINGS = {
    "order": "samples, first micro-batch ms, later ones us, memory MB, a stored order MB",
    "processes": "processes on as many cores, images/s, efficiency",
    "accumulation": "micro-steps, micro-batch, seconds an update, gradient MB sent",
    "checkpoints": "model, million parameters, MB, seconds to save, to load",
    "gradient sum": "processes, with the sum ms, without ms, the sum alone ms, hidden (95%)",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(HEADINGS), choices=list(HEADINGS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=3, help="updates a block")
    parser.add_argument("--largest", type=int, default=9, help="samples: a power of ten")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4], help="at most")
    parser.add_argument("--accumulation", type=int, nargs="*", default=[1, 2, 4, 8])
    models = ["mobilenet_v3_small", "resnet18", "resnet50", "vit_b_16"]
    parser.add_argument("--models", nargs="*", default=models)
    parser.add_argument("--images", type=int, default=0, help="random ones, instead of the data")
    parser.add_argument("--json", type=Path, help="where the tables go too")
    args = parser.parse_args(arguments)
    data = common.random_data(args.images) if args.images else common.load_data()
    sizes = [size for size in args.processes if size <= common.cores()]
    several = [size for size in sizes if size > 1]
    blocks = data, args.rounds, args.updates
    sections = {
        "order": lambda: order(args.largest),
        "processes": lambda: processes(sizes, *blocks),
        "accumulation": lambda: accumulation(args.accumulation, *blocks),
        "checkpoints": lambda: checkpoints(args.models, args.rounds),
        "gradient sum": lambda: gradient_sum(several, 5 * args.rounds),  # a small difference
    }
    print(f"{common.machine()}, {data.name}, {args.rounds} rounds of {args.updates} updates")
    tables = {}
    for name in args.only:
        tables[name] = sections[name]()
        print(f"\n{common.table(HEADINGS[name].split(', '), tables[name])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": common.machine(), "tables": tables}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
