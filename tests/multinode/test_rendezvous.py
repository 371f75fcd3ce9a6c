"""utils/rendezvous.py on real machines of a network: it names each thing that can be wrong."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.pool import free_port

COMMAND = [sys.executable, str(REPOSITORY / "utils" / "rendezvous.py")]
TIMEOUT = 6.0  # seconds; of the check
OUTPUT = dict(check=True, capture_output=True, text=True)
ALONE = ["--num-machines", "1", "--machine-rank", "0", "--main-process-ip", "127.0.0.1"]


def run_here(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=30.0)


def test_one_machine():
    port = free_port()
    result = run_here(*ALONE, "--port", str(port))
    assert result.returncode == 0 and f"127.0.0.1 port {port}" in result.stdout
    with socket.create_server(("127.0.0.1", port)):  # it is free again, and then taken
        result = run_here(*ALONE, "--port", str(port))
    assert result.returncode == 1
    assert re.match(rf"error: port {port} of 127.0.0.1 .*choose another --port", result.stderr)


@pytest.mark.parametrize(
    "changes, words",
    [
        (["--machine-rank", "1"], "--machine-rank 1 must be from 0 to 0"),
        (["--port", "0"], "--port 0 must be from 1"),
    ],
)
def test_bad_flags_are_wrong_usage(changes, words):
    result = run_here(*ALONE, *changes)
    assert result.returncode == 2 and words in result.stderr


# ---- On two machines -------------------------------------------------------------------------


class Check:
    """The command on both hosts; `flags` and `environment` by host change what is right.

    copy: the repository that machine 1 has.
    """

    def __init__(self, network, folder, flags=None, environment=None, absent=(), copy=REPOSITORY):
        self.codes, self.logs, started = {}, {}, {}
        start = time.monotonic()
        for host in (h for h in network.hosts if h not in absent):
            command = [*COMMAND, "--num-machines", "2", "--machine-rank", str(host)]
            if host == 1:
                command[1] = str(copy / "utils" / "rendezvous.py")
            command += ["--main-process-ip", network.addresses[0], "--timeout", str(TIMEOUT)]
            log = folder / f"check{host}.log"
            variables = {**os.environ, **(environment or {}).get(host, {})}
            command += (flags or {}).get(host, [])  # the last one of a flag counts
            started[host] = network.start(host, command, log, env=variables)
            self.logs[host] = log
        for host, process in started.items():
            self.codes[host] = process.wait(TIMEOUT + 10.0)
        self.seconds = time.monotonic() - start

    def said(self, host: int) -> str:
        return self.logs[host].read_text()

    def assert_named(self, words: str, *hosts: int) -> None:
        """In time, on each of these hosts, in one line, with exit code 1."""
        assert self.seconds < TIMEOUT + 2.0
        for host in hosts:
            assert self.codes[host] == 1, self.said(host)
            assert len(re.findall(rf"^error: .*{words}", self.said(host), flags=re.MULTILINE)) == 1
            assert "Traceback" not in self.said(host)


def test_two_machines(network, tmp_path):
    for _ in range(2):  # at once again: the port is free
        check = Check(network, tmp_path)
        assert check.codes == {0: 0, 1: 0}, check.said(0) + check.said(1)
        assert check.seconds < TIMEOUT / 2
    assert check.said(1).count("2 of 2 machines") == 2
    assert "machine 0 holds the store: 10.77.0.1 port 29500" in check.said(1)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_an_address_that_does_not_resolve(network, tmp_path, host):
    check = Check(network, tmp_path, {host: ["--main-process-ip", "nodeO"]}, absent=[1 - host])
    check.assert_named(rf"--main-process-ip nodeO does not resolve on node{host}", host)


@pytest.mark.slow
def test_a_loopback_address(network, tmp_path):
    check = Check(network, tmp_path, {1: ["--main-process-ip", "localhost"]}, absent=[0])
    check.assert_named("--main-process-ip localhost is .* on node1: each machine's own loopback", 1)


@pytest.mark.slow
def test_a_port_that_is_refused(network, tmp_path):
    check = Check(network, tmp_path, {1: ["--port", "29501"]})
    check.assert_named("port 29501 of 10.77.0.1 is refused: machine 0 has not come", 1)
    check.assert_named("machine 1 of 2 .*has not come; start the same command there", 0)


@pytest.mark.slow
def test_a_port_that_is_taken(network, tmp_path):
    server = "import socket, time; s = socket.create_server(('', 29500)); print(1); time.sleep(60)"
    network.start(0, [sys.executable, "-uc", server], tmp_path / "server.log")
    while not (tmp_path / "server.log").read_text():
        time.sleep(0.05)
    check = Check(network, tmp_path)
    check.assert_named("port 29500 of 10.77.0.1 cannot be opened .*in use.* another --port", 0)
    check.assert_named("machine 0 answers .* it says nothing: another program may have the port", 1)


@pytest.mark.slow
def test_a_port_that_another_program_answers(network, tmp_path):
    server = "import socket; s = socket.create_server(('', 29500)); print(1)\nwhile True: "
    server += "s.accept()[0].sendall(b'SSH-2.0-OpenSSH_9.2\\r\\n')"
    network.start(0, [sys.executable, "-uc", server], tmp_path / "server.log")
    while not (tmp_path / "server.log").read_text():
        time.sleep(0.05)
    check = Check(network, tmp_path, absent=[0])
    check.assert_named("what answers at 10.77.0.1 port 29500 is not this check .*another --port", 1)


@pytest.mark.slow
def test_another_number_of_machines(network, tmp_path):
    check = Check(network, tmp_path, {1: ["--num-machines", "3"]})
    check.assert_named("number of machines: 2 on node0, 3 on node1", 0, 1)


@pytest.mark.slow
def test_a_machine_that_has_not_come(network, tmp_path):
    check = Check(network, tmp_path, {h: ["--num-machines", "3"] for h in (0, 1)})
    check.assert_named("machine 2 of 3 .*has not come", 0, 1)


@pytest.mark.slow
def test_no_way_to_machine_0(network, tmp_path):
    network.cut(0)
    check = Check(network, tmp_path)
    check.assert_named("machine 1 of 2 .*has not come", 0)
    check.assert_named("10.77.0.1 is not reached at port 29500 .*firewall, another network", 1)


@pytest.mark.slow
def test_the_same_rank_twice(network, tmp_path):
    flags = {host: ["--num-machines", "3", "--machine-rank", "1"] for host in (1, 2)}
    network.add_host()
    check = Check(network, tmp_path, flags | {0: ["--num-machines", "3"]})
    check.assert_named("two machines have --machine-rank 1: node. and node.; give each its own", 0)
    check.assert_named("two machines have --machine-rank 1: node. and node.; give each its own", 1)
    check.assert_named("two machines have --machine-rank 1: node. and node.; give each its own", 2)


@pytest.mark.slow
def test_rank_0_twice(network, tmp_path):
    check = Check(network, tmp_path, {1: ["--machine-rank", "0"]})
    check.assert_named("two machines have --machine-rank 0: node0 and node1", 0, 1)
    check.assert_named("10.77.0.1 is no address of node1, which was given --machine-rank 0", 1)


def fake_version(folder: Path) -> dict[str, str]:
    metadata = folder / "fake" / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    return {"PYTHONPATH": str(folder / "fake")}


def fake_commit(folder: Path) -> dict[str, str]:
    repository = folder / "other"
    commit = ["commit", "--quiet", "--allow-empty", "--message", "other"]
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    subprocess.run(["git", "-C", str(repository), *identity, *commit], check=True)
    return {"GIT_DIR": str(repository / ".git")}


def fake_clock(folder: Path) -> dict[str, str]:
    (folder / "late").mkdir()
    code = "import time\nnow = time.time\ntime.time = lambda: now() - 61\n"
    (folder / "late" / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder / "late")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fake, words",
    [
        (fake_version, r"version of torch: \S+ on node0, 1.0 on node1"),
        (fake_commit, r"git commit: \w+ on node0, \w+ on node1"),
        (fake_clock, "the clock of node1 is 61 s behind that of node0; set both by NTP"),
    ],
)
def test_machines_that_are_not_alike(network, tmp_path, fake, words):
    check = Check(network, tmp_path, environment={1: fake(tmp_path)})
    check.assert_named(words, 0, 1)
    assert check.seconds < TIMEOUT / 2 and check.said(0).count("error: ") == 1


@pytest.mark.slow
def test_other_code_of_the_same_commit(network, tmp_path):
    copy = tmp_path / "copy"
    for folder in ("train", "utils"):
        shutil.copytree(REPOSITORY / folder, copy / folder)
    (copy / "utils" / "order.py").write_text("# edited\n")
    git = subprocess.run(["git", "rev-parse", "--absolute-git-dir"], cwd=REPOSITORY, **OUTPUT)
    check = Check(network, tmp_path, environment={1: {"GIT_DIR": git.stdout.strip()}}, copy=copy)
    check.assert_named(r"code: \w+ on node0, \w+ on node1", 0, 1)


@pytest.mark.slow
def test_other_data(network, tmp_path):
    for host in network.hosts:
        (network.disks[host] / "data").mkdir()
        (network.disks[host] / "data" / "train.parquet").write_text(f"same size {host}")
    flags = {host: ["--dataset", str(network.local_disk / "data")] for host in network.hosts}
    check = Check(network, tmp_path, flags)
    check.assert_named(r"data in \S+: 1 files, \w+ on node0, 1 files, \w+ on node1", 0, 1)
    (network.disks[1] / "data" / "train.parquet").write_text("same size 0")
    check = Check(network, tmp_path, flags)
    assert check.codes == {0: 0, 1: 0}, check.said(0)


FIX = "on node1: export GLOO_SOCKET_IFNAME=net0 NCCL_SOCKET_IFNAME=net0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, own_address, words",
    [
        ({}, "127.0.1.1", "node1 would train at 127.0.1.1, .*its own name node1 resolves to that"),
        ({}, None, "node1 would train at 127.0.0.1, .*its own name node1 does not resolve"),
        ({}, "10.77.0.9", "node1 would train at 10.77.0.9, which is not its own"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "10.77.0.2", "node1 has no such interface .*GLOO.*=eth9"),
        ({"NCCL_SOCKET_IFNAME": "eth9"}, "10.77.0.2", "node1 has no such interface .*NCCL.*=eth9"),
        (
            {"GLOO_SOCKET_IFNAME": "other0"},
            "10.77.0.2",
            r"node0 cannot reach node1 at 192.168.77.2 .*GLOO_SOCKET_IFNAME=other0\); wrong inter",
        ),
        (
            {"NCCL_SOCKET_IFNAME": "=other0"},
            "10.77.0.2",
            "node0 cannot reach node1 at 192.168.77.2 .*NCCL_SOCKET_IFNAME==other0",
        ),
    ],
)
def test_the_wrong_interface(network, tmp_path, environment, own_address, words):
    network.set_known_hosts(1, {"node1": own_address} if own_address else {})
    network.add_interface(1, "other0", "192.168.77.2/24")
    check = Check(network, tmp_path, environment={1: environment})
    check.assert_named(f"{words}.*; {FIX}", 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_right_interface(network, tmp_path, variable):
    network.set_known_hosts(1, {} if variable.startswith("GLOO") else {"node1": "10.77.0.2"})
    network.add_interface(1, "other0", "192.168.77.2/24")
    check = Check(network, tmp_path, environment={1: {variable: "net0"}})
    assert check.codes == {0: 0, 1: 0}, check.said(0)
