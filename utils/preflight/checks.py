"""The checks in their order, and the two ways to run them."""

import hashlib
import os
import socket
import time

from utils.console import say, warn
from utils.distributed import gather_objects, rank
from utils.errors import ERROR, FINISHED, ExplainedError
from utils.preflight.data import data, data_at_start
from utils.preflight.disk import checkpoints, tracker
from utils.preflight.evaluation import evaluation
from utils.preflight.gradient import gradient
from utils.preflight.job import FAIL, WARN, Job
from utils.preflight.memory import memory
from utils.preflight.model import batchnorm, model, unused
from utils.preflight.randomness import random_numbers
from utils.preflight.report import publish, rank_lines
from utils.preflight.runner import Check, Entry, run_checks
from utils.preflight.schedule import schedule
from utils.preflight.speed import network, speed
from utils.preflight.state import fingerprint
from utils.preflight.world import devices, world
from utils.sharding import numel

ALL = (
    Check("world", world),
    Check("devices", devices),
    Check("data", data, needs=("world",)),
    Check("random", random_numbers, needs=("world", "data")),
    Check("model", model, needs=("world",)),
    Check("memory", memory, needs=("world",)),
    Check("unused", unused, needs=("world", "data", "model")),
    Check("batchnorm", batchnorm, needs=("world",)),
    Check(
        "gradient", gradient, needs=("world", "data", "random", "model", "unused", "batchnorm")
    ),
    Check("schedule", schedule, needs=("world",)),
    Check("evaluation", evaluation, needs=("world", "data", "model")),
    Check("network", network, needs=("world",)),
    Check("speed", speed, needs=("world", "data", "model", "unused", "gradient")),
    Check("checkpoint", checkpoints, needs=("world", "model")),
    Check("tracker", tracker, needs=("world",)),
)  # fmt: skip
AT_START = (
    Check("world", world),
    Check("devices", devices),
    Check("data", data_at_start, needs=("world",)),
    Check("model", model, needs=("world",)),
    Check("batchnorm", batchnorm),
    Check("schedule", schedule),
)


def check_all(job: Job) -> int:
    """All checks; prints the report, writes RUN/preflight.json; the exit code of the script."""
    start = time.perf_counter()
    ranks = list(gather_objects(_introduce(job)))
    say(rank_lines(ranks))

    def report(entries: list[Entry]) -> None:
        if rank() == 0:
            publish(job.directory, ranks, entries, time.perf_counter() - start)

    entries = run_checks(job, ALL, report)
    report(entries)
    job.accelerator.end_training()  # closes the process group: left open, it aborts the exit
    return ERROR if any(entry.finding.result == FAIL for entry in entries) else FINISHED


def check_start(job: Job) -> None:
    """The cheap checks, at the start of a run: ExplainedError on a fail, a line for a warning."""
    entries = run_checks(job, AT_START)
    for entry in entries:
        if entry.finding.result == WARN and rank() == 0:
            warn(f"{entry.check}: {entry.finding.seen}; {entry.finding.remedy}")
    failed = [entry for entry in entries if entry.finding.result == FAIL]
    if failed:
        texts = (f"{e.check}: {e.finding.seen}; {e.finding.remedy}" for e in failed)
        raise ExplainedError(" | ".join(texts) + " (--preflight checks everything)")


def _introduce(job: Job) -> dict[str, object]:
    """This process's line of the report."""
    values = "".join((job.built if job.is_sharded else fingerprint(job.plain_model)).values())
    return {
        "rank": rank(),
        "local": int(os.environ.get("LOCAL_RANK", "0")),
        "host": socket.gethostname(),
        "device": str(job.device),
        "samples": job.sampler.steps_per_epoch * job.plan.micro_batch_size * job.plan.accumulation,
        "parameters": sum(numel(p) for p in job.plain_model.parameters()),
        "fingerprint": hashlib.sha256(values.encode()).hexdigest()[:12],
    }
