"""Open the Accelerator honestly: the device, the world and the precision that were asked for.

Accelerate goes on in silence with another world than the launcher was asked for in several cases:
one process where two were wanted, two processes that each believe to be alone and write the same
files, plain DDP instead of a sharded engine, float32 instead of fp16. Each of them ends here with
the reason and the command that works.
"""

import ctypes
import importlib.util
import os
import platform
import shutil
import socket
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    get_int_from_env,
    parse_flag_from_env,
)

from utils.console import open_log
from utils.distributed import collective_timeout
from utils.engines import (
    CPU_LAUNCH,
    GPU_LAUNCH,
    check_engine,
    check_launched_engine,
    check_sharded,
    engine_name,
    fsdp_plugin,
    set_timeouts,
    uses_fsdp,
    uses_zero,
)
from utils.errors import UsageError
from utils.meeting import meeting_place
from utils.order import hash64
from utils.zero import ZeroAccelerator

MOST_WORKERS = 8
# PowerSGD (Vogels et al. 2019, arxiv.org/abs/1905.13727): an n x m gradient is sent as n x RANK and
# m x RANK numbers where that is less than half, and what it leaves out is added to the next one.
# Before update START, the steepest part of the training, gradients are sent whole.
POWERSGD_RANK, POWERSGD_START = 8, 100
# Its sums follow one another in threads of gloo, where those of two buckets may overtake each other
# on one rank and not on the next: on a CPU all gradients are one bucket (MiB, more than there are).
ONE_BUCKET = 1 << 20
# How many processes were started, says torchrun or one of three kinds of MPI.
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def open_accelerator(
    *,
    find_unused_parameters: bool = False,
    comm_hook: str = "none",
    hang_timeout: float = 0.0,
    can_shard: bool = False,
    max_grad_norm: float = 0.0,
) -> Accelerator:
    """The Accelerator of this process, its world checked and its threads set.

    Args:
        find_unused_parameters: passed to DistributedDataParallel.
        comm_hook: how DistributedDataParallel sends gradients: "none", "bf16", "fp16", "powersgd".
        hang_timeout: seconds (utils/guard.py); collectives give up well after it only.
        can_shard: whether the script enters every forward pass with all processes, as a model must
            be of which each holds a part: as often in evaluation, and nowhere on the main one only.
        max_grad_norm: what the script clips the gradient to, for DeepSpeed, which does it itself.

    Raises UsageError when the processes, devices, engine or precision are not those that the
    launcher was asked for. The number of accumulation steps is set by the script, when known.
    """
    open_log(None)  # what is said until the run has a directory is held for its log
    on_cpu = _cpu_chosen() or not torch.accelerator.is_available()
    asked = processes_asked_for()  # read before Accelerate overwrites it
    _check_devices(on_cpu)
    _check_launcher(on_cpu, asked)
    hook = {"none": "no", "powersgd": "power_sgd"}.get(comm_hook, comm_hook)
    low_rank = {
        "matrix_approximation_rank": POWERSGD_RANK,
        "start_powerSGD_iter": POWERSGD_START,
        "orthogonalization_epsilon": 1e-8,  # a gradient may be zero
    }
    kind: Any = partial(Accelerator, fsdp_plugin=fsdp_plugin())
    if uses_zero():
        kind = partial(ZeroAccelerator, max_grad_norm)
    accelerator: Accelerator = kind(
        cpu=on_cpu,  # without it, CPU processes started by torchrun never find each other
        # Whole windows are fetched ahead of the steps, so the loader's end says nothing here.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1,
            sync_with_dataloader=False,
            # Until they are summed FSDP keeps gradients whole: for memory, sum in each micro-step.
            sync_each_batch=uses_fsdp(),
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,  # saves one copy of the gradients
                find_unused_parameters=find_unused_parameters,
                comm_hook=DDPCommunicationHookType(hook),
                comm_state_option=low_rank if comm_hook == "powersgd" else {},
                bucket_cap_mb=ONE_BUCKET if comm_hook == "powersgd" and on_cpu else 25,
            ),
            InitProcessGroupKwargs(
                init_method=meeting_place(),
                timeout=collective_timeout(timedelta(seconds=6 * hang_timeout)),
            ),
        ],
    )
    check_world(accelerator, asked, on_cpu)
    _spare_searches()
    if engine_name(accelerator) != "DDP":
        check_sharded(accelerator.mixed_precision, can_shard=can_shard, comm_hook=comm_hook)
        set_timeouts(accelerator, collective_timeout())
    if comm_hook == "powersgd" and accelerator.mixed_precision == "fp16":
        raise UsageError(
            "--comm-hook powersgd keeps what it has not sent yet: an overflow of fp16 would stay "
            "there; use --mixed_precision bf16, or --comm-hook fp16"
        )
    if on_cpu:
        _share_cores()
        keep_freed_memory()
    elif torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32, as convolutions have it by default
    return accelerator


def processes_asked_for() -> int:
    """How many processes the launcher has started, over all machines.

    `srun python SCRIPT` has only the number of tasks.
    """
    return get_int_from_env((*WORLD_SIZES, "SLURM_STEP_NUM_TASKS"), 1)


def check_world(accelerator: Accelerator, asked: int, on_cpu: bool) -> None:
    """Refuse another engine or number of processes (`asked`) than the launcher's."""
    found = accelerator.num_processes
    check_engine(accelerator.distributed_type)
    if asked != found:
        raise UsageError(
            f"{asked} processes were started, but each of them sees {found}: "
            f"they would train {asked} separate models into the same files; start one launcher a "
            f"machine: {_right_launch(on_cpu)}"
        )


def check_precision(precision: str, on_cpu: bool) -> None:
    """Refuse a precision that Accelerate accepts and does not give."""
    if on_cpu and precision in ("fp16", "fp8"):
        raise UsageError(
            f"mixed_precision={precision} does not exist on a CPU (it would silently run in "
            "float32); use --mixed_precision bf16 or no"
        )


def seed_dropout(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch's generators for what differs between ranks (dropout), after the model is built.

    Everything that must not differ is built before, under one seed, or comes from utils/order.py.
    """
    torch.manual_seed(int(hash64(torch.tensor(rank), seed, step, 0xD40)))


def local_world_size() -> int:
    """Processes of this job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_process() -> int:
    """Cores of this machine for each process of the job; 0 when there are more processes."""
    has_affinity = hasattr(os, "sched_getaffinity")  # a scheduler may have taken some cores away
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return cores // local_world_size()


def default_workers() -> int:
    """Loader processes for each process where samples take long to read: its cores, at most 8."""
    return min(cores_per_process(), MOST_WORKERS)


def world_line(accelerator: Accelerator) -> str:
    """One line for the console: processes, device, engine, precision."""
    device, count = accelerator.device, accelerator.num_processes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if device.type == "cpu":
        threads = torch.get_num_threads()
        name += "" if _cpu_chosen() else " (no accelerator found)"
        name += f", {threads} thread{'s' if threads > 1 else ''} each"
    engine = engine_name(accelerator)
    name += "" if engine == "DDP" else f" with {engine}"
    tf32 = " (products in TF32)" if torch.get_float32_matmul_precision() == "high" else ""
    return (
        f"{count} process{'es' if count > 1 else ''} on {name}, "
        f"mixed precision {accelerator.mixed_precision}{tf32}, host {socket.gethostname()}"
    )


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next ones.

    It gives large blocks back to the system, which hands them out again page by page, zeroed: in
    each update 10,000 page faults, a tenth of a ResNet-18's time. Other systems stay as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 2**30)  # bytes: larger blocks still go back
    libc.mallopt(trim_threshold, 2**31 - 1)


def _spare_searches() -> None:
    """Keep Accelerate from looking through sys.path, twice in each step, for a rare optimizer.

    Where it is not installed, None in sys.modules says so: what cannot be imported.
    """
    if importlib.util.find_spec("lomo_optim") is None:
        sys.modules["lomo_optim"] = None  # type: ignore[assignment]


def _cpu_chosen() -> bool:
    """--cpu, or all GPUs hidden: accelerate_configs/cpu_2.yaml can say it in no other way."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    return parse_flag_from_env("ACCELERATE_USE_CPU") or visible == "" or visible.startswith("-1")


def _share_cores() -> None:
    """Split the cores between the processes; fewer threads where the user asked for fewer.

    The launchers write OMP_NUM_THREADS=1 for each process: that 1 is nobody's wish. A larger
    number is the user's, or what accelerate took for the number of cores; it is never exceeded.
    """
    share = max(1, cores_per_process())
    threads = torch.get_num_threads()
    launched = any(name in os.environ for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"))
    torch.set_num_threads(share if threads == 1 and launched else min(threads, share))


def _has_nvidia_gpu() -> bool:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    through_windows = os.name == "nt" or Path("/dev/dxg").exists()  # no device files there
    return through_windows and shutil.which("nvidia-smi") is not None


def _check_devices(on_cpu: bool) -> None:
    """Refuse a GPU that this torch cannot use, and more processes than GPUs."""
    if on_cpu and not _cpu_chosen() and _has_nvidia_gpu():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UsageError(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} (built with {built}) "
            f"cannot use it (CUDA_VISIBLE_DEVICES: {visible}); install a CUDA build that fits the "
            "driver (nvidia-smi shows its version), or train on the CPU on purpose: "
            f"`accelerate launch --cpu SCRIPT`, `{CPU_LAUNCH}`, or CUDA_VISIBLE_DEVICES=-1"
        )
    if not on_cpu and local_world_size() > torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise UsageError(
            f"{local_world_size()} processes on this machine, but it has {count} visible "
            f"GPU{'s' if count > 1 else ''}, which ranks would share in silence; use "
            f"--num_processes {count} (times the number of machines), or `{CPU_LAUNCH}`"
        )


def _check_launcher(on_cpu: bool, asked: int) -> None:
    """Refuse what Accelerate accepts from the launcher and then does not do."""
    if on_cpu:
        check_engine(DistributedType.MULTI_CPU)  # DeepSpeed would raise errors of its own
    check_launched_engine(asked)
    check_precision(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), on_cpu)
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto"):
        raise UsageError(
            f"gradient_accumulation_steps={steps} of the launcher would be ignored: the steps "
            "follow from --global-batch-size, --micro-batch-size (examples a process holds at "
            "once) and the number of processes; take it away and set --micro-batch-size"
        )
    if "MASTER_ADDR" in os.environ and not any(name in os.environ for name in WORLD_SIZES):
        raise UsageError(
            "the launcher was asked for several processes (MASTER_ADDR is set) and started one; "
            f"use {_right_launch(on_cpu)}; if MASTER_ADDR is a leftover in your shell, unset it"
        )


def _right_launch(on_cpu: bool) -> str:
    """The commands that start several processes."""
    return f"`{CPU_LAUNCH if on_cpu else GPU_LAUNCH}` or `torchrun --nproc_per_node 2 SCRIPT`"
