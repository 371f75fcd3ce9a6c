"""Loader processes and the signals that launchers send to them."""

import multiprocessing
import os
import signal

import pytest

from utils.loaders import SIGNALS, SteadyLoader, ignore_signals


def signalled_first(worker_id: int) -> None:
    """As from a launcher that stops everything while a loader process is starting."""
    os.kill(os.getpid(), signal.SIGTERM)
    ignore_signals(worker_id)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no masks on this system")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_while_it_starts_does_not_end_it(method):
    loader = SteadyLoader(range(4), num_workers=1)
    loader.worker_init_fn = signalled_first
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS)  # not held any more
