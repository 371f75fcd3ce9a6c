"""Before a launch on several machines: do they find each other, and are they alike?

On every machine at about the same time, with the launcher's values:

    python utils/rendezvous.py --num-machines 2 --machine-rank 0 --main-process-ip 10.0.0.1

It ends within --timeout: exit code 0, or 1 and one line for each thing that is wrong. It needs no
GPU and no torch; the port is free again afterwards.
"""

import argparse
import errno
import hashlib
import ipaddress
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this folder's profile.py would hide Python's own
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from utils.environment import environment
from utils.interfaces import (
    REACH_SECONDS,
    find_unreachable,
    interfaces,
    judge_endpoints,
    listen_at,
    open_endpoints,
    resolve,
)

CLOCK_SECONDS = 5.0  # between two machines; heartbeats and file times are compared across them
SAMPLED_FILES, SAMPLED_BYTES = 256, 1 << 16  # of a data set's content
ROOT = Path(__file__).resolve().parents[1]


class Trouble(Exception):
    """One line: what is wrong, with its value and what to do."""


class ForeignAddress(Trouble):
    """Machine 0 is told of an address that is not its own."""


class Link:
    """JSON objects, one a line, over a connection."""

    def __init__(self, connection: socket.socket):
        self._connection, self._rest = connection, b""

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next one. TimeoutError, ConnectionError or ValueError (it is something else)."""
        while b"\n" not in self._rest:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.01))
            chunk = self._connection.recv(1 << 16)
            if not chunk:
                raise ConnectionError("closed")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message

    def close(self) -> None:
        self._connection.close()


# ---- What this machine is --------------------------------------------------------------------


def fingerprint(path: Path) -> str:
    """Of a file or folder: all names and sizes, and the beginning of some files."""
    if not path.exists():
        return "none"
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path).as_posix()} {file.stat().st_size}\n".encode())
    for file in files[:: max(len(files) // SAMPLED_FILES, 1)]:
        with file.open("rb") as content:
            digest.update(content.read(SAMPLED_BYTES))
    return f"{len(files)} files, {digest.hexdigest()[:12]}"


def describe(rank: int, num_machines: int, dataset: str) -> dict[str, Any]:
    """What the machines compare."""
    about = environment()
    code = hashlib.sha256()
    for path in sorted([*(ROOT / "train").glob("*.py"), *(ROOT / "utils").rglob("*.py")]):
        code.update(path.read_bytes())
    alike = {"git commit": about["git_commit"] or "none", "code": code.hexdigest()[:12]}
    alike |= {f"version of {name}": version for name, version in about["versions"].items()}
    if dataset:
        alike[f"data in {dataset}"] = fingerprint(Path(dataset).expanduser())
    alike["number of machines"] = str(num_machines)
    return {"rank": rank, "host": socket.gethostname(), "alike": alike}


# ---- The verdict -----------------------------------------------------------------------------


def compare(machines: list[dict[str, Any]]) -> Iterator[str]:
    """What is not the same on all, from their descriptions; machine 0 first."""
    first = machines[0]
    for other in machines[1:]:
        odd = {k: v for k, v in first["alike"].items() if other["alike"].get(k) != v}
        for key, value in odd.items():
            found = other["alike"].get(key, "not given")
            if key != "code" or "git commit" not in odd:  # which says it already
                yield (
                    f"{key}: {value} on {first['host']}, {found} on {other['host']}; all machines "
                    "need the same command, checkout, packages and data"
                )
        if abs(other["clock"]) > CLOCK_SECONDS:
            ahead = "ahead of" if other["clock"] > 0 else "behind"
            yield (
                f"the clock of {other['host']} is {abs(other['clock']):.0f} s {ahead} that of "
                f"{first['host']}; set both by NTP (timedatectl set-ntp true)"
            )


def name_machines(ranks: list[int], num_machines: int) -> str:
    word, verb = ("machine", "has") if len(ranks) == 1 else ("machines", "have")
    return f"{word} {', '.join(map(str, ranks))} of {num_machines} (ranks from 0) {verb} not come"


# ---- Machine 0 -------------------------------------------------------------------------------


def listen(address: str, port: int) -> socket.socket:
    """Trouble when the port is taken, ForeignAddress when the address is not this machine's."""
    try:
        return listen_at(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            own = ", ".join(f"{a} ({name})" for name, a in interfaces()) or "none"
            raise ForeignAddress(
                f"--main-process-ip {address} is no address of {socket.gethostname()}, which was "
                f"given --machine-rank 0 and has {own}: rank 0 belongs to the machine with that "
                "address, each other one to one machine"
            ) from error
        raise Trouble(
            f"port {port} of {address} cannot be opened ({error.strerror}): another program has "
            "it; choose another --port on all machines (launcher: --main_process_port)"
        ) from error


def host(listener: socket.socket, about: dict[str, Any], size: int, deadline: float) -> list[str]:
    """Wait for all others, compare, tell them. What is wrong."""
    came, links, troubles = {0: about | {"clock": 0.0}}, {}, []
    reserve = min(2 * REACH_SECONDS, 0.3 * (deadline - time.monotonic()))
    while len(came) < size and not troubles:
        left = deadline - reserve - time.monotonic()
        if left <= 0 or not select.select([listener], [], [], left)[0]:
            break
        link = Link(listener.accept()[0])
        try:
            soon = min(time.monotonic() + REACH_SECONDS, deadline)
            other = link.receive(soon)
            asked = time.time()
            link.send({"ask": "clock"})
            clock = link.receive(soon)["clock"]
            other["clock"] = clock - (asked + time.time()) / 2
            rank = int(other["rank"])
        except (OSError, ValueError, KeyError):
            link.close()  # not one of ours: a port scanner, say
            continue
        if rank in came:
            names = f"{came[rank]['host']} and {other['host']}"
            troubles.append(
                f"two machines have --machine-rank {rank}: {names}; give each its own, from 0"
            )
            rank = -len(links) - 1  # to be told, too
        else:
            came[rank] = other
        links[rank] = link
        absent = [r for r in range(size) if r not in came]
        _send_all(links, {"waiting": absent})
    absent = [r for r in range(size) if r not in came]
    machines = [came[rank] for rank in sorted(came)]
    troubles += compare(machines)
    if absent and not troubles:
        troubles.append(
            f"{name_machines(absent, size)}; start the same command there, with its own rank"
        )
    if not absent and not troubles:
        _send_all(links, {"try": machines})
        about["unreachable"] = came[0]["unreachable"] = find_unreachable(machines, 0)
        for rank, link in links.items():
            try:
                came[rank]["unreachable"] = link.receive(deadline)["unreachable"]
            except (OSError, ValueError, KeyError):
                troubles.append(f"{came[rank]['host']} does not answer any more")
        troubles += judge_endpoints(machines)
    _send_all(links, {"verdict": troubles, "hosts": [machine["host"] for machine in machines]})
    for link in links.values():
        with suppress(OSError, ValueError):  # whoever closes first keeps the port for a minute
            link.receive(min(time.monotonic() + 1.0, deadline))
        link.close()
    return troubles


def _send_all(links: dict[int, Link], message: dict[str, Any]) -> None:
    for link in links.values():
        try:
            link.send(message)
        except OSError:  # it has ended meanwhile; whoever waits for it says so
            continue


# ---- The other machines ----------------------------------------------------------------------


def join(where: str, port: int, about: dict[str, Any], size: int, deadline: float) -> list[str]:
    """Find machine 0, tell it what this one is, do what it asks. What is wrong."""
    link = _connect(where, port, deadline)
    waiting: list[int] = []
    try:
        link.send(about)
        while True:
            message = link.receive(deadline)
            if "ask" in message:
                link.send({"clock": time.time()})
            waiting = message.get("waiting", waiting)
            if "try" in message:
                link.send({"unreachable": find_unreachable(message["try"], about["rank"])})
            if "verdict" in message:
                return message["verdict"]
    except TimeoutError:
        silent = "it says nothing: another program may have the port"
        what = name_machines(waiting, size) if waiting else silent
        raise Trouble(f"machine 0 answers at {where} port {port}, but {what}") from None
    except (ConnectionError, ValueError, TypeError) as error:
        raise Trouble(
            f"what answers at {where} port {port} is not this check on machine 0: another program "
            "has the port, or the address is another machine's; choose another --port on all "
            "machines"
        ) from error
    finally:
        link.close()


def _connect(where: str, port: int, deadline: float) -> Link:
    error: OSError = TimeoutError()
    while (left := deadline - time.monotonic()) > 0:
        try:
            return Link(socket.create_connection((where, port), timeout=min(left, REACH_SECONDS)))
        except OSError as failure:
            error = failure
            time.sleep(min(0.2, left))
    if isinstance(error, ConnectionRefusedError):
        raise Trouble(
            f"port {port} of {where} is refused: machine 0 has not come (start the same command "
            "there, with --machine-rank 0), listens on another --port, or a firewall refuses"
        )
    reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
    raise Trouble(
        f"{where} is not reached at port {port} ({reason}): a firewall, another network, the "
        "machine is off, or --main-process-ip is not the address under which others reach it"
    )


def check(arguments: argparse.Namespace) -> list[str]:
    """What is wrong, as all machines see it."""
    deadline = time.monotonic() + arguments.timeout
    name, size, rank = arguments.main_process_ip, arguments.num_machines, arguments.machine_rank
    where = resolve(name)
    if where is None:
        raise Trouble(
            f"--main-process-ip {name} does not resolve on {socket.gethostname()}: give machine "
            "0's IP address, or put the name into /etc/hosts of every machine"
        )
    if ipaddress.ip_address(where).is_loopback and size > 1:
        raise Trouble(
            f"--main-process-ip {name} is {where} on {socket.gethostname()}: each machine's own "
            "loopback; give the address under which the others reach machine 0"
        )
    about = describe(rank, size, arguments.dataset)
    listeners = open_endpoints(about, where)
    try:
        if rank > 0:
            return join(where, arguments.port, about, size, deadline)
        try:
            with listen(where, arguments.port) as listener:
                return host(listener, about, size, deadline)
        except ForeignAddress as trouble:
            try:  # tell the real machine 0, if it is there
                soon = min(deadline, time.monotonic() + REACH_SECONDS)
                return [f"{trouble}", *join(where, arguments.port, about, size, soon)]
            except Trouble:
                raise trouble from None
    finally:
        for listener in listeners:
            listener.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-machines", type=int, required=True)
    parser.add_argument("--machine-rank", type=int, required=True, help="of this one, from 0")
    parser.add_argument(
        "--main-process-ip", required=True, help="address or name of machine 0, as others reach it"
    )
    parser.add_argument("--port", type=int, default=29500, help="the launcher's; default 29500")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds; default 60")
    parser.add_argument("--dataset", default="", help="a folder that must be the same everywhere")
    arguments = parser.parse_args()
    if not 0 <= arguments.machine_rank < arguments.num_machines:
        last = arguments.num_machines - 1
        parser.error(f"--machine-rank {arguments.machine_rank} must be from 0 to {last}")
    if not 0 < arguments.port < 1 << 16:
        parser.error(f"--port {arguments.port} must be from 1 to 65535")
    try:
        troubles = check(arguments)
    except Trouble as trouble:
        troubles = [f"{trouble}"]
    for line in troubles:
        print(f"error: {line}", file=sys.stderr)
    if not troubles:
        size, place = arguments.num_machines, f"{arguments.main_process_ip} port {arguments.port}"
        alike = "with the same code, versions and data"
        print(f"rendezvous  {size} of {size} machines, {alike}; machine 0 holds the store: {place}")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
