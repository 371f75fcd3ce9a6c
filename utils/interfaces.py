"""Which network interface training would use on this machine, and whether others reach it there.

For utils/rendezvous.py, which needs no torch.
"""

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

REACH_SECONDS = 3.0  # for one machine to reach another
NAME_SECONDS = 5.0  # for a name to resolve


def within(seconds: float, action: Callable[[], T]) -> T | None:
    """Its result, or None: name resolution fails or ignores every timeout."""
    results: list[T] = []

    def call() -> None:
        try:
            results.append(action())
        except OSError:
            pass

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def resolve(name: str) -> str | None:
    """The first address of a host name."""
    found = within(NAME_SECONDS, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    return str(found[0][4][0]) if found else None


def interfaces() -> Iterator[tuple[str, str]]:
    """(name, address) of this machine's network interfaces, without the loopback one."""
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = entry.address.partition("%")[0]
                if not ipaddress.ip_address(address).is_loopback:
                    yield name, address


def interface_towards(address: str) -> str:
    """The interface through which this machine reaches `address`; "" when there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return ""
        own = probe.getsockname()[0]
    return next((name for name, address in interfaces() if address == own), "")


def training_addresses() -> dict[str, str]:
    """{address: why} at which the other machines would look for this one's processes.

    gloo takes GLOO_SOCKET_IFNAME, or what the machine's own name resolves to; NCCL looks for an
    interface by itself, so its variable counts only where it is set. "" as an address: none.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        wanted = chosen.split(",")
        gloo = [address for name, address in interfaces() if name in wanted][:1]
        why = f"GLOO_SOCKET_IFNAME={chosen}"
    else:
        name = socket.gethostname()
        found = resolve(name)
        gloo = [found or "127.0.0.1"]  # what gloo falls back to
        why = f"its own name {name} {'resolves to that' if found else 'does not resolve'}"
    result = {address: why for address in gloo or [""]}
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if chosen:
        exact, prefixes = chosen.lstrip("^").startswith("="), chosen.lstrip("^=").split(",")
        nccl = [
            address
            for name, address in interfaces()
            if any(name == p if exact else name.startswith(p) for p in prefixes)
            != chosen.startswith("^")
        ][:1]
        result |= {address: f"NCCL_SOCKET_IFNAME={chosen}" for address in nccl or [""]}
    return result


def listen_at(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def open_endpoints(about: dict[str, Any], towards: str) -> list[socket.socket]:
    """Listen where the others would look for this machine's processes.

    Adds to `about`: "endpoints", {address: (port, why)}, port 0 where nothing can listen; and the
    "interface" through which this machine reaches `towards`.
    """
    listeners, about["endpoints"] = [], {}
    about["interface"] = interface_towards(towards)
    for address, why in training_addresses().items():
        about["endpoints"][address] = [0, why]
        with suppress(OSError):  # not an address of this machine
            if address:
                listeners.append(listen_at(address, 0))
                about["endpoints"][address] = [listeners[-1].getsockname()[1], why]
    return listeners


def find_unreachable(machines: list[dict[str, Any]], own: int) -> list[str]:
    """Addresses of the other machines that this one does not reach."""
    unreachable = []

    def reach(address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), timeout=REACH_SECONDS).close()
        except OSError:
            unreachable.append(address)

    threads = [
        threading.Thread(target=reach, args=(address, port), daemon=True)
        for machine in machines
        if machine["rank"] != own
        for address, (port, _) in machine["endpoints"].items()
        if port and not ipaddress.ip_address(address).is_loopback
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * REACH_SECONDS)
    return sorted(unreachable)


def judge_endpoints(machines: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with the addresses of all machines, from what they have found.

    "unreachable" of a machine are the addresses that it did not reach.
    """
    for machine in machines:
        for address, (port, why) in machine["endpoints"].items():
            host, name = machine["host"], machine["interface"] or "the right interface"
            fix = f"on {host}: export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
            missing = [m["host"] for m in machines if address in m.get("unreachable", ())]
            if not address:
                yield f"{host} has no such interface or no address on it ({why}); {fix}"
            elif ipaddress.ip_address(address).is_loopback:
                if len(machines) > 1:
                    yield f"{host} would train at {address}, reached by no other ({why}); {fix}"
            elif not port:
                yield f"{host} would train at {address}, which is not its own ({why}); {fix}"
            elif missing:
                yield (
                    f"{', '.join(missing)} cannot reach {host} at {address} port {port} ({why}); "
                    f"wrong interface, or a firewall (training needs all ports); {fix}"
                )
