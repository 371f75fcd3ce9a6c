"""The check of the evaluation: exact counts, the same result everywhere, nothing trained by it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from utils.preflight.job import FAIL, PASS, Finding, Job, Steps, read_samples
from utils.preflight.state import fingerprint, restored


def evaluation(job: Job) -> Steps:
    """`evaluate` with the real loader; the model itself runs once for each shape of input."""
    with restored(job):
        before = {} if job.is_sharded else fingerprint(job.plain_model)
        with _watched(job) as seen:
            result = job.evaluate()
        facts: dict[str, Any] = {
            **seen,
            "result": dict(result) if result else {},
            "changed": {} if job.is_sharded else _changed(before, fingerprint(job.plain_model)),
            "graph": any(getattr(v, "requires_grad", False) for v in (result or {}).values()),
            "left_training": job.plain_model.training,
            "count": _count(job),
        }
    everyone = yield facts
    return judge_evaluation(everyone, job.count_key)


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def _count(job: Job) -> int:
    """Labelled elements in this process's part of the test set, cut in another way."""
    dataset: Any = job.test_loader.dataset
    size, rank = job.plan.num_processes, job.accelerator.process_index
    own = range(rank * len(dataset) // size, (rank + 1) * len(dataset) // size)
    batch_size = getattr(job.test_loader.batch_sampler, "batch_size", 1)  # 1: of different sizes
    step = max(1, min(job.plan.micro_batch_size, batch_size))
    parts = [list(own[start : start + step]) for start in range(0, len(own), step)]
    return sum(int(job.count_valid(read_samples(job.test_loader, part))) for part in parts)


@contextmanager
def _watched(job: Job) -> Iterator[dict[str, Any]]:
    """How the model is called; its outputs are kept by the shapes of the inputs, and given again:
    what is checked here does not depend on them, and most of the time is saved."""
    model = job.plain_model
    seen: dict[str, Any] = {"training": False, "grad": False, "calls": 0}
    outputs: dict[Any, Any] = {}
    own = model.__dict__.get("forward")
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen["calls"] += 1
        seen["training"] |= model.training
        seen["grad"] |= torch.is_grad_enabled()
        leaves = _pytree.tree_leaves((args, kwargs))
        shapes = tuple(v.shape if isinstance(v, Tensor) else repr(v) for v in leaves)
        if shapes not in outputs or model.training:
            outputs[shapes] = forward(*args, **kwargs)
        return outputs[shapes]

    if not job.is_sharded:
        model.forward = watched
    try:
        yield seen
    finally:
        if not job.is_sharded:
            del model.forward
            if own is not None:
                model.forward = own


def judge_evaluation(everyone: list[dict[str, Any]], count_key: str) -> Finding:
    """From each rank's facts (see evaluation)."""
    facts = everyone[0]
    expected = sum(answer["count"] for answer in everyone)
    for rank, answer in enumerate(everyone):
        if answer["training"] or answer["changed"]:
            return Finding(
                FAIL,
                f"rank {rank} evaluates in training mode"
                + (f", which changes {answer['changed'][0]}" if answer["changed"] else ""),
                "call model.eval() before the evaluation's loop, and model.train() after it",
            )
        if answer["grad"] or answer["graph"]:
            return Finding(
                FAIL,
                f"rank {rank} evaluates with gradients on: each batch keeps its graph",
                "put @torch.no_grad() (or torch.inference_mode()) over evaluate",
            )
        if not answer["left_training"]:
            return Finding(
                FAIL,
                f"on rank {rank} the model stays in evaluation mode after evaluate",
                "call model.train() at its end",
            )
        if not answer["result"]:
            return Finding(
                FAIL,
                f"rank {rank} has no result",
                "evaluate on all processes, each on its share, and reduce the sums",
            )
    for rank, answer in enumerate(everyone):
        key = next((k for k, v in facts["result"].items() if answer["result"].get(k) != v), None)
        if key and (facts["result"][key] == facts["result"][key]):  # NaN differs from itself
            return Finding(
                FAIL,
                f"{key} is {answer['result'].get(key)} on rank {rank}, {facts['result'][key]} on "
                "rank 0",
                "reduce the sums over all processes (Sums.reduce), then divide: a rank's own "
                "figures are not the set's",
            )
    count = facts["result"].get(count_key)
    if count is None:
        return Finding(FAIL, f"the result has no {count_key}", "return the number of elements")
    if count > expected:
        return Finding(
            FAIL,
            f"{count} elements counted, the set has {expected}",
            "padding or overlapping shards are counted: ShardSampler pads nothing "
            "(DistributedSampler does)",
        )
    if count < expected:
        return Finding(
            FAIL,
            f"{count} elements counted, the set has {expected}",
            "some are left out: no drop_last in the evaluation's loader, and shards that cover "
            "the set",
        )
    calls = sum(answer["calls"] for answer in everyone)
    return Finding(PASS, f"{count} of {expected} elements, {calls} batches, same on all ranks")
