"""Several machines on one: network namespaces joined by veth pairs and a bridge.

    with Network(2, folder) as network:
        process = network.start(0, ["python", "..."], log)

Each host has a name (node0, node1), an address (10.77.0.1, 10.77.0.2), its own loopback and its
own `network.local_disk`; everything else of the file system is shared. No host sees another
network. What a killed test leaves behind is removed by the next one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from itertools import count
from pathlib import Path

NETNS = Path("/etc/netns")  # NAME/hosts there is /etc/hosts inside `ip netns exec NAME`
PREFIX = "training-scripts-"

_numbers = count()  # of the networks of this process


def ip(*words: str) -> str:
    """The output of the `ip` command."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@cache
def unavailable() -> str:
    """Why there can be no hosts here; "" when there can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "no `ip` or `unshare` command"
    probe = f"{PREFIX}{os.getpid()}-probe"
    inside = ["ip", "netns", "exec", probe, "unshare", "--uts", "hostname", "probe"]
    try:
        ip("netns", "add", probe)
        ip("-n", probe, "link", "add", "one", "type", "veth", "peer", "name", "two")
        ip("-n", probe, "link", "add", "bridge0", "type", "bridge")
        subprocess.run(inside, check=True, capture_output=True)
    except subprocess.CalledProcessError:
        return "no right to make network namespaces"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return ""


def remove_leftovers() -> None:
    """Namespaces of tests that were killed."""
    for name in re.findall(rf"^{PREFIX}\d+-\S+", ip("netns", "list"), flags=re.MULTILINE):
        pid = int(name.removeprefix(PREFIX).split("-")[0])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            remove_namespace(name)


def remove_namespace(name: str) -> None:
    for pid in ip("netns", "pids", name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    ip("netns", "delete", name)
    shutil.rmtree(NETNS / name, ignore_errors=True)


class Network:
    """A context manager; `folder` is for the hosts' own disks."""

    def __init__(self, hosts: int, folder: Path):
        self.hosts: list[int] = []
        self.addresses: list[str] = []
        self.disks: list[Path] = []
        self.local_disk = folder / "local"
        self._folder, self._count = folder, hosts
        self._prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-switch"
        self._names: list[str] = []
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Network":
        remove_leftovers()
        self.local_disk.mkdir(parents=True)
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge0", "up")
            for _ in range(self._count):
                self.add_host()
        except subprocess.CalledProcessError as error:
            self.close()
            raise RuntimeError(error.stderr) from error
        return self

    def add_host(self) -> None:
        host = len(self.hosts)
        name, port, address = f"{self._prefix}-node{host}", f"port{host}", f"10.77.0.{host + 1}"
        self.hosts.append(host)
        self.addresses.append(address)
        self.disks.append(self._folder / f"disk{host}")
        self.disks[host].mkdir()
        self._names.append(name)
        ip("netns", "add", name)
        for other in self.hosts:
            known = dict(zip((f"node{h}" for h in self.hosts), self.addresses, strict=True))
            self.set_known_hosts(other, known)
        pair = ["type", "veth", "peer", "name", "net0", "netns", name]
        ip("-n", self._switch, "link", "add", port, *pair)
        ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "net0")
        for device in ("lo", "net0"):
            ip("-n", name, "link", "set", device, "up")

    def add_interface(self, host: int, name: str, address: str) -> None:
        """One more, to a network with no other host; `address` with its length, /24 say."""
        ip("-n", self._names[host], "link", "add", name, "type", "bridge")
        ip("-n", self._names[host], "address", "add", address, "dev", name)
        ip("-n", self._names[host], "link", "set", name, "up")

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        known = ip("netns", "list").split()
        for name in (*self._names, self._switch):
            if name in known:
                remove_namespace(name)
        for process in self._processes:
            process.wait()

    def set_known_hosts(self, host: int, addresses: dict[str, str]) -> None:
        """What this host's /etc/hosts says, for commands that start from now on."""
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        folder = NETNS / self._names[host]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        # Nobody answers there, and at once: names that are not in the file do not exist.
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def command(self, host: int, command: list[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        mount = f'mount --bind "{self.disks[host]}" "{self.local_disk}"'
        setup = f'hostname node{host} && {mount} && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", setup, "sh"]
        return ["ip", "netns", "exec", self._names[host], *inside, *command]

    def start(self, host: int, command: list[str], log: Path, **how) -> subprocess.Popen:
        """Start it; killed at the latest with the network. Output is added to the file."""
        with log.open("a") as output:
            process = subprocess.Popen(
                self.command(host, command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **how,
            )
        self._processes.append(process)
        return process

    def run(self, host: int, command: list[str], timeout: float, **how):
        """Run it to its end; the completed process, with output and errors in `stdout`."""
        return subprocess.run(
            self.command(host, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            **how,
        )

    def pids(self, host: int) -> list[int]:
        """All processes of a host."""
        return [int(pid) for pid in ip("netns", "pids", self._names[host]).split()]

    def kill_host(self, host: int) -> None:
        """A power cut: no process has a last word, and none of its connections is closed."""
        self.cut(host)
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)

    def cut(self, host: int) -> None:
        """Pull the cable: what is sent is lost, and nobody is told."""
        ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        """Put the cable back."""
        ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def slow_down(self, host: int, mbit: float, delay_ms: float) -> None:
        """Give it a long cable: so many Mbit/s each way, and each packet so much later."""
        port, inner, outer = f"port{host}", f"inner{host}", f"outer{host}"
        ip("-n", self._switch, "link", "set", port, "nomaster")
        ip("-n", self._switch, "link", "add", inner, "type", "veth", "peer", "name", outer)
        ip("-n", self._switch, "link", "set", outer, "master", "bridge0", "up")
        for device in (port, inner):  # they hand over every frame, whosever it is
            ip("-n", self._switch, "link", "set", device, "promisc", "on", "up")
        cable = [sys.executable, str(Path(__file__).with_name("slow_link.py")), port, inner]
        inside = ["ip", "netns", "exec", self._switch, *cable, str(mbit), str(delay_ms)]
        self._processes.append(subprocess.Popen(inside, start_new_session=True))

    def bytes_sent(self, host: int) -> int:
        """Counted by the host's network interface."""
        path = "/sys/class/net/net0/statistics/tx_bytes"
        return int(self.run(host, ["cat", path], timeout=10.0).stdout)
