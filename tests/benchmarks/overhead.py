"""What cifar.py's loop costs beside the barest one: python tests/benchmarks/overhead.py [--short]

About 25 minutes on two cores, 8 with --short. Exit status 0 when the 95% interval of the median
ratio (ours / barest that keeps memory) lies below 1.03 in all rows, and ours waits for data in at
most 2% of its time; the last line has the figures.

Each loop trains in processes of its own, as it would alone, on the same images in memory, in blocks
of a few updates in turn: cifar.py's own main, stopped between two windows of its loader, and the
loop below, with the same model, batch, augmentation, optimizer, precision and DDP. A ratio is that
of two blocks of a round, in which another one comes first each time. torchvision's ResNet-18 stays
unchanged (7x7 stem): with its short updates the bound is the stricter one.

In ours and not in the barest: a window's count over all processes, the order and the crops as
functions of (seed, epoch, sample), their digest, the loss and the gradient's norm over all
processes, read and checked before the step, running statistics by window, the learning rate's
schedule, a line of metrics.jsonl per update, status and console, the threads of the guard. And what
takes time away: freed memory is kept for the next tensors (utils.start.keep_freed_memory). The
barest loop comes in two kinds, with that one call and without; the bound is for the first.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve other processes

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root, so utils/ imports

from tests.benchmarks import common
from utils.small_images import ImageData
from utils.start import keep_freed_memory

BOUND, MOST_WAIT = 1.03, 0.02
WARM_UP = 3  # updates whose waiting is not counted
PADDING = 4  # pixels


class Barest:
    """The plain training loop, all of it: a random crop and mirror, forward, backward, step."""

    def __init__(self, data: ImageData, precision: str):
        self.rank, self.size = common.world()
        self.precision = precision
        index = torch.arange(-PADDING, 32 + PADDING).abs()
        index = 31 - (31 - index).abs()  # reflects at the borders, once for all images
        padded = data.train.images.permute(0, 2, 3, 1)[:, index][:, :, index]
        self.height = len(index)
        self.pixels = padded.reshape(-1, 3)  # of all images
        self.labels = data.train.labels
        self.mean, self.std = torch.tensor(data.mean) * 255, torch.tensor(data.std) * 255
        self.model = common.build_model().to(memory_format=torch.channels_last)
        if self.size > 1:  # each process keeps its own running statistics
            names = [name for name, _ in self.model.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, names)
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(
            common.parameter_groups(self.model),
            lr=common.LEARNING_RATE,
            momentum=common.MOMENTUM,
            nesterov=True,
            fused=True,
        )
        self.order = iter(())

    def next_ids(self) -> torch.Tensor:
        for ids in self.order:
            if len(ids) == common.MICRO_BATCH * self.size:
                return ids[self.rank :: self.size]
        epoch = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        self.order = iter(epoch.split(common.MICRO_BATCH * self.size))
        return self.next_ids()

    def update(self) -> None:
        ids = self.next_ids()
        top, left = torch.randint(2 * PADDING + 1, (2, len(ids), 1, 1))
        columns = torch.arange(32)
        columns = torch.where(torch.rand(len(ids), 1, 1) < 0.5, 31 - columns, columns)
        rows = (ids[:, None, None] * self.height + top + torch.arange(32)[:, None]) * self.height
        pixels = self.pixels.index_select(0, (rows + left + columns).flatten())
        images = pixels.view(-1, 32, 32, 3).float().sub_(self.mean).div_(self.std)
        with common.autocast(self.precision):
            logits = self.model(images.permute(0, 3, 1, 2))
        loss = F.cross_entropy(
            logits.float(), self.labels[ids], label_smoothing=common.LABEL_SMOOTHING
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train_ours(
    pace: common.Pace, data: ImageData, precision: str, run: Path, directory: Path
) -> None:
    """One process of cifar.py, the files in `run`; it trains until it is killed."""
    common.as_launched(precision)
    common.train_ours_in_blocks(pace, data, run)


def train_barest(
    pace: common.Pace, data: ImageData, precision: str, keep_memory: bool, directory: Path
) -> None:
    """One process of the barest loop; it trains until it is killed."""
    common.as_launched(precision)
    _, size = common.world()
    torch.set_num_threads(max(1, common.cores() // size))
    if keep_memory:
        keep_freed_memory()
    if size > 1:
        dist.init_process_group("gloo")
    loop = Barest(data, precision)
    while True:
        pace()
        loop.update()


def measure(
    size: int, data: ImageData, precision: str, rounds: int, updates: int
) -> tuple[list[tuple[float, ...]], float]:
    """Seconds of (ours, barest, barest that keeps memory), for blocks of `updates`, by round.

    And the share of ours that went into waiting for data.
    """
    with tempfile.TemporaryDirectory() as run:
        ours = (size, train_ours, (data, precision, Path(run)))
        barest = [(size, train_barest, (data, precision, keep)) for keep in (False, True)]
        seconds = common.race([ours, *barest], rounds, updates)
        text = Path(run, "metrics.jsonl").read_text()
    # Between two blocks it waits for its turn; that is in its rate, and not in its wait for data.
    rows = [json.loads(line) for line in text.splitlines()[WARM_UP:]]
    waits = [row["perf/data_wait_fraction"] / row["perf/examples_per_second"] for row in rows]
    wait_seconds = statistics.fmean(waits) * common.MICRO_BATCH * size  # of an update
    return list(zip(*seconds, strict=True)), wait_seconds * updates / statistics.median(seconds[0])


def figures(
    size: int, precision: str, seconds: list[tuple[float, ...]], wait: float, updates: int
) -> dict:
    """A row: all speeds, the median ratio and its 95% interval, the share of data."""
    images = updates * common.MICRO_BATCH * size
    speeds = [images / statistics.median(column) for column in zip(*seconds, strict=True)]
    median, low, high = common.median_interval([ours / kept for ours, _, kept in seconds])
    to_plain = common.median_interval([ours / plain for ours, plain, _ in seconds])
    row = {"processes": size, "precision": precision, "images_per_second": speeds}
    row |= {"ratio": median, "interval": (low, high), "to_plain": to_plain}
    return {**row, "wait": wait, "seconds": seconds}


def report(rows: list[dict]) -> int:
    """Print the table, and the last line; the exit status."""
    heading = [
        "processes",
        "precision",
        "images/s ours",
        "barest",
        "that keeps memory",
        "ours to barest",
        "to that which keeps memory",
        "data wait",
    ]
    lines, short = [], []
    for row in rows:
        speeds = [f"{speed:.0f}" for speed in row["images_per_second"]]
        ratio = "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["interval"])
        to_plain = "{:.3f} ({:.3f} to {:.3f})".format(*row["to_plain"])
        wait = f"{row['wait']:.1%}"
        lines.append([row["processes"], row["precision"], *speeds, to_plain, ratio, wait])
        short.append(f"{row['processes']} x {row['precision']} {ratio}, {wait}")
    holds = all(row["interval"][1] < BOUND and row["wait"] <= MOST_WAIT for row in rows)
    print(f"\n{common.table(heading, lines)}\n")
    bounds = f"below {BOUND}, data wait at most {MOST_WAIT:.0%}"
    print(f"{'holds' if holds else 'FAILS'}, {bounds}: {'; '.join(short)}")
    return 0 if holds else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="60 rounds a row instead of 200")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of blocks a row")
    parser.add_argument("--updates", type=int, default=2, help="timed updates a block")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--precisions", nargs="*", default=["float32", "bf16"])
    parser.add_argument("--images", type=int, default=0, help="random ones, instead of the data")
    parser.add_argument("--json", type=Path, help="where all figures go")
    args = parser.parse_args(arguments)
    rounds = args.rounds or (60 if args.short else 200)
    data = common.random_data(args.images) if args.images else common.load_data()
    machine = common.machine()
    print(f"{machine}, {data.name}, {rounds} rounds of {args.updates} updates", flush=True)
    rows = []
    for size in args.processes:
        for precision in args.precisions:
            seconds, wait = measure(size, data, precision, rounds, args.updates)
            rows.append(figures(size, precision, seconds, wait, args.updates))
            ratio, interval = rows[-1]["ratio"], rows[-1]["interval"]
            print(size, precision, f"{ratio:.3f}", interval, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}))
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
