"""Launchers on the hosts of a network."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.job import SCRIPT, flags, wait_for
from tests.multinode.network import Network, unavailable
from tests.test_configs import ACCELERATE, launch_environment, shipped

PORT = "29500"


@pytest.fixture(autouse=True)
def possible():
    """Skips every test of this folder where there can be no hosts."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def network(tmp_path):
    """Two hosts."""
    with Network(2, tmp_path) as network:
        yield network


class Launch:
    """One run, by a launcher on each host; their outputs in files."""

    def __init__(
        self,
        network: Network,
        directory: Path,
        *launcher: str,
        processes: int = 2,
        fault: str = "",
        environment: dict[str, str] | None = None,
        script_flags: tuple[str, ...] = (),
        **changes,
    ):
        """`launcher`: its further flags; `processes`: on each host.

        `changes` are flags of the script with values, `script_flags` those without.
        """
        self.network, self.directory = network, directory
        self.logs = [directory.with_name(f"{directory.name}-node{h}.log") for h in network.hosts]
        file = shipped("multi_node_cpu.yaml") if len(network.hosts) > 1 else shipped("cpu_4.yaml")
        self._command = [*ACCELERATE, *file, "--num_processes", str(processes * len(self.logs))]
        self._command += ["--num_machines", str(len(self.logs)), *launcher]
        self._flags = [str(SCRIPT), *script_flags, *flags(directory, **changes)]
        variables = {"FAULT": fault, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._environment = launch_environment(directory.parent, **variables)
        self.processes: list[subprocess.Popen] = [self.start(host) for host in network.hosts]

    def start(self, host: int) -> subprocess.Popen:
        where = ["--main_process_ip", self.network.addresses[0], "--main_process_port", PORT]
        where = [*where, "--machine_rank", str(host)] if len(self.network.hosts) > 1 else []
        command = [*self._command, *where, *self._flags]
        return self.network.start(host, command, self.logs[host], env=self._environment)

    def wait(self, seconds: float) -> list[int]:
        """The launchers' exit codes, once every process of theirs has ended."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(deadline - time.monotonic(), 0.1))
        left = max(deadline - time.monotonic(), 1.0)
        wait_for(lambda: not any(map(self.network.pids, self.network.hosts)), left, "end of all")
        return [process.returncode for process in self.processes]

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())


@pytest.fixture
def launch(network):
    """`launch(directory, *launcher_flags, **changes)`: a Launch on the hosts of `network`."""
    return lambda directory, *args, **how: Launch(network, directory, *args, **how)
