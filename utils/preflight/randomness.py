"""The check of the augmentation's random numbers: of each sample and epoch, and repeatable."""

import zlib
from typing import Any

import torch
from torch import Tensor

from utils.distributed import world_size
from utils.order import SampleOrder
from utils.preflight.job import FAIL, PASS, WARN, Finding, Job, Steps, read_samples
from utils.preflight.state import checksum, generator_states, set_generator_states
from utils.window import to_device


def random_numbers(job: Job) -> Steps:
    """Augmentation differs between samples and epochs, between ranks, and is repeatable."""
    generators = generator_states()
    try:
        facts = _random_facts(job)
    finally:
        set_generator_states(generators)
    everyone = yield facts
    return judge_random(everyone)


def _random_facts(job: Job) -> dict[str, Any]:
    """The same content under several ids and epochs, and the generators that moved meanwhile."""
    loader = job.train_loader
    dataset: Any = loader.loader.dataset
    count = min(8, len(dataset))
    ids = SampleOrder(len(dataset), 0).ids(0, 0, count)
    others = SampleOrder(len(dataset), 0).ids(0, len(dataset) - count, len(dataset))

    before = _hashes(generator_states())
    source = read_samples(loader.loader, [int(ids[0])] * count)
    again = read_samples(loader.loader, [int(ids[0])] * count)
    varies = any(not torch.equal(source[key], again[key]) for key in source)
    later = read_samples(loader.loader, job.sampler.indices([int(ids[0])] * count, 1))

    def augmented(own: Tensor, epoch: int) -> list[str]:
        """A checksum for each row: the same sample under these ids, as if it were those."""
        batch = {key: value.clone() for key, value in source.items()}
        for value in batch.values():
            value[:] = value[:1].clone()
        batch["id"] = own.clone()
        done = loader.transform(to_device(batch, job.device), epoch)
        rows = [value for key, value in done.items() if key != "id"]
        return ["".join(checksum(value[i]) for value in rows) for i in range(count)]

    first, repeated = augmented(ids, 0), augmented(ids, 0)
    after = _hashes(generator_states())
    return {
        "repeats": first == repeated and not varies,
        "samples": len(set(first)) > 1,
        "ids": first != augmented(others, 0) or torch.equal(ids, others),
        "epochs": first != augmented(ids, 1),
        "reading": any(not torch.equal(source[key], later[key]) for key in source),
        "drawn": sorted(name for name in before if before[name] != after[name]),
        "states": before,
        "seeds": getattr(loader.loader.generator, "initial_seed", lambda: None)(),
        "workers": loader.loader.num_workers if varies else 0,
    }


def _hashes(states: dict[str, Any]) -> dict[str, int]:
    """Of the generators' states, comparable between processes."""
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in states.items()}
    return {name: zlib.crc32(repr(value).encode()) for name, value in plain.items()}


def judge_random(everyone: list[dict[str, Any]]) -> Finding:
    """From each rank's facts (see _random_facts)."""
    facts = everyone[0]
    if not all(answer["repeats"] for answer in everyone):
        drawn = [name for name in facts["drawn"] if name in facts["states"]]
        same = [n for n in drawn if len({answer["states"][n] for answer in everyone}) == 1]
        in_workers = facts["workers"] and len({answer["seeds"] for answer in everyone}) == 1
        names = " and ".join(drawn) or "a generator"
        if world_size() > 1 and (same or in_workers):
            return Finding(
                FAIL,
                f"the augmentation draws from {names}'s global generator, which has the same "
                "seed on all ranks: all see the same random numbers",
                "hash them from (seed, epoch, id): random_integers and random_uniform of "
                "utils/order.py; at the least seed each rank apart",
            )
        return Finding(
            WARN,
            f"the augmentation draws from {names}'s global generator: it does not repeat after "
            "a resume, or on another number of processes",
            "hash the numbers from (seed, epoch, id): random_integers and random_uniform of "
            "utils/order.py",
        )
    if not facts["samples"] and not facts["epochs"]:
        if facts["reading"]:
            return Finding(PASS, "where samples are read: differs between epochs, repeatable")
        return Finding(PASS, "no random augmentation seen")
    if facts["samples"] and not facts["ids"]:
        return Finding(
            FAIL,
            "the random numbers depend on the place in the batch, not on the sample: they are the "
            "same on all ranks",
            'pass batch["id"] to random_integers and random_uniform',
        )
    if not facts["samples"] and facts["epochs"]:
        return Finding(
            WARN, "all samples of a batch get the same random numbers", 'draw for each batch["id"]'
        )
    if not facts["epochs"]:
        return Finding(
            FAIL,
            "each epoch has the same random numbers: a sample always looks the same",
            "pass the epoch that the transform is called with to random_integers",
        )
    return Finding(PASS, "differs between samples and epochs, repeatable")
