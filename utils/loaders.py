"""Loader processes that end with the process that trains, and not before.

Launchers signal them too, and a signal that ended one would be taken for a failure of the data.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)  # Windows has two of them
]

# CPython before 3.10.15 and 3.11.10 (gh-112275): a child hangs for ever when, at the fork, another
# thread holds the lock of the list of threads; gloo's take it to drop the tensors of a collective.
# This call waits for that lock and gives it back, right before the fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=sys._current_frames)


class SteadyLoader(DataLoader):
    """A DataLoader whose processes ignore SIGNALS from their first moment on.

    Its generator is its own: each iteration would draw from the global one.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(
            *args, worker_init_fn=ignore_signals, generator=torch.Generator(), **options
        )

    def __iter__(self) -> Any:
        if os.name == "posix" and multiprocessing.get_start_method() != "fork":
            resource_tracker.ensure_running()  # its start would let SIGTERM and SIGINT through
        with _signals_held():
            return super().__iter__()


def ignore_signals(worker_id: int = 0) -> None:
    """In a loader process: from now on, and what has come before."""
    if threading.current_thread() is threading.main_thread():  # workers may be threads
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes that start in here get no signal before `ignore_signals`; this one's own wait."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_loader_processes() -> None:
    """At the end of this process: those that are left ignore the SIGTERM that is meant for them."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own takes their end for a failure
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
