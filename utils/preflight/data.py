"""The checks of the samples: who gets which, what is in them, and their random numbers."""

import copy
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor

from utils.preflight.job import FAIL, PASS, Finding, Job, Steps, read_samples
from utils.preflight.runner import name_ranks
from utils.preflight.state import checksum, generator_states, set_generator_states
from utils.window import Batch, to_device

MAX_SAMPLES = 1 << 20  # of an epoch, looked at
PROBES = 16  # samples whose content is compared between the ranks
READ_SECONDS = 5.0  # for reading samples ahead, to look at labels and pixels
ORDER_REMEDY = (
    "shard once, by MicroBatchSampler(order, plan, accelerator.process_index, total_steps), and "
    "keep the loader out of accelerator.prepare"
)


# ---- Who gets which --------------------------------------------------------------------------


def data(job: Job) -> Steps:
    """The ranks' samples disjoint, complete, reshuffled; the same content; good labels, pixels."""
    first, second = _epoch_ids(job, 0), _epoch_ids(job, 1)
    everyone = yield (len(job.sampler), first, second)
    finding = judge_order(everyone, _expected(job))
    if finding.result != PASS:
        return finding
    generators = generator_states()
    everyone = yield _content(job)
    finding = _judge_content(everyone)
    if finding is None:
        everyone = yield _read_ahead(job, READ_SECONDS)
        finding = _judge_values(everyone)
    set_generator_states(generators)
    if finding is not None:
        return finding
    looked_at = sum(facts["samples"] for facts in everyone)
    counts = f"{first.numel():,} samples a rank and epoch"
    return Finding(PASS, f"{counts}, disjoint, reshuffled; {looked_at:,} samples looked at")


def data_at_start(job: Job) -> Steps:
    """The cheap part: counts, the first window's samples and labels, the same content."""
    plan = job.plan
    sampler = copy.copy(job.sampler)
    sampler.start_step = min(sampler.start_step, sampler.total_steps - 1)
    batches = iter(sampler)
    ids = [next(batches) for _ in range(plan.accumulation)]
    generators = generator_states()
    facts = _look_at(job, [read_samples(job.train_loader.loader, own) for own in ids])
    content = _content(job)
    set_generator_states(generators)
    everyone = yield (len(job.sampler), torch.tensor(ids).flatten(), content, facts)
    window = [(count, ids, ids[:0]) for count, ids, _, _ in everyone]
    finding = judge_order(window, plan.global_batch_size)
    if finding.result == PASS:
        finding = _judge_content([content for _, _, content, _ in everyone]) or finding
    if finding.result == PASS:
        finding = _judge_values([facts for _, _, _, facts in everyone]) or finding
    return finding


def _epoch_ids(job: Job, epoch: int) -> Tensor:
    """This rank's sample ids of an epoch (of its first MAX_SAMPLES)."""
    sampler = copy.copy(job.sampler)
    per_epoch = sampler.steps_per_epoch
    steps = min(per_epoch, max(1, MAX_SAMPLES // sampler.plan.global_batch_size))
    sampler.start_step = epoch * per_epoch
    sampler.total_steps = sampler.start_step + steps
    return torch.tensor(list(sampler), dtype=torch.int64).flatten()


def _expected(job: Job) -> int:
    """Different samples in an epoch (or its part looked at), over all ranks."""
    dataset: Any = job.train_loader.loader.dataset
    size = job.plan.global_batch_size
    return size * min(len(dataset) // size, max(1, MAX_SAMPLES // size))


def judge_order(everyone: list[tuple[int, Tensor, Tensor]], expected: int) -> Finding:
    """From each rank's number of micro-batches and its ids of two epochs (or of a window)."""
    counts = [count for count, _, _ in everyone]
    if len(set(counts)) > 1 or len({len(ids) for _, ids, _ in everyone}) > 1:
        return Finding(
            FAIL,
            f"the ranks have {min(counts)} to {max(counts)} micro-batches: the one with fewer "
            "ends first, and the others wait for it",
            "give all ranks the same number of micro-batches: " + ORDER_REMEDY,
        )
    for _, ids, later in everyone:
        if len(ids) and torch.equal(ids, later):
            return Finding(
                FAIL,
                "the next epoch has the same samples in the same order",
                "the order must depend on the epoch: SampleOrder does (a sampler of your own: "
                "set_epoch)",
            )
    taken: dict[int, int] = {}
    for rank, (_, ids, _) in enumerate(everyone):
        for sample in ids.unique().tolist():
            if sample in taken:
                return Finding(
                    FAIL,
                    f"rank {rank} gets sample {sample} too, which rank {taken[sample]} has",
                    "each rank needs samples of its own: " + ORDER_REMEDY,
                )
            taken[sample] = rank
    drawn = sum(len(ids) for _, ids, _ in everyone)
    if len(taken) != drawn:
        return Finding(
            FAIL, f"{drawn - len(taken)} samples come twice within an epoch", ORDER_REMEDY
        )
    if len(taken) != expected:
        return Finding(
            FAIL,
            f"an epoch has {len(taken)} samples of the data set, {expected} would fill its updates",
            "the order is not complete: build SampleOrder with len(train_set)",
        )
    return Finding(PASS, f"{drawn} samples, disjoint")


# ---- What is in them -------------------------------------------------------------------------


def _content(job: Job) -> dict[int, str]:
    """Checksums of a few samples, read by this process."""
    dataset: Any = job.train_loader.loader.dataset
    ids = sorted({i * (len(dataset) - 1) // (PROBES - 1) for i in range(PROBES)})
    state = generator_states()
    found = {}
    for sample in ids:
        torch.manual_seed(0)  # what a data set draws is not its content
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        batch = read_samples(job.train_loader.loader, [sample])
        found[sample] = "".join(checksum(value) for value in batch.values())
    set_generator_states(state)
    return found


def _judge_content(everyone: list[dict[int, str]]) -> Finding | None:
    for rank, found in enumerate(everyone):
        if found != everyone[0]:
            other = next(i for i in everyone[0] if found.get(i) != everyone[0][i])
            return Finding(
                FAIL,
                f"sample {other} has another content on rank {rank} than on rank 0",
                "the machines hold other files: copy the data anew, and compare checksums",
            )
    return None


def _read_ahead(job: Job, seconds: float) -> dict[str, Any]:
    """This rank's samples of the first epoch, until the time is over."""
    facts: dict[str, Any] = {"samples": 0}
    end = time.perf_counter() + seconds
    sampler = copy.copy(job.sampler)
    sampler.start_step = 0
    sampler.total_steps = min(sampler.steps_per_epoch, job.total_steps)
    for ids in sampler:
        found = _look_at(job, [read_samples(job.train_loader.loader, ids)])
        facts = {**facts, **found, "samples": facts["samples"] + len(ids)}
        if len(found) > 1 or time.perf_counter() > end:
            break
    return facts


def _look_at(job: Job, batches: list[Batch]) -> dict[str, Any]:
    """What is wrong with these batches: labels outside the classes, values that are not finite."""
    facts: dict[str, Any] = {"samples": sum(len(batch["id"]) for batch in batches)}
    for batch in batches:
        labels = batch.get(job.label)
        if labels is not None and job.num_classes:
            labels = labels[labels != job.ignore_index]
            bad = labels[(labels < 0) | (labels >= job.num_classes)]
            if len(bad):
                facts["label"] = f"label {int(bad[0])} of {job.num_classes} classes"
        batch = job.train_loader.transform(to_device(batch, job.device), 0)
        for key, value in batch.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                facts["value"] = f"values in batch[{key!r}] that are not finite"
    return facts


def _judge_values(everyone: list[dict[str, Any]]) -> Finding | None:
    remedies = {
        "label": "labels must be 0 to classes - 1 (from 1 on? minus one), the ignored ones "
        "ignore_index; change the data, or the number of classes",
        "value": "look at these samples, and at the normalisation: a standard deviation of 0?",
    }
    for kind, remedy in remedies.items():
        ranks = [rank for rank, facts in enumerate(everyone) if kind in facts]
        if ranks:
            return Finding(FAIL, f"{name_ranks(ranks)}: {everyone[ranks[0]][kind]}", remedy)
    return None
