"""cifar.py on small made-up data with a fault in it, as real processes that may be killed.
With --dataset: on those data.

As a script it takes cifar.py's flags and is started by launchers; `Job` starts processes that are
forked from one which has imported everything already, so that tests may start many.

The fault is named in the environment, FAULT=name:argument:...; see the functions `fault_...`.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tyro

from tests.pool import free_port
from tests.scripts import small_cifar, small_data
from utils.errors import exit_with
from utils.marks import latest

SCRIPT = Path(__file__)
NUM_TRAIN, NUM_TEST, GLOBAL_BATCH = 75, 37, 16
EPOCH_STEPS = NUM_TRAIN // GLOBAL_BATCH
FOREVER = 1000.0
PACE = "pace:0.1"  # seconds an update


# ---- Faults ----------------------------------------------------------------------------------


def my_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def in_loop(step: int | str = 0) -> bool:
    """Whether the guarded loop runs, at this update if one is given: not a check before it."""
    guarded = any(thread.name == "guard" for thread in threading.enumerate())
    return guarded and (not step or latest().step == int(step))


def before(cifar, name: str, action) -> None:
    """Call action(number of the call, from 1; arguments) before each call of cifar.<name>."""
    original, calls = getattr(cifar, name), [0]

    def replaced(*args, **kwargs):
        calls[0] += 1
        action(calls[0], *args)
        return original(*args, **kwargs)

    setattr(cifar, name, replaced)


def fault_nan(cifar, *ids: str) -> None:
    """These samples have pixels that are no numbers."""
    original, bad = cifar.Tensors.__getitems__, [int(i) for i in ids]

    def getitems(self, wanted):
        batch = original(self, wanted)
        batch["image"] = batch["image"].double()
        batch["image"][torch.isin(batch["id"], torch.tensor(bad))] = float("nan")
        return batch

    cifar.Tensors.__getitems__ = getitems


def fault_inf_gradient(cifar, rank: str, step: str) -> None:
    """The loss is finite, its gradient is not."""
    original = cifar.compute_loss

    def compute_loss(model, batch, *args, **kwargs):
        loss, logits = original(model, batch, *args, **kwargs)
        if my_rank() == int(rank) and model.training and in_loop(step):
            loss = loss + 0 * (0 * logits.sum()).sqrt()  # the derivative of the root at 0
        return loss, logits

    cifar.compute_loss = compute_loss


def in_training(cifar, rank: str, step: str, action) -> None:
    """On this rank, before the forward pass of an update."""

    def count(_, model, batch, *args):
        if my_rank() == int(rank) and model.training and in_loop(step):
            action()

    before(cifar, "compute_loss", count)


def fault_raise(cifar, rank: str, step: str) -> None:
    def fail():
        raise ZeroDivisionError("one rank fails")

    in_training(cifar, rank, step, fail)


def fault_kill(cifar, rank: str, step: str, once: str = "") -> None:
    def kill():
        if not once or not Path(once).exists():
            if once:
                Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    in_training(cifar, rank, step, kill)


def fault_out_of_memory(cifar, rank: str, step: str) -> None:
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    ranks = rank.split("+")
    if str(my_rank()) in ranks:
        in_training(cifar, str(my_rank()), step, fail)


def fault_stuck_data(cifar, rank: str, step: str) -> None:
    """The data set of one rank never returns."""
    original = cifar.Tensors.__getitems__

    def getitems(self, wanted):
        if my_rank() == int(rank) and in_loop(step):
            time.sleep(FOREVER)
        return original(self, wanted)

    cifar.Tensors.__getitems__ = getitems


def fault_leave_early(cifar, rank: str, step: str) -> None:
    """One rank's loop is shorter than the others'."""
    original = cifar.WindowLoader.__iter__

    def iterate(self):
        for window in original(self):
            if my_rank() == int(rank) and in_loop(step):
                time.sleep(FOREVER)  # what comes after its loop
            yield window

    cifar.WindowLoader.__iter__ = iterate


def fault_slow(cifar, seconds: str, *where: str) -> None:
    """First forward, evaluation and save last this long each; where = its rank and part, or all."""
    rank, part = where if where else (str(my_rank()), "")

    def sleep(duration: float, this: str) -> None:
        if str(my_rank()) == rank and part in ("", this):
            time.sleep(duration)

    calls = [0]

    def loss(_, model, batch, *args):
        calls[0] += model.training and in_loop()
        if model.training and in_loop() and calls[0] == 1:
            sleep(float(seconds), "compile")
        elif not model.training:
            sleep(float(seconds) / 5, "evaluation")  # 5 batches or more

    before(cifar, "compute_loss", loss)
    fsync = os.fsync

    def slow_fsync(descriptor):
        if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
            sleep(float(seconds) / 5, "save")  # three files and two folders
        fsync(descriptor)

    os.fsync = slow_fsync


def fault_pause_in_evaluation(cifar, marker: str, seconds: str) -> None:
    """Adds a byte to a file for every batch of an evaluation, and takes its time in it."""

    def loss(_, model, batch, *args):
        if not model.training and in_loop():
            with Path(marker).open("a") as file:
                file.write(".")
            time.sleep(float(seconds))

    before(cifar, "compute_loss", loss)


def fault_pace(cifar, seconds: str, until: str = "") -> None:
    """Every update takes at least this long: a signal from outside meets its middle.

    Until there is a file of this name.
    """

    def wait(_, model, *args):
        if not until or not Path(until).exists():
            time.sleep(float(seconds))

    before(cifar, "compute_loss", wait)


# ---- One process -----------------------------------------------------------------------------


def main() -> int:
    if hasattr(os, "sched_setaffinity"):  # threads that spin would starve the other processes
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[my_rank() % len(cores)]})
    made_up = None if "--dataset" in sys.argv else small_data(NUM_TRAIN, NUM_TEST)
    with small_cifar(made_up) as cifar:
        for fault in os.environ.get("FAULT", "").split(","):
            name, *arguments = fault.split(":")
            if name:
                globals()[f"fault_{name}"](cifar, *arguments)
        return cifar.main(tyro.cli(cifar.Config))


def flags(directory: Path, **changes) -> list[str]:
    """cifar.py's flags for a small run in `directory`."""
    values = dict(
        output_dir=directory,
        global_batch_size=GLOBAL_BATCH,
        bn_group=8,
        epochs=2,
        lr=0.02,
        lr_reference_batch=0,
        tracker="none",
    )
    pairs = (values | changes).items()
    return [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", str(value))]


def _run(rank: int, size: int, port: int, arguments: list[str], environment: dict, log: str):
    multiprocessing.set_start_method("fork", force=True)  # not the parent's, for loaders
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", **environment)
    if size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    sys.argv = [str(SCRIPT), *arguments]
    torch.set_num_threads(1)
    exit_with(main)


class Job:
    """The processes of one run, as a launcher would have started them."""

    def __init__(self, size: int, directory: Path, fault: str = "", environment=None, **changes):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train.cifar", "tests.faults.job", "sklearn.datasets"])
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory, self.size = directory, size
        self.log = directory.with_name(f"{directory.name}.log")
        environment = {"FAULT": fault, **(environment or {})}
        port = free_port()
        self.processes = [
            context.Process(
                target=_run,
                args=(rank, size, port, flags(directory, **changes), environment, str(self.log)),
            )
            for rank in range(size)
        ]
        self.started = time.monotonic()
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 100.0) -> list[int | None]:
        """The exit codes; who is still there after `seconds` is killed and has -9."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())


def wait_for(condition, seconds: float = 100.0, what: str = "") -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what or condition} after {seconds} s"
        time.sleep(0.02)


def steps_in(directory: Path) -> int:
    """Lines in metrics.jsonl so far."""
    path = directory / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    exit_with(main)
