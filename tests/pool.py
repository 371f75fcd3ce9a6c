"""A pool of worker processes that stays up for the whole test session.

Importing torch takes seconds, so the many distributed tests share these processes: each call runs
a function in as many of them as it asks for, with the environment that torchrun would have set.
"""

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback

JOIN_SECONDS = 10.0  # how long peers may go on after one of them has failed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _reset() -> None:
    """Leave nothing of one call to the next: process group, Accelerate's singletons, defaults."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def _serve(connection) -> None:
    import torch
    import torch.distributed as dist

    if "fork" in multiprocessing.get_all_start_methods():  # not this process's own, for loaders
        multiprocessing.set_start_method("fork", force=True)
    clean_environment = dict(os.environ)
    while True:
        try:
            rank, size, port, init, function, args, kwargs = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true",
            OMP_NUM_THREADS="1",
        )
        torch.set_num_threads(1)
        try:
            if init:
                dist.init_process_group("gloo")
                assert dist.get_world_size() == size
            reply = (True, function(*args, **kwargs))
        except BaseException:
            reply = (False, traceback.format_exc())
        try:
            connection.send(reply)
        except Exception:  # what came back cannot be pickled
            connection.send((False, traceback.format_exc()))
        _reset()
        os.environ.clear()
        os.environ.update(clean_environment)


class WorkerPool:
    """Runs a function in `size` gloo processes and returns its results, in the order of ranks."""

    def __init__(self, processes: int = 4):
        self.processes = processes
        self.workers = []

    def _start(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self.workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        self.workers = []

    def run(self, size: int, function, *args, init: bool = True, timeout: float = 120.0, **kwargs):
        """Call `function(*args, **kwargs)` in `size` processes at once.

        `function` must be importable (defined at the top of a test file). With `init` the gloo
        process group is open when it starts, and its size has been asserted; without, the
        function opens it itself (a script's main). Raises AssertionError with the traceback of
        every rank that failed; after a hang or a failure the pool starts afresh.
        """
        assert size <= self.processes
        self._start(size)
        port = free_port()
        for rank in range(size):
            self.workers[rank][1].send((rank, size, port, init, function, args, kwargs))
        replies = {}
        deadline = time.monotonic() + timeout
        while len(replies) < size and time.monotonic() < deadline:
            waiting = [self.workers[rank][1] for rank in range(size) if rank not in replies]
            ready = multiprocessing.connection.wait(waiting, timeout=1.0)
            for rank in range(size):
                if rank not in replies and self.workers[rank][1] in ready:
                    try:
                        replies[rank] = self.workers[rank][1].recv()
                    except EOFError:
                        replies[rank] = (False, "the worker process died")
                    if not replies[rank][0]:
                        deadline = min(deadline, time.monotonic() + JOIN_SECONDS)
        failures = [
            f"rank {rank}: {replies[rank][1] if rank in replies else 'no answer (hung?)'}"
            for rank in range(size)
            if rank not in replies or not replies[rank][0]
        ]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [replies[rank][1] for rank in range(size)]
