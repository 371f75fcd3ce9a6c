"""The checks of the processes: every one sees the same world, and has a device of its own."""

import hashlib
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
from accelerate.utils import get_int_from_env

from utils.distributed import world_size
from utils.preflight.job import FAIL, PASS, WARN, Finding, Job, Steps
from utils.preflight.runner import name_ranks
from utils.start import WORLD_SIZES, check_precision, check_world, local_world_size

MIN_FREE_SHARE = 0.1  # of a device's memory


def world(job: Job) -> Steps:
    """Ranks complete; engine, precision, code, versions and flags the same everywhere."""
    found, on_cpu = job.accelerator.num_processes, job.device.type == "cpu"
    asked = get_int_from_env(WORLD_SIZES, found)
    check_world(job.accelerator, asked, on_cpu)  # they raise, with the remedy
    check_precision(job.accelerator.mixed_precision, on_cpu)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
    everyone = yield {
        "rank": job.accelerator.process_index,
        "world": found,
        "engine": job.accelerator.distributed_type.value,
        "precision": job.accelerator.mixed_precision,
        "code": _code_fingerprint(job),
        **{f"version of {name}": version for name, version in versions.items()},
        **{f"flag --{k.replace('_', '-')}": repr(v) for k, v in job.flags.items()},
    }
    ranks = [answer.pop("rank") for answer in everyone]
    if ranks != list(range(world_size())):
        return Finding(FAIL, f"the ranks are {ranks}", "start one launcher a machine")
    for key in everyone[0]:
        odd = [r for r, answer in enumerate(everyone) if answer.get(key) != everyone[0][key]]
        if odd:
            ours, theirs = everyone[0][key], everyone[odd[0]].get(key)
            return Finding(
                FAIL,
                f"{key}: {theirs} on {name_ranks(odd)}, {ours} on rank 0",
                f"make the {key.split()[0]} the same on all machines: start all processes from "
                "one checkout, one environment and one command",
            )
    size, engine = everyone[0]["world"], everyone[0]["engine"]
    return Finding(PASS, f"{size} of {size} ranks, engine {engine}, same code and flags")


def _code_fingerprint(job: Job) -> str:
    """Of the script (where `update` is written) and of utils."""
    code = getattr(job.update, "__code__", None)
    script = Path(code.co_filename if code else sys.argv[0])
    content = hashlib.sha256(script.read_bytes() if script.is_file() else b"")
    for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


def devices(job: Job) -> Steps:
    """One device a rank, in range, none shared; free memory; balance."""
    everyone = yield _device_facts(job)
    return judge_devices(everyone)


def _device_facts(job: Job) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "device": str(job.device),
        "parameters_on": sorted({str(p.device) for p in job.plain_model.parameters()}),
        "elsewhere": [],
        "threads": torch.get_num_threads() * local_world_size(),
        "cores": os.cpu_count() or 1,
    }
    if job.device.type == "cuda":
        own = torch.cuda.current_device() if job.device.index is None else job.device.index
        count = torch.cuda.device_count()
        facts |= {"index": own, "count": count}
        if own < count:
            free, total = torch.cuda.mem_get_info(own)
            facts |= {"free": free, "total": total, "name": torch.cuda.get_device_name(own)}
            facts["uuid"] = str(torch.cuda.get_device_properties(own).uuid)
        facts["elsewhere"] = [
            i for i in range(count) if i != own and torch.cuda.memory_allocated(i) > 0
        ]
    else:
        memory = psutil.virtual_memory()
        facts |= {"free": memory.available, "total": memory.total, "name": job.device.type}
    return facts


def judge_devices(everyone: list[dict[str, Any]]) -> Finding:
    """From each rank's facts (see _device_facts)."""
    holders: dict[tuple, list[int]] = {}
    for rank, facts in enumerate(everyone):
        if "index" in facts and facts["index"] >= facts["count"]:
            return Finding(
                FAIL,
                f"rank {rank} wants {facts['device']}, {facts['host']} has {facts['count']}: "
                "invalid device ordinal",
                "start at most as many processes a machine as it has visible GPUs "
                "(--num_processes, CUDA_VISIBLE_DEVICES)",
            )
        strays = [where for where in facts["parameters_on"] if not _same(where, facts["device"])]
        if strays:
            return Finding(
                FAIL,
                f"rank {rank} runs on {facts['device']} and has parameters on {strays[0]}",
                "move nothing by hand (`.cuda()`, `cuda:0`): accelerator.prepare and "
                "accelerator.device do it",
            )
        if facts["elsewhere"]:
            return Finding(
                FAIL,
                f"rank {rank} runs on {facts['device']} and holds memory on GPU "
                f"{facts['elsewhere'][0]} too",
                "use accelerator.device instead of `cuda` or `cuda:0`, and map_location='cpu' in "
                "torch.load",
            )
        if facts.get("uuid"):
            holders.setdefault((facts["host"], facts["uuid"]), []).append(rank)
    for (host, _), ranks in holders.items():
        if len(ranks) > 1:
            return Finding(
                FAIL,
                f"{name_ranks(ranks)} share one GPU of {host} ({everyone[ranks[0]]['device']})",
                "one process a GPU: --num_processes at most the number of GPUs, and "
                "CUDA_VISIBLE_DEVICES not cut to one",
            )
    names = sorted({facts["name"] for facts in everyone})
    shares = [facts["free"] / facts["total"] for facts in everyone]
    seen = f"{len(everyone)} x {' and '.join(names)}, at least {min(shares):.0%} of memory free"
    if min(shares) < MIN_FREE_SHARE:
        low = shares.index(min(shares))
        return Finding(WARN, f"{seen} (rank {low})", "another program holds it: nvidia-smi, top")
    if len(names) > 1:
        return Finding(WARN, seen, "the slowest device sets the pace of all")
    return Finding(PASS, seen)


def _same(device: str, other: str) -> bool:
    """cpu is cpu:0, mps is mps:0; the GPUs of CUDA differ."""
    (kind, _, index), (other_kind, _, other_index) = device.partition(":"), other.partition(":")
    return kind == other_kind and (kind != "cuda" or (index or "0") == (other_index or "0"))
