"""One process raises, is killed or runs out of memory: the others end, and the cause is named."""

import re
import signal
import time

import pytest
import torch

from tests.faults.job import GLOBAL_BATCH, NUM_TRAIN, Job, wait_for
from tests.scripts import assert_same_weights, read_run
from utils.errors import ExplainedError
from utils.order import SampleOrder
from utils.plan import BatchPlan, explain_out_of_memory


@pytest.mark.parametrize("fault, rank", [("raise:1:3", 1), ("raise:0:3", 0)])
def test_a_rank_that_raises_ends_all(tmp_path, fault, rank):
    job = Job(2, tmp_path / "run", fault)
    assert job.wait(60.0) == [1, 1], job.output()
    assert "ZeroDivisionError: one rank fails" in job.output()
    assert job.status()["state"] == "failed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_the_status_is_failed(tmp_path, rank):
    job = Job(2, tmp_path / "run", f"kill:{rank}:3")
    codes = job.wait(60.0)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1, job.output()
    assert job.status()["state"] == "failed"  # by rank 1, where rank 0 is gone


def test_a_sigterm_because_a_peer_died_is_no_preemption(tmp_path):
    """What torchrun does: the others get a SIGTERM when one has failed."""
    job = Job(2, tmp_path / "run", "kill:1:3,pace:0.3")
    wait_for(lambda: not job.processes[1].is_alive())
    job.processes[0].terminate()
    assert job.wait(60.0) == [1, -signal.SIGKILL]
    assert job.status()["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, cause",
    [
        ("raise:1:3", r"rank +: 1 .*ZeroDivisionError: one rank fails"),
        ("kill:1:3", r"rank +: 1 .*Signal 9 \(SIGKILL\)"),
    ],
)
def test_the_launcher_names_the_cause(launch, tmp_path, fault, cause):
    one = launch(tmp_path / "run", "cpu_2.yaml", fault=fault)
    started = time.monotonic()
    assert one.process.wait(120) == 1
    block = one.output().split("Root Cause")[-1]
    assert re.search(cause, block, flags=re.DOTALL), one.output()
    assert one.status()["state"] == "failed"
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_a_restart_by_the_launcher_resumes(launch, tmp_path):
    whole = Job(2, tmp_path / "whole")
    assert whole.wait() == [0, 0]
    once, directory = tmp_path / "once", tmp_path / "run"
    fault = f"kill:1:4:{once}"
    one = launch(directory, "cpu_2.yaml", "--max_restarts", "3", fault=fault, save_every=2)
    assert one.process.wait(200) == 0, one.output()
    assert once.exists() and re.search(r"resume .*step_00000002, after update 2", one.output())
    run = read_run(directory)
    assert list(run["metrics"]) == list(range(1, 9)) and run["config"]["world_size"] == 2
    assert_same_weights(read_run(whole.directory), run)


@pytest.mark.slow
def test_a_failure_that_would_come_again_is_not_trained_towards_again(launch, tmp_path):
    directory = tmp_path / "run"
    bad = SampleOrder(NUM_TRAIN, 0).ids(0, 2 * GLOBAL_BATCH, 2 * GLOBAL_BATCH + 1).item()
    one = launch(directory, "cpu_2.yaml", "--max_restarts", "2", fault=f"nan:{bad}", save_every=1)
    assert one.process.wait(200) == 1, one.output()
    output = one.output()
    assert output.count("error: [rank 0] not restarted, it would fail again: NonFiniteError") == 2
    assert output.count("batchnorm ") == 1  # only the first one came to the banner
    assert one.status()["state"] == "failed"


# ---- Out of memory -------------------------------------------------------------------------------


def test_out_of_memory_is_one_message_from_one_rank(tmp_path):
    job = Job(2, tmp_path / "run", "out_of_memory:0+1:2", bn_group=4)
    assert job.wait(60.0) == [1, 1]
    output = job.output()
    assert output.count("out of memory with micro_batch_size=8") == 1, output
    assert re.search(
        r"error: \[rank [01]\] out of memory with micro_batch_size=8 "
        r"\(update 2, micro-step 1, forward; peak memory \d+\.\d+ GiB; \S+memory_rank_[01].txt\): "
        r"--micro-batch-size 4 --bn-group 4 needs less and keeps the recipe",
        output,
    ), output
    assert len(list((job.directory).glob("memory_rank_*.txt"))) == 1
    assert "out of memory" in job.status()["reason"]
    # What it says works, and is the same recipe.
    smaller = Job(2, tmp_path / "run", micro_batch_size=4, bn_group=4)
    assert smaller.wait() == [0, 0], smaller.output()
    whole = Job(2, tmp_path / "whole", bn_group=4)
    assert whole.wait() == [0, 0]
    for name, value in read_run(whole.directory)["model"].items():
        other = read_run(smaller.directory)["model"][name]
        torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-10)


def test_the_file_says_where_the_memory_is(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "| Allocated |")
    with pytest.raises(ExplainedError, match=r"memory_rank_0.txt\): --micro-batch-size 4"):
        with explain_out_of_memory(BatchPlan(16, 2, 8, 1), 0, tmp_path):
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert "| Allocated |" in (tmp_path / "memory_rank_0.txt").read_text()
