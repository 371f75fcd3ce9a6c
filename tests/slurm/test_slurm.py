"""accelerate_configs/slurm/train.sbatch on a real SLURM cluster, into its time limit."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.faults.job import NUM_TEST, NUM_TRAIN, SCRIPT, steps_in, wait_for
from tests.multinode.network import Network
from tests.scripts import read_run, relative_difference, run_cifar, small_data
from tests.slurm.cluster import Cluster, missing
from tests.test_configs import launch_environment

pytestmark = pytest.mark.slow

SBATCH = REPOSITORY / "accelerate_configs" / "slurm" / "train.sbatch"
UPDATES = 160  # 0.6 s each, more than fit into the time limit
RECIPE = dict(global_batch_size=16, bn_group=8, epochs=40, lr=0.02, lr_reference_batch=0)
RECIPE |= dict(eval_every=99)
LIMIT = ["--time=2", "--signal=B:USR1@45"]  # SLURM looks every 30 s, and sends it up to 60 s early


@pytest.fixture
def cluster(tmp_path):
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network(2, tmp_path) as network:
        yield Cluster(network, tmp_path / "slurm")


def submit(cluster: Cluster, folder: Path, *script: str, fault: str = "") -> str:
    """The job's number."""
    (folder / "utils").symlink_to(REPOSITORY / "utils")  # where it runs is its working folder
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = launch_environment(folder, PATH=path, FAULT=fault, PROCESSES="2")
    environment |= {"CONFIG": str(REPOSITORY / "accelerate_configs" / "multi_node_cpu.yaml")}
    environment |= {"SLURM_CONF": cluster.environment["SLURM_CONF"], "OMP_NUM_THREADS": "1"}
    options = ["--parsable", "--gpus-per-node=0", f"--chdir={folder}", *LIMIT]
    said = cluster.run("sbatch", *options, str(SBATCH), *script, env=environment)
    assert said.strip().isdecimal(), said
    return said.strip()


def test_into_the_time_limit_and_back(cluster, pool, tmp_path):
    folder, unpaced = tmp_path / "work", tmp_path / "unpaced"
    folder.mkdir()
    flags = [word for k, v in RECIPE.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    flags += ["--tracker", "none"]
    job = submit(cluster, folder, str(SCRIPT), *flags, fault=f"pace:0.6:{unpaced}")
    run = folder / "runs" / f"slurm-{job}"

    def log() -> str:
        path = folder / f"slurm-{job}.log"
        return path.read_text() if path.exists() else ""

    def everything() -> str:
        return log() + "".join(p.read_text() for p in run.glob("*.log")) + cluster.logs()

    try:
        wait_for(lambda: "back into the queue" in log(), 240.0, "requeue")
        steps = steps_in(run)
        unpaced.touch()
        wait_for(lambda: cluster.state(job)["JobState"] == "COMPLETED", 240.0, "end of the job")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{everything()}") from None
    assert int(cluster.state(job)["Restarts"]) >= 1
    found = read_run(run)
    assert found["status"]["state"] == "finished" and found["config"]["world_size"] == 4
    assert 0 < steps < len(found["metrics"]) == UPDATES
    assert log().count("2 of 2 machines") >= 4  # on both machines, at each start
    assert (run / "node0.log").read_text().count("world     4 processes") >= 2
    assert "resume " in (run / "node0.log").read_text() and (run / "node1.log").exists()
    whole = RECIPE | dict(output_dir=str(tmp_path / "whole"))
    expected = pool.run(1, run_cifar, whole, small_data(NUM_TRAIN, NUM_TEST), init=False)[0]
    for name, value in expected["model"].items():
        assert relative_difference(value, found["model"][name]) < 1e-10, name
    assert json.loads((run / "status.json").read_text())["step"] == UPDATES


def test_a_job_whose_machines_are_not_alike_does_not_start(cluster, tmp_path):
    """What utils/rendezvous.py says stands in the log, and the job has failed."""
    folder = tmp_path / "work"
    folder.mkdir()
    cluster.network.set_known_hosts(1, {"node0": "10.77.0.1"})  # its own name does not resolve
    job = submit(cluster, folder, str(SCRIPT))
    deadline = time.monotonic() + 120.0
    while cluster.state(job)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"):
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.5)
    log = (folder / f"slurm-{job}.log").read_text()
    assert cluster.state(job)["JobState"] == "FAILED", log
    assert "node1 would train at 127.0.0.1" in log and "GLOO_SOCKET_IFNAME=net0" in log


LAUNCHER = """#!/bin/bash
run=${@: -1}
trap 'echo "  \\"state\\": \\"preempted\\"," >"$run/status.json"; exit 1' TERM
touch "$run/started"
while :; do sleep 0.2; done
"""


@pytest.mark.parametrize("by_hand", [True, False])
def test_only_the_time_limit_requeues(cluster, tmp_path, by_hand):
    """A launcher that only waits for its signal, in place of accelerate's."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "accelerate").write_text(LAUNCHER)
    (folder / "accelerate").chmod(0o755)
    job = submit(cluster, folder, "train/cifar.py")
    run = folder / "runs" / f"slurm-{job}"
    wait_for((run / "started").exists, 60.0, "start")
    signal = ["--signal=TERM"] if by_hand else ["--signal=USR1", "--batch"]  # as SLURM sends it
    cluster.run("scancel", *signal, job)
    if by_hand:
        wait_for(lambda: cluster.state(job)["JobState"] == "FAILED", 60.0, "end of the job")
    else:
        wait_for(lambda: cluster.state(job)["Restarts"] == "1", 60.0, "requeue")
        cluster.run("scancel", job)
    assert (cluster.state(job)["Restarts"] == "0") == by_hand
