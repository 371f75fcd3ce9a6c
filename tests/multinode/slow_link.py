"""A long, slow cable between two interfaces, as a process: not every kernel has `tc netem`.

    python slow_link.py INTERFACE INTERFACE MBIT_PER_SECOND DELAY_MS

Frames that come in at one go out at the other, each way at that rate and that much later.
"""

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
LIFETIME = 900.0  # seconds, should nobody end it
LARGEST = 1 << 17  # bytes; the kernel hands over several packets as one


def open_end(interface: str) -> socket.socket:
    ethernet = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    ethernet.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # what is left to do: checksums, cutting
    ethernet.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    ethernet.bind((interface, 0))
    return ethernet


def main(first: str, second: str, mbit: str, delay_ms: str) -> None:
    ends = [open_end(first), open_end(second)]
    bytes_per_second, delay = float(mbit) * 1e6 / 8, float(delay_ms) / 1e3
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # from the first, from the second
    free_at = [0.0, 0.0]  # when a direction has sent what it was given
    end_time = time.monotonic() + LIFETIME
    while (now := time.monotonic()) < end_time:
        due = [queue[0][0] for queue in queues if queue]
        ready, _, _ = select.select(ends, [], [], max(min([*due, now + 1.0]) - now, 0.0))
        now = time.monotonic()
        for way, end in enumerate(ends):
            if end in ready:
                frame = end.recv(LARGEST)
                free_at[way] = max(free_at[way], now) + len(frame) / bytes_per_second
                queues[way].append((free_at[way] + delay, frame))
            while queues[way] and queues[way][0][0] <= now:
                ends[1 - way].send(queues[way].popleft()[1])


if __name__ == "__main__":
    with suppress(OSError):  # the interfaces are gone: the network is closed
        main(*sys.argv[1:])
