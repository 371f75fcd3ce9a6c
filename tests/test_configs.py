"""The files of accelerate_configs/, and real launches: how many processes find each other.

A test that only looks at the exit code passes in every case that went wrong here, so each of these
asserts the world that the processes report, or the words of the refusal.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.conftest import REPOSITORY
from tests.pool import free_port
from tests.test_sharding import FSDP2, HSDP
from tests.test_zero import STAGES

CONFIGS = REPOSITORY / "accelerate_configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OF_A_LAUNCH = re.compile(
    "ACCELERATE_|PMI_|OMPI_|MV2_|SLURM_|MASTER_|CUDA_VISIBLE|OMP_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)
# Opens the Accelerator as every script does, and says what it got.
PROBE = f"""
import os, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
if os.environ.get("RANK") == "0":
    time.sleep(float(os.environ.get("RANK_0_IS_LATE", "0")))
from utils.errors import exit_with
from utils.start import open_accelerator, world_line

def main():
    accelerator = open_accelerator()
    kind = accelerator.distributed_type.value
    line = f"rank {{accelerator.process_index}}, {{kind}}: {{world_line(accelerator)}}\\n"
    os.write(1, line.encode())  # at once, so that the ranks' lines do not mix
    return 0

exit_with(main)
"""
# As `accelerate config` writes it for two processes, the answers at their defaults.
WRITTEN_BY_ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
}
FSDP = {
    "distributed_type": "FSDP",
    "use_cpu": False,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}


def launch_environment(folder, **more) -> dict[str, str]:
    """No leftover of another launch, no default config of the user, no GPU unless asked for."""
    kept = {name: value for name, value in os.environ.items() if not OF_A_LAUNCH.match(name)}
    return kept | {"HF_HOME": str(folder / "hf"), "CUDA_VISIBLE_DEVICES": "-1"} | more


@pytest.fixture
def probe(tmp_path):
    """`probe(*command)`: launch the probe; its exit code and the lines of its ranks, in order."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)

    def run(*command, **environment):
        result = subprocess.run(
            [*command, str(script)],
            env=launch_environment(tmp_path, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        lines = result.stdout.splitlines()
        wanted = [line for line in lines if re.match(r"rank \d|error: ", line)]
        return result.returncode, sorted(wanted), result.stdout

    return run


@pytest.fixture
def config(tmp_path):
    """`config(values)`: the path of a config file as `accelerate config` would have written it."""

    def write(**values):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(WRITTEN_BY_ACCELERATE | values))
        return ["--config_file", str(path)]

    return write


def shipped(name: str) -> list[str]:
    return ["--config_file", str(CONFIGS / name)]


def assert_world(result, size: int, line: str) -> None:
    """Every rank of `size` has seen `size` processes."""
    code, lines, output = result
    assert code == 0, output
    assert len(lines) == size, output
    for rank, said in enumerate(lines):
        assert re.match(f"rank {rank}, {line}", said), said


def assert_refused(result, words: str) -> None:
    """Nothing was opened, and the reason stands there once."""
    code, lines, output = result
    assert code == 1, output  # the launcher's; the script's own is in its report
    assert re.search(r"exitcode *: 2 |exit status 2", output), output
    assert len(lines) == 1 and re.search(words, lines[0]), output


# ---- Without starting anything ---------------------------------------------------------------

FILES = {  # processes, machines, kind, on the CPU, precision
    "cpu.yaml": (1, 1, "NO", True, "no"),
    "cpu_2.yaml": (2, 1, "MULTI_GPU", True, "no"),
    "cpu_4.yaml": (4, 1, "MULTI_GPU", True, "no"),
    "mps.yaml": (1, 1, "NO", False, "no"),
    "single_gpu.yaml": (1, 1, "NO", False, "bf16"),
    "multi_gpu.yaml": (8, 1, "MULTI_GPU", False, "bf16"),
    "multi_gpu_fp16.yaml": (8, 1, "MULTI_GPU", False, "fp16"),
    "multi_node.yaml": (16, 2, "MULTI_GPU", False, "bf16"),
    "multi_node_cpu.yaml": (4, 2, "MULTI_GPU", True, "no"),
    "fsdp2.yaml": (8, 1, "FSDP", False, "bf16"),
    "hsdp.yaml": (16, 2, "FSDP", False, "bf16"),
    "deepspeed_zero2.yaml": (8, 1, "DEEPSPEED", False, "bf16"),
    "deepspeed_zero3.yaml": (8, 1, "DEEPSPEED", False, "bf16"),
}


def test_every_file_is_listed_here_and_in_the_readme():
    assert {path.name for path in CONFIGS.glob("*.yaml")} == set(FILES)
    readme = (CONFIGS / "README.md").read_text()
    for name in FILES:
        assert f"`{name}`" in readme
        assert f"--config_file accelerate_configs/{name} " in readme
    for name in re.findall(r"accelerate_configs/(\w+\.yaml)", readme):
        assert name in FILES


@pytest.mark.parametrize("name", FILES)
def test_file_says_what_its_name_says(name):
    path = CONFIGS / name
    file = load_config_from_file(str(path))  # raises for a key that accelerate does not know
    kind = file.distributed_type.value
    found = (file.num_processes, file.num_machines, kind, file.use_cpu, file.mixed_precision)
    assert found == FILES[name]
    assert file.main_training_function == "main" and file.dynamo_config == {}
    assert path.read_text().startswith("# ")
    # Accelerate knows these keys and takes the defaults of its flags all the same.
    assert not {"rdzv_backend", "same_network"} & set(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "name, processes, hidden",
    [
        ("cpu_2.yaml", "2", True),
        ("cpu_4.yaml", "4", True),
        ("multi_gpu.yaml", "8", False),
        ("multi_gpu_fp16.yaml", "8", False),
        ("multi_node.yaml", "8", False),
        ("multi_node_cpu.yaml", "2", True),
        ("fsdp2.yaml", "8", False),
        ("hsdp.yaml", "8", False),
    ],
)
def test_what_accelerate_hands_to_torchrun(monkeypatch, name, processes, hidden):
    seen = {}

    def run(args):
        seen.update(vars(args), visible=torch.cuda._parse_visible_devices()[:16])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.distributed.run.run", run)
    port = str(free_port())
    command = [*shipped(name), "--main_process_port", port, "--main_process_ip", "10.0.0.1", "x.py"]
    launch_command(launch_command_parser().parse_args(command))
    assert seen["nproc_per_node"] == processes
    assert seen["visible"] == ([] if hidden else list(range(16)))  # no GPU, on a machine with 16
    if name.startswith(("multi_node", "hsdp")):
        assert (seen["nnodes"], seen["rdzv_endpoint"]) == ("2", f"10.0.0.1:{port}")


@pytest.mark.parametrize("name", ["fsdp2.yaml", "hsdp.yaml"])
def test_what_the_processes_are_told_of_the_engine(monkeypatch, name):
    """Accelerate writes it into the environment; tests/test_sharding.py trains with just that."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*shipped(name), "x"]))
    told = prepare_multi_gpu_env(args)
    for key, value in (HSDP if name == "hsdp.yaml" else FSDP2).items():
        of_the_machines = key.endswith("DP_SHARD_SIZE")  # the test has two processes on each
        assert told[key] == ("8" if of_the_machines else value), key
    assert told["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert told["FSDP_OFFLOAD_PARAMS"] == "false"


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_processes_are_told_of_deepspeed(stage):
    """tests/test_zero.py trains with just that."""
    given = [*shipped(f"deepspeed_zero{stage}.yaml"), "x"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, told = prepare_deepspeed_cmd_env(args)
    of_the_engine = {k: v for k, v in told.items() if k.startswith("ACCELERATE_")}
    del of_the_engine["ACCELERATE_CONFIG_DS_FIELDS"]  # names of what the file says
    assert of_the_engine.pop("ACCELERATE_MIXED_PRECISION") == "bf16"
    assert of_the_engine == STAGES[f"zero{stage}"]


# ---- Real launches ---------------------------------------------------------------------------


def test_cpu_2_starts_two_processes(probe):
    flags = ["--mixed_precision", "bf16"]
    result = probe(*ACCELERATE, *shipped("cpu_2.yaml"), *flags, CUDA_VISIBLE_DEVICES="0,1")
    assert_world(result, 2, "MULTI_CPU: 2 processes on cpu, .*, mixed precision bf16,")


def test_torchrun_starts_two_processes(probe):
    result = probe(*TORCHRUN, "--standalone", "--nproc_per_node", "2")
    assert_world(result, 2, "MULTI_CPU: 2 processes on cpu, .*, mixed precision no,")


def test_a_default_config_in_the_cache_runs(probe, tmp_path, monkeypatch):
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    write_basic_config(mixed_precision="bf16", save_location=str(path))
    assert_world(probe(*ACCELERATE), 1, "NO: 1 process on cpu, .*, mixed precision bf16,")


def test_multi_cpu_is_refused(probe, config):
    result = probe(*ACCELERATE, *config(distributed_type="MULTI_CPU", use_cpu=True))
    assert_refused(result, "several processes.*started one; use .*cpu_2.yaml")


def test_fsdp_on_a_cpu_is_refused(probe):
    result = probe(*ACCELERATE, *shipped("fsdp2.yaml"), "--num_processes", "1")
    assert_refused(result, "FSDP was asked for.*on a CPU .*cpu_2.yaml")


@pytest.mark.slow
def test_hsdp_on_a_cpu_is_refused(probe):
    machines = ["--num_machines", "1", "--num_processes", "2", "--main_process_port", "0"]
    result = probe(*ACCELERATE, *shipped("hsdp.yaml"), *machines)
    assert_refused(result, "FSDP was asked for.*on a CPU .*cpu_2.yaml")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="it is installed")
@pytest.mark.parametrize("name", ["deepspeed_zero2.yaml", "deepspeed_zero3.yaml"])
def test_the_launcher_names_a_missing_deepspeed(probe, name):
    code, lines, output = probe(*ACCELERATE, *shipped(name))
    assert code == 1 and not lines and "DeepSpeed is not installed" in output


@pytest.mark.slow
def test_the_reason_is_printed_even_if_rank_0_is_late(probe, config):
    result = probe(*ACCELERATE, *config(**FSDP), RANK_0_IS_LATE="4")
    assert_refused(result, "FSDP was asked for.*on a CPU .*cpu_2.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name, size", [("cpu.yaml", 1), ("cpu_4.yaml", 4)])
def test_cpu_files(probe, name, size):
    kind = "MULTI_CPU" if size > 1 else "NO"
    result = probe(*ACCELERATE, *shipped(name), CUDA_VISIBLE_DEVICES="0,1")
    assert_world(result, size, f"{kind}: {size} process(es)? on cpu, .*, mixed precision no,")


@pytest.mark.slow
@pytest.mark.parametrize("use_cpu", [True, False])
def test_multi_gpu_without_a_gpu_is_one_world_on_the_cpu(probe, config, use_cpu):
    result = probe(*ACCELERATE, *config(distributed_type="MULTI_GPU", use_cpu=use_cpu))
    assert_world(result, 2, "MULTI_CPU: 2 processes on cpu")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--cpu"], shipped("cpu.yaml"), shipped("single_gpu.yaml")])
def test_two_processes_of_the_simple_launcher_are_refused(probe, flags):
    result = probe(*ACCELERATE, *flags, "--num_processes", "2")
    assert_refused(result, "several processes.*started one; use .*cpu_2.yaml")


@pytest.mark.slow
def test_a_config_file_beats_the_default_one(probe, tmp_path):
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    default = WRITTEN_BY_ACCELERATE | {"distributed_type": "MULTI_GPU", "use_cpu": True}
    (folder / "default_config.yaml").write_text(yaml.safe_dump(default))
    assert_world(probe(*ACCELERATE), 2, "MULTI_CPU: 2 processes on cpu")  # read silently
    assert_world(probe(*ACCELERATE, "--num_processes", "1"), 1, "MULTI_CPU: 1 process on cpu")
    assert_world(probe(*ACCELERATE, *shipped("cpu.yaml")), 1, "NO: 1 process on cpu")


@pytest.mark.slow
def test_a_port_in_use_does_not_matter_on_one_machine(probe, config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = ["--main_process_port", str(taken.getsockname()[1])]
        command = [*ACCELERATE, *config(distributed_type="MULTI_GPU", use_cpu=True), *port]
        result = probe(*command)
    assert_world(result, 2, "MULTI_CPU: 2 processes on cpu")
    assert "is already in use" in result[2]


@pytest.mark.slow
def test_multi_node_file_joins_two_launchers(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    command = [*ACCELERATE, *shipped("multi_node.yaml"), "--num_processes", "4"]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    machines = [
        subprocess.Popen(
            [*command, "--machine_rank", str(rank), str(script)],
            env=launch_environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (1, 0)
    ]
    try:
        output = "".join(machine.communicate(timeout=120)[0] for machine in machines)
    finally:
        for machine in machines:
            machine.kill()
    lines = sorted(line for line in output.splitlines() if line.startswith("rank "))
    assert_world((0, lines, output), 4, "MULTI_CPU: 4 processes on cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, size",
    [
        ([sys.executable], 1),
        (ACCELERATE, 1),
        ([*TORCHRUN, "--standalone", "--nproc_per_node", "2"], 2),
        ([*ACCELERATE, *shipped("cpu_2.yaml")], 2),
    ],
)
def test_the_main_script_records_its_world(tmp_path, command, size):
    run = tmp_path / "run"
    flags = ["--dataset", "digits", "--max-steps", "2", "--subset", "300", "--tracker", "none"]
    flags += ["--global-batch-size", "64", "--output-dir", str(run)]
    subprocess.run(
        [*command, str(REPOSITORY / "train" / "cifar.py"), *flags],
        env=launch_environment(tmp_path),
        cwd=tmp_path,
        check=True,
        timeout=300,
    )
    recorded = json.loads((run / "config.json").read_text())
    assert (recorded["world_size"], recorded["device"]) == (size, "cpu")
