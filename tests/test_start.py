"""utils/start.py: which launches are refused, with which words, and what the others get.

The environment is what the launchers leave (seen in real ones, tests/test_configs.py); machines
with GPUs are simulated, and Accelerate is replaced by a recorder except in the last tests.
"""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from tests.conftest import REPOSITORY
from utils import meeting, start
from utils.errors import UsageError

LAUNCH_VARIABLES = re.compile(
    "ACCELERATE_|FSDP_|PARALLELISM_|PMI_|OMPI_|MV2_|SLURM_|MASTER_|CUDA_VISIBLE|OMP_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
}
SIMPLE = {"ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def clean(monkeypatch):
    """The environment of a process that nothing launched."""
    for name in list(os.environ):
        if LAUNCH_VARIABLES.match(name):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def launch(clean):
    """`launch(environment, gpus, ...)`: what Accelerate was told, on a simulated machine."""

    def launch(
        environment, gpus=0, nvidia=None, world=None, engine=None, threads=1, cores=16, **how
    ):
        for name, value in environment.items():
            clean.setenv(name, value)
        told, chosen = {}, {"threads": threads}

        def accelerator(cpu, **kwargs):
            found = int(environment.get("WORLD_SIZE", "1")) if world is None else world
            kind = DistributedType.NO
            if found > 1:
                kind = DistributedType.MULTI_CPU if cpu else DistributedType.MULTI_GPU
            told.update(kwargs, cpu=cpu)
            return SimpleNamespace(
                num_processes=found,
                distributed_type=engine or kind,
                mixed_precision="bf16",
                parallelism_config=None,
                torch_device_mesh=None,
            )

        clean.setattr(start, "Accelerator", accelerator)
        clean.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
        clean.setattr(torch.accelerator, "device_count", lambda: gpus)
        clean.setattr(start, "_has_nvidia_gpu", lambda: gpus > 0 if nvidia is None else nvidia)
        clean.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        clean.setattr(torch, "get_num_threads", lambda: chosen["threads"])
        clean.setattr(torch, "set_num_threads", lambda count: chosen.update(threads=count))
        start.open_accelerator(**how)
        return told | chosen

    return launch


@pytest.mark.parametrize(
    "environment, gpus, cpu",
    [
        ({}, 0, True),
        (SIMPLE, 0, True),
        (TORCHRUN, 0, True),  # else two strangers
        ({}, 1, False),
        (SIMPLE, 1, False),
        (TORCHRUN, 2, False),
        (SIMPLE | {"ACCELERATE_USE_CPU": "True"}, 1, True),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "-1,-1"}, 1, True),  # cpu_2.yaml, one GPU of Apple's
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": ""}, 0, True),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1"}, 2, False),
        (TORCHRUN | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8, False),  # two machines
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, 0, True),
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "4"}, 0, True),  # a launcher in each task
        (SIMPLE | {"ACCELERATE_MIXED_PRECISION": "bf16"}, 0, True),
        (SIMPLE | {"ACCELERATE_MIXED_PRECISION": "fp16"}, 1, False),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, 0, True),  # every DeepSpeed file has it
        ({"ACCELERATE_USE_FSDP": "false"}, 0, True),
    ],
)
def test_accepted(launch, environment, gpus, cpu):
    told = launch(environment, gpus)
    assert told["cpu"] == cpu
    plugin = told["gradient_accumulation_plugin"]
    assert not plugin.sync_with_dataloader and plugin.num_steps == 1
    assert not plugin.sync_each_batch and told["fsdp_plugin"] is None


@pytest.mark.parametrize(
    "environment, gpus, words",
    [
        # accelerate launch --cpu --num_processes 2, or a MULTI_CPU config
        (SIMPLE | {"MASTER_ADDR": "127.0.0.1"}, 0, "several processes.*started one.*cpu_2.yaml"),
        (SIMPLE | {"MASTER_ADDR": "127.0.0.1"}, 4, "several processes.*multi_gpu.yaml"),
        ({"MASTER_ADDR": "node1"}, 0, "leftover in your shell, unset it"),
        (
            {"MASTER_ADDR": "node1", "SLURM_STEP_NUM_TASKS": "1"},
            0,
            "several processes.*started one",
        ),
        (TORCHRUN, 1, "2 processes on this machine.*1 visible GPU,.*--num_processes 1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, 4, "8 processes.*4 visible GPUs,"),
        (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, 0, "FSDP was asked for.*MULTI_CPU.*cpu_2"),
        (TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}, 0, "DEEPSPEED was asked.*cpu_2.yaml"),
        (TORCHRUN | {"ACCELERATE_USE_MEGATRON_LM": "true"}, 0, "MEGATRON_LM was asked"),
        (TORCHRUN | {"ACCELERATE_USE_FSDP": "true"}, 2, "FSDP was asked for.*run MULTI_GPU"),
        ({"ACCELERATE_USE_FSDP": "true"}, 1, "FSDP was asked for.*run NO instead"),
        (SIMPLE | {"ACCELERATE_MIXED_PRECISION": "fp16"}, 0, "fp16 does not exist on a CPU.*bf16"),
        (SIMPLE | {"ACCELERATE_MIXED_PRECISION": "fp8"}, 0, "fp8 does not exist on a CPU"),
        (
            SIMPLE | {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"},
            1,
            "fp16 does not exist on a CPU",
        ),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            0,
            "gradient_accumulation_steps=4 .*ignored.*--micro-batch-size",
        ),
    ],
)
def test_refused(launch, environment, gpus, words):
    with pytest.raises(UsageError, match=words):
        launch(environment, gpus)


@pytest.mark.parametrize(
    "environment, gpus, asked",
    [
        (TORCHRUN, 2, 2),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 1, 3),  # mpirun python SCRIPT on GPUs
        ({"PMI_SIZE": "4"}, 1, 4),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 0, 8),  # srun python SCRIPT
    ],
)
def test_strangers_are_refused(launch, environment, gpus, asked):
    words = f"{asked} processes were started, but each of them sees 1: .*{asked} separate models"
    with pytest.raises(UsageError, match=words):
        launch(environment, gpus, world=1)


def test_an_engine_that_is_really_used_is_accepted(launch):
    environment = TORCHRUN | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    told = launch(environment, gpus=2, engine=DistributedType.FSDP, can_shard=True)
    assert not told["cpu"] and told["fsdp_plugin"].fsdp_version == 2
    assert told["gradient_accumulation_plugin"].sync_each_batch


def test_an_engine_that_the_script_does_not_bear_is_refused(launch):
    environment = TORCHRUN | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with pytest.raises(UsageError, match="FSDP: this script evaluates"):
        launch(environment, gpus=2, engine=DistributedType.FSDP)
    stage = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    with pytest.raises(UsageError, match="zero_stage: 1 shards no gradients"):
        launch(TORCHRUN | stage, gpus=2)


def test_an_engine_is_refused_on_a_cpu_before_accelerate_imports_it(launch):
    environment = TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}
    with pytest.raises(UsageError, match="DEEPSPEED was asked for"):
        launch(environment, gpus=0, engine=DistributedType.DEEPSPEED)  # what it would have found


def test_a_gpu_that_torch_cannot_use_is_refused(launch):
    with pytest.raises(UsageError, match=r"has an NVIDIA GPU, but torch .* cannot use it.*--cpu"):
        launch({}, gpus=0, nvidia=True)
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES: 7"):
        launch({"CUDA_VISIBLE_DEVICES": "7"}, gpus=0, nvidia=True)


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "-1"},
        {"CUDA_VISIBLE_DEVICES": "-1,-1"},
        {"ACCELERATE_USE_CPU": "True"},
    ],
)
def test_but_not_when_the_cpu_was_chosen(launch, environment):
    assert launch(environment, gpus=0, nvidia=True)["cpu"]


def test_nvidia_gpu_is_found_by_its_device_file(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "Path", lambda path: tmp_path / path.lstrip("/"))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setattr(start.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert not start._has_nvidia_gpu()  # a node without GPU often has the program all the same
    (tmp_path / "dev" / "dxg").touch()
    assert start._has_nvidia_gpu()  # WSL
    monkeypatch.setattr(start.shutil, "which", lambda name: None)
    assert not start._has_nvidia_gpu()
    (tmp_path / "dev" / "nvidia3").touch()  # a container often sees another one than the first
    assert start._has_nvidia_gpu()


@pytest.mark.parametrize(
    "environment, torch_threads, threads",
    [
        (TORCHRUN, 1, 8),  # the launcher's 1
        (TORCHRUN | {"OMP_NUM_THREADS": "4"}, 4, 4),  # the user's
        (TORCHRUN | {"OMP_NUM_THREADS": "16"}, 16, 8),  # more than there are
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "32"}, 1, 1),
        (SIMPLE, 1, 16),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),  # python SCRIPT: nobody but the user writes it
        ({}, 8, 8),
    ],
)
def test_threads(launch, environment, torch_threads, threads):
    assert launch(environment, threads=torch_threads)["threads"] == threads


def test_threads_are_left_alone_on_a_gpu(launch):
    assert launch(TORCHRUN, gpus=2)["threads"] == 1


def describe_world():
    """In the workers of the pool: open the real Accelerator."""
    accelerator = start.open_accelerator(comm_hook="bf16")
    return (
        accelerator.num_processes,
        accelerator.distributed_type.value,
        torch.distributed.get_world_size(),
        start.world_line(accelerator),
    )


def test_two_real_processes_find_each_other(pool):
    for count, kind, size, line in pool.run(2, describe_world, init=False):
        assert (count, kind, size) == (2, "MULTI_CPU", 2)
        assert re.match(r"2 processes on cpu, \d+ threads? each, mixed precision no, host ", line)


@pytest.mark.parametrize(
    ("cores", "processes", "workers"), [(2, 1, 2), (2, 2, 1), (2, 4, 0), (64, 2, 8), (1, 1, 1)]
)
def test_default_workers(clean, cores, processes, workers):
    clean.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    clean.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert start.default_workers() == workers


PAGE_FAULTS = """
import resource, torch
from utils import start

start.keep_freed_memory()
for turn in range(11):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again():
    line = [sys.executable, "-c", PAGE_FAULTS]
    done = subprocess.run(line, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 2 * 16384  # the pages of two of them; without, of all ten


def test_the_processes_of_one_start_agree_on_a_place_of_their_own():
    """In a store that still has what the processes of earlier starts have written."""
    store = torch.distributed.HashStore()
    store.set("hello/1", "a process that is gone")
    places = []
    for _ in range(2):
        with ThreadPoolExecutor() as threads:
            own = [threads.submit(meeting.agree_on_place, store, rank, 3) for rank in range(3)]
        found = {one.result(timeout=60) for one in own}
        assert len(found) == 1
        places += found
    assert len(set(places)) == 2
    assert meeting.agree_on_place(store, 0, 1) not in places
