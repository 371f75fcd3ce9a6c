"""How the processes of one start find each other, and none of an earlier start."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from utils.distributed import collective_timeout

PLACE = "place"  # the scheme of our own address, in torch's way to name them


def meeting_place() -> str | None:
    """The address to give to init_process_group: None, or for torchrun's own a place of its own.

    The store of a launcher outlives restarts: the addresses of processes that are gone are still
    there, and the new ones would wait for them.
    """
    return f"{PLACE}://" if "TORCHELASTIC_RUN_ID" in os.environ else None


def agree_on_place(store: Store, rank: int, world_size: int) -> str:
    """A name that the processes of this start share, and those of no earlier one.

    The number of restarts is none: a node that has come back counts from 0 again.
    """
    own = os.urandom(8).hex()
    if world_size == 1:
        return own
    if rank > 0:
        store.set(f"hello/{rank}", own)
        place = store.get(f"place/{own}").decode()
        store.set(f"{place}/{rank}", "")
        return place
    others = range(1, world_size)
    deadline = time.monotonic() + collective_timeout().total_seconds()
    while True:
        # A hello may be of a process that is gone. Each is answered, and the living ones come.
        for hello in store.multi_get([f"hello/{other}" for other in others]):
            store.set(f"place/{hello.decode()}", own)
        try:
            store.wait([f"{own}/{other}" for other in others], timedelta(seconds=0.5))
            return own
        except DistStoreError:
            if time.monotonic() > deadline:
                raise


def _meet(url: str, **kwargs) -> Iterator[tuple[Store, int, int]]:
    """torch's own meeting, and from there to the place that these processes have agreed on."""
    store, rank, world_size = next(rendezvous("env://", **kwargs))
    yield PrefixStore(agree_on_place(store, rank, world_size), store), rank, world_size


register_rendezvous_handler(PLACE, _meet)
