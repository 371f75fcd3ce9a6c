"""Open the Accelerator honestly: the device, the world and the precision that were asked for.

Accelerate goes on in silence with another world than the launcher was asked for in several cases:
one process where two were wanted, two processes that each believe to be alone and write the same
files, plain DDP instead of a sharded engine, float32 instead of fp16. Each of them ends here with
the reason and the command that works.
"""

import os
import shutil
import socket
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)

from utils.errors import UsageError
from utils.order import hash64

CPU_LAUNCH = "accelerate launch --config_file accelerate_configs/cpu_2.yaml SCRIPT"
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # outlasts a download by rank 0 while the others wait


def open_accelerator(
    *, find_unused_parameters: bool = False, comm_hook: str = "none"
) -> Accelerator:
    """The Accelerator of this process, its world checked and its threads set.

    Args:
        find_unused_parameters: passed to DistributedDataParallel.
        comm_hook: "none", "bf16" or "fp16": how DistributedDataParallel sends gradients.

    Raises UsageError when the processes, devices, engine or precision are not those that the
    launcher was asked for. The number of accumulation steps is set by the script, when known.
    """
    on_cpu = _flag("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if not _flag("ACCELERATE_USE_CPU"):
        _check_devices()
    if on_cpu and os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        raise UsageError(
            "mixed_precision=fp16 does not exist on a CPU (it would silently run in float32); "
            "use --mixed_precision bf16 or no"
        )
    _check_rendezvous()
    hook = {"none": "no", "bf16": "bf16", "fp16": "fp16"}[comm_hook]
    accelerator = Accelerator(
        cpu=on_cpu,  # without it, CPU processes started by torchrun never find each other
        # Whole windows are fetched ahead of the steps, so the loader's end says nothing here.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,  # saves one copy of the gradients
                find_unused_parameters=find_unused_parameters,
                comm_hook=DDPCommunicationHookType(hook),
            ),
            InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
        ],
    )
    _check_world(accelerator)
    if accelerator.device.type == "cpu":
        # The launchers set one thread a process, or none; the cores are there to be used.
        torch.set_num_threads(max(1, _available_cores() // local_world_size()))
    return accelerator


def seed_dropout(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch's generators for what differs between ranks (dropout), after the model is built.

    Everything that must not differ is built before, under one seed, or comes from utils/order.py.
    """
    torch.manual_seed(int(hash64(torch.tensor(rank), seed, step, 0xD40)))


def local_world_size() -> int:
    """Processes of this job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_line(accelerator: Accelerator) -> str:
    """One line for the console: processes, device, precision."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = f", {torch.get_num_threads()} threads each" if device.type == "cpu" else ""
    plural = "es" if accelerator.num_processes > 1 else ""
    return (
        f"{accelerator.num_processes} process{plural} on {name}{threads}, "
        f"mixed precision {accelerator.mixed_precision}, host {socket.gethostname()}"
    )


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # a container or a scheduler may have taken some away
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_devices() -> None:
    """Refuse a GPU that this torch cannot use, and more processes than GPUs."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_nvidia = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if has_nvidia and not hidden and not torch.accelerator.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise UsageError(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} (built with {built}) "
            "cannot use it; install a CUDA build that fits the driver (nvidia-smi shows its "
            "version), or launch with --cpu to train on the CPU on purpose"
        )
    if torch.cuda.is_available() and local_world_size() > torch.cuda.device_count():
        raise UsageError(
            f"{local_world_size()} processes on this machine, but it has "
            f"{torch.cuda.device_count()} visible GPUs, which ranks would share in silence; "
            f"use --num_processes {torch.cuda.device_count()} (a machine)"
        )


def _check_rendezvous() -> None:
    """Refuse a launch that meant several processes and started one (accelerate --cpu does)."""
    under_mpi = any(name in os.environ for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ and not under_mpi:
        raise UsageError(
            "the launcher was asked for several processes (MASTER_ADDR is set) and started one; "
            f"on a CPU, use `{CPU_LAUNCH}` or `torchrun --nproc_per_node 2 SCRIPT`; if MASTER_ADDR "
            "is a leftover in your shell, unset it"
        )


def _check_world(accelerator: Accelerator) -> None:
    """Refuse strangers, each alone in its world, and an engine other than the one asked for."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked != accelerator.num_processes:
        raise UsageError(
            f"the launcher started {asked} processes, but each of them sees "
            f"{accelerator.num_processes}: they would train {asked} separate models into the same "
            f"files; use `{CPU_LAUNCH}` on a CPU, accelerate_configs/multi_gpu.yaml on GPUs"
        )
    engines = (
        ("ACCELERATE_USE_FSDP", DistributedType.FSDP, "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED, "DeepSpeed"),
    )
    for variable, kind, name in engines:
        if _flag(variable) and accelerator.distributed_type != kind:
            raise UsageError(
                f"{name} was asked for, but Accelerate fell back to "
                f"{accelerator.distributed_type.value} on {accelerator.device.type}; {name} needs "
                f"GPUs here: use `{CPU_LAUNCH}` for plain data parallelism on a CPU"
            )
