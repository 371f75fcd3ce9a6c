"""Hangs are reported with stacks and the rank that is behind; slow but alive is no hang."""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

from tests.faults.job import Job
from tests.scripts import read_run
from utils import distributed, hang, marks
from utils.distributed import NoteBoard
from utils.hang import HangWatch, Place
from utils.marks import mark

TIMEOUT = 3.0


def assert_reported(job: Job, behind: int, place: str) -> str:
    started = time.monotonic()
    assert job.wait(60.0) == [1, 1], job.output()
    output = job.output()
    assert re.search(f"behind, so the likely cause: rank {behind}: {place}", output), output
    assert "NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL " in output
    assert output.count("hang: behind") == 1  # one verdict, from one rank
    for rank in range(2):
        stacks = (job.directory / "hang" / f"rank_{rank}.txt").read_text()
        assert "Thread MainThread" in stacks and "job.py" in stacks
        assert f"hang: rank {rank}: no progress for " in output
    status = job.status()
    assert status["state"] == "failed" and f"rank {behind}" in status["reason"]
    assert time.monotonic() - started < 60.0
    return output


def test_a_data_set_that_never_returns(tmp_path):
    job = Job(2, tmp_path / "run", "stuck_data:1:3", hang_timeout=TIMEOUT)
    output = assert_reported(job, 1, "update 3, micro-step 1, data")
    assert "job.py" in output and "getitems" in output  # the innermost script line
    assert re.search(r"rank 0: no progress for \d+ s: update 3, micro-step 1, forward", output)
    waited = [float(s) for s in re.findall(r"no progress for (\d+) s", output)]
    assert min(waited) >= TIMEOUT - 1 and max(waited) <= TIMEOUT + 10


def test_a_rank_that_leaves_the_loop_early(tmp_path):
    job = Job(2, tmp_path / "run", "leave_early:1:3", hang_timeout=TIMEOUT)
    assert_reported(job, 1, "update 3, micro-step 1, data")  # its last mark; rank 0 is further


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "1:evaluation"], ids=["all", "one rank"])
def test_slow_but_alive_is_no_hang(tmp_path, where):
    """First compile, evaluation and save each last twice the timeout."""
    timeout = 1.5
    fault = f"slow:{2 * timeout}" + (f":{where}" if where else "")
    changes = dict(hang_timeout=timeout, epochs=1, micro_batch_size=4)
    job = Job(2, tmp_path / "run", fault, **changes)
    assert job.wait() == [0, 0], job.output()
    run = read_run(job.directory)
    assert run["status"]["state"] == "finished" and run["config"]["world_size"] == 2
    assert not (job.directory / "hang").exists()


# ---- The watch by itself, without waiting ----------------------------------------------------


class Notes(NoteBoard):
    """What another rank has posted, from a dictionary."""

    def __init__(self):
        self.notes: dict[str, str] = {}

    def post(self, key, text):
        self.notes[key] = text

    def read(self, key):
        return self.notes.get(key)


def test_a_store_that_is_out_of_reach_does_not_stop_the_watch(monkeypatch):
    """A cut cable: a question never returns, and later ones are not asked until it does."""
    monkeypatch.setattr(distributed, "NOTE_SECONDS", 0.05)
    joined, asked = threading.Event(), []
    board = NoteBoard("")

    def check(keys):
        asked.append(keys)
        return joined.wait(60.0)

    board._store = SimpleNamespace(check=check, get=lambda key: b"a note")
    assert board.read("place/1") is None and board.is_lost()
    assert board.read("place/2") is None and len(asked) == 1
    joined.set()
    board._overdue.join(60.0)
    assert not board.is_lost() and board.read("place/1") == "a note"


def test_notes_of_several_threads_take_turns():
    """The script leaves while the watch posts: nobody is in the other's way, no note is lost."""
    board, notes, in_use = NoteBoard(""), {}, threading.Lock()
    raised: list = []

    def set(key, text):
        with_the_store = in_use.acquire(blocking=False)
        assert with_the_store  # one connection
        notes[key] = text
        in_use.release()

    def post(name):
        try:
            for number in range(200):
                board.post(f"{name}/{number}", "")
        except Exception as error:
            raised.append(error)

    board._store = SimpleNamespace(set=set)
    threads = [threading.Thread(target=post, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised and len(notes) == 600


@pytest.fixture
def watch(monkeypatch):
    """A watch of rank 0 of 2 with a timeout of 100 s and an interval of 5 s."""
    monkeypatch.setattr(hang, "world_size", lambda: 2)
    marks.start()
    return HangWatch(Notes(), 100.0, 0)


def ticks(watch: HangWatch, seconds: float, peer=None) -> float | None:
    """After how many seconds the watch cries; `peer(seconds)`: what rank 1 posts meanwhile."""
    for now in range(5, int(seconds) + 1, 5):
        if peer is not None:
            watch.board.post("place/1", json.dumps(Place(now, *peer(now))))
        if watch.tick(5.0):
            return now
    return None


def stands(step: int, phase: str, may_take: float = 100.0):
    return lambda now: (step, 0, phase, float(now), may_take)


@pytest.mark.parametrize("phase, seconds", [("data", 105), ("save", 305), ("forward", 105)])
def test_patience_depends_on_the_phase(watch, phase, seconds):
    for step in (1, 2):
        mark("data", step)
        watch.tick(5.0)
    mark(phase)
    watch.tick(5.0)
    assert ticks(watch, 400, stands(2, phase, may_take=0.0)) == seconds


def test_the_first_pass_may_compile(watch):
    mark("data", 8)  # after a resume
    watch.tick(5.0)
    mark("forward", 8)
    watch.tick(5.0)
    assert ticks(watch, 400, stands(8, "forward", 0.0)) == 305


def test_waiting_for_a_rank_that_is_alive_is_no_hang(watch):
    mark("data", 5)
    watch.tick(5.0)
    mark("evaluate reduce", 6)
    alive = ticks(watch, 2000, lambda now: (6, now, "evaluate", 3.0, 100.0))
    assert alive is None
    # Then it stops answering: killed, or frozen.
    assert ticks(watch, 100) == 30 and "rank 1 no longer answers" in watch.verdict()


def test_a_suspended_process_has_not_waited(watch):
    mark("data", 5)
    watch.tick(5.0)
    assert not watch.tick(100000.0)


@pytest.mark.parametrize(
    "own, other, words",
    [
        ((5, "reduce"), (5, "forward"), "likely cause: rank 1: update 5, forward"),
        ((4, "reduce"), (5, "data"), "likely cause: rank 0: update 4, reduce"),
        ((4, "evaluate reduce"), (4, "evaluate"), "likely cause: rank 1: update 4, evaluate"),
        ((5, "reduce"), (5, "reduce"), "all ranks stand at the same place .*network"),
    ],
)
def test_the_rank_behind_is_named(watch, own, other, words):
    mark(own[1], own[0])
    ticks(watch, 500, stands(*other, may_take=0.0))
    assert re.search(words, watch.verdict())


def test_a_rank_that_has_left_is_behind(watch):
    mark("data", 6)
    watch.tick(5.0)
    mark("reduce", 7)
    watch.tick(5.0)
    watch.board.post("left/1", "finished")
    assert ticks(watch, 500, stands(9, "finish")) == 105
    assert "rank 1: left the loop (finished)" in watch.verdict()
