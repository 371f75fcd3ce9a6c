"""What the benchmarks share: data, cifar.py's own loop under a stopwatch, figures and tables."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy
import torch
import torchvision
from torch import nn

from tests.pool import free_port
from train import cifar
from utils.small_images import ImageData, Split, load_small_images
from utils.window import Window, WindowLoader

MICRO_BATCH = 128  # images a process and update
NEVER = 10**9  # updates
TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
BLOCK_SECONDS = 1800.0  # at most, compilation included
LOADER_START = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
# What every loop trains with. The rate is small: random images must not diverge either.
MOMENTUM, WEIGHT_DECAY, LABEL_SMOOTHING, LEARNING_RATE = 0.9, 5e-4, 0.1, 0.01


@cache
def load_data() -> ImageData:
    """CIFAR-10 from REAL_DATA_DIR, or random images of its size, which is said."""
    folder = Path(os.environ.get("REAL_DATA_DIR", ""), "cifar10").absolute()
    if "REAL_DATA_DIR" in os.environ and folder.is_dir():
        return load_small_images(str(folder), 0, on_accelerator=False)
    print("WARNING: RANDOM images instead of CIFAR-10: REAL_DATA_DIR is not set", flush=True)
    return random_data(50_000)


def random_data(count: int) -> ImageData:
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    split = Split(images, torch.randint(10, (count,)))
    classes = [str(number) for number in range(10)]
    return ImageData("random", split, split, classes, True, [0.5] * 3, [0.29] * 3, "random")


def build_model(name: str = "resnet18", num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """torchvision's ResNet-18 as it is: a short update, in which a loop's own costs weigh more."""
    return torchvision.models.get_model(name, num_classes=num_classes)


def parameter_groups(model: nn.Module) -> list[dict]:
    """As in cifar.py: biases and norms do not decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]


def as_launched(precision: str, compiled: bool = False) -> None:
    """Leave this process's environment as `accelerate launch` does, before an Accelerator opens.

    A single process gets no variables of a process group: with them it would be wrapped in DDP.
    """
    if os.environ.get("WORLD_SIZE") == "1":
        for name in TORCHRUN:
            os.environ.pop(name, None)
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    os.environ["ACCELERATE_MIXED_PRECISION"] = {"float32": "no"}.get(precision, precision)
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR" if compiled else "NO"


def world() -> tuple[int, int]:
    """Rank and number of processes, whether or not the process group is open yet."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def train_ours(
    data: ImageData,
    directory: Path,
    drive: Callable[[Iterator[Window]], Iterator[Window]],
    model: Callable[..., nn.Module] = build_model,
    **flags,
) -> None:
    """cifar.py's own main in this process; `drive` hands out its loader's windows, and times them.

    All that is not the script's: where the images come from, the model, and that `drive` stands
    between WindowLoader and the loop. It ends the run by handing out no more.
    """
    windows, (rank, size) = WindowLoader.__iter__, world()
    flags = {"global_batch_size": MICRO_BATCH * size, **flags}
    flags = {"lr": LEARNING_RATE, "lr_reference_batch": 0, **flags}
    config = cifar.Config(
        output_dir=str(directory),
        tracker="none",
        epochs=NEVER,
        eval_every=NEVER,
        save_every=NEVER,
        hang_timeout=0.0,  # it may wait for others' turns
        **flags,
    )
    directory.mkdir(parents=True, exist_ok=True)
    console = directory / f"console_{rank}.txt"
    with (
        patch.object(cifar, "load_small_images", lambda *args, **kwargs: data),
        patch.object(cifar, "build_model", model),
        patch.object(WindowLoader, "__iter__", lambda loader: drive(windows(loader))),
        console.open("w") as file,
        redirect_stdout(file),
    ):
        cifar.main(config)


def train_ours_in_blocks(pace: "Pace", data: ImageData, directory: Path, **flags) -> None:
    """cifar.py as a member of a Group."""

    def drive(windows: Iterator[Window]) -> Iterator[Window]:
        while True:
            pace()
            yield next(windows)

    train_ours(data, directory, drive, **flags)


class Pace:
    """Called before each update: times blocks of updates, and waits between them for the next."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.left = 0
        self.start: float | None = None

    def __call__(self) -> None:
        if self.left == 0:
            if self.start is not None:
                self.connection.send(time.perf_counter() - self.start)
            self.left = self.connection.recv()
            self.start = time.perf_counter()
        self.left -= 1


class Group:
    """Processes that train, a block of updates at a time; idle and asleep in between.

    Args:
        function: of the top of a file; called as function(pace, *args) in `size` processes, with
            torchrun's variables set, it trains without end and calls pace() before each update.
    """

    def __init__(self, size: int, function: Callable[..., None], *args):
        context, port = multiprocessing.get_context("spawn"), free_port()
        self.members = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            target_args = theirs, rank, size, port, function, args
            process = context.Process(target=_train_in_blocks, args=target_args)  # has workers
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def run(self, updates: int) -> float:
        """Seconds of the next `updates`; of the slowest process."""
        for _, connection in self.members:
            connection.send(updates)
        return max(self._receive(connection) for _, connection in self.members)

    def _receive(self, connection: Connection) -> float:
        if not connection.poll(BLOCK_SECONDS):
            raise TimeoutError(f"no answer in {BLOCK_SECONDS:.0f} s")
        return connection.recv()

    def close(self) -> None:
        for process, _ in reversed(self.members):  # rank 0 keeps the others' store
            process.kill()
        for process, connection in self.members:
            process.join()
            connection.close()


def race(
    entries: Sequence[tuple[int, Callable[..., None], tuple]],
    rounds: int,
    updates: int,
    untimed: int = 1,
) -> list[list[float]]:
    """Seconds of blocks of `updates`, for each entry, in rounds in which each has its turn.

    Args:
        entries: (processes, function, args), as for Group; function(pace, *args, directory).
        untimed: updates before each block.
    """
    groups: list[Group] = []
    seconds: list[list[float]] = [[] for _ in entries]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        try:
            for number, (size, function, args) in enumerate(entries):
                groups.append(Group(size, function, *args, Path(directory, str(number))))
                groups[-1].run(3)  # imports, compilation: one after the other
            for round_ in range(rounds):
                for turn in range(len(groups)):
                    number = (round_ + turn) % len(groups)  # another one first in each round
                    groups[number].run(untimed)
                    seconds[number].append(groups[number].run(updates))
        finally:
            for group in groups:
                group.close()
    return seconds


def _train_in_blocks(connection, rank: int, size: int, port: int, function, args) -> None:
    multiprocessing.set_start_method(LOADER_START, force=True)  # not this process's own
    values = rank, rank, size, size, "127.0.0.1", port
    os.environ.update({name: str(value) for name, value in zip(TORCHRUN, values, strict=True)})
    function(Pace(connection), *args)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and a bootstrap's 95% interval of it."""
    random = numpy.random.default_rng(0)
    medians = numpy.median(random.choice(values, (10_000, len(values))), axis=1)
    low, high = numpy.percentile(medians, [2.5, 97.5])
    return float(numpy.median(values)), float(low), float(high)


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    load = f", load {os.getloadavg()[0]:.1f} before" if hasattr(os, "getloadavg") else ""
    return f"torch {torch.__version__}, {cores()} cores{load}"
