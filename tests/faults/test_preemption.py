"""Signals: everything saved, told apart, and continued as if nothing had happened."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import REPOSITORY
from tests.faults.job import PACE, Job, steps_in, wait_for
from tests.scripts import assert_same_weights, read_run
from tests.test_configs import launch_environment
from utils import errors, guard
from utils.errors import PREEMPTED, ExplainedError
from utils.files import write_json
from utils.guard import Guard, stopped_before_restart


def assert_complete(run: dict, steps: int) -> None:
    """Every update and every evaluation once (read_run refuses duplicates)."""
    assert list(run["metrics"]) == list(range(1, steps + 1))
    for step, values in run["metrics"].items():
        assert "train/loss" in values and ("val/loss" in values) == (step % 4 == 0), step


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run of each number of processes that nobody disturbs."""
    runs = {}

    def get(size: int) -> dict:
        if size not in runs:
            job = Job(size, tmp_path_factory.mktemp(f"whole{size}") / "run")
            assert job.wait() == [0] * size, job.output()
            runs[size] = read_run(job.directory)
            assert runs[size]["config"]["world_size"] == size
        return runs[size]

    return get


@pytest.mark.parametrize(
    "name, rank, workers",
    [("SIGTERM", 0, 2), ("SIGINT", 1, 0), ("SIGUSR1", 1, 0), ("SIGUSR2", 0, 0)],
)
def test_a_signal_to_one_rank_stops_all(tmp_path, uninterrupted, name, rank, workers):
    job = Job(2, tmp_path / "run", PACE, num_workers=workers)
    wait_for(lambda: steps_in(job.directory) >= 1)
    os.kill(job.processes[rank].pid, getattr(signal, name))
    assert job.wait(20.0) == [PREEMPTED] * 2, job.output()
    run = read_run(job.directory)
    assert run["status"]["state"] == "preempted"
    assert run["status"]["reason"] in (f"{name} on rank {rank}", "a signal on another process")
    stopped_at = run["status"]["step"]
    assert 1 <= stopped_at < 8 and max(run["metrics"]) == stopped_at
    assert "everything saved. Continue with:" in job.output()
    assert "Traceback" not in job.output()

    again = Job(2, tmp_path / "run", num_workers=workers)
    assert again.wait() == [0, 0], again.output()
    whole = read_run(job.directory)
    assert_complete(whole, 8)
    assert_same_weights(uninterrupted(2), whole)


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_inside_an_evaluation(tmp_path, uninterrupted, size):
    """It is dropped, and made up for when the run goes on."""
    marker = tmp_path / "in_evaluation"
    # 5 batches in one process, 3 in each of two; a note to the others takes a second.
    micro = dict(micro_batch_size=8)
    job = Job(size, tmp_path / "run", f"pause_in_evaluation:{marker}:1.2", **micro)
    wait_for(marker.exists)
    os.kill(job.processes[-1].pid, signal.SIGTERM)
    assert job.wait(20.0) == [PREEMPTED] * size, job.output()
    assert marker.stat().st_size < (5 if size == 1 else 6)  # batches
    run = read_run(job.directory)
    assert run["status"]["state"] == "preempted" and run["status"]["step"] == 4
    assert "val/loss" not in run["metrics"][4]

    assert Job(size, tmp_path / "run", **micro).wait() == [0] * size
    whole = read_run(job.directory)
    assert_complete(whole, 8)
    for name, value in uninterrupted(size)["model"].items():
        torch.testing.assert_close(whole["model"][name], value, rtol=1e-9, atol=1e-9)


def test_repeated_signals_are_one_and_a_later_one_stops_at_once(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(Guard, "_leave", lambda self, reason: left.append(reason))
    clock = [100.0]
    one = Guard(tmp_path)
    with one:
        monkeypatch.setattr(guard.time, "monotonic", lambda: clock[0])
        one._on_signal("SIGINT")
        clock[0] += 4.9
        one._on_signal("SIGTERM")
        assert one.stop_requested and one.reason == "SIGINT on rank 0" and not left
        clock[0] += 0.2
        one._on_signal("SIGINT")
        assert left == ["SIGINT again: stopped at once, without saving"]
        monkeypatch.undo()


def test_a_second_signal_ends_a_stuck_process_at_once(tmp_path, monkeypatch):
    job = Job(2, tmp_path / "run", "stuck_data:1:3")
    wait_for(lambda: steps_in(job.directory) >= 2)
    for process in job.processes:
        os.kill(process.pid, signal.SIGTERM)
    wait_for(lambda: "another signal later" in job.output())
    stuck = job.processes[0]
    deadline = time.monotonic() + 30.0
    while stuck.is_alive() and time.monotonic() < deadline:
        os.kill(stuck.pid, signal.SIGTERM)
        stuck.join(0.5)
    job.kill()
    assert stuck.exitcode == 1
    assert job.status()["state"] == "failed" and "again: stopped at once" in job.status()["reason"]


def test_handlers_are_put_back(tmp_path, monkeypatch):
    before = {number: signal.getsignal(number) for number in guard.SIGNALS}
    with Guard(tmp_path) as one:
        assert all(signal.getsignal(number) != before[number] for number in guard.SIGNALS)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: one.stop_requested, 5.0)
        assert one.agree_to_stop()
        assert one.reason == "SIGUSR1 on rank 0"
    assert before == {number: signal.getsignal(number) for number in guard.SIGNALS}
    # A process that ends now keeps its exit code when the launcher sends one more.
    monkeypatch.setattr(errors, "ends_the_process", True)
    try:
        with Guard(tmp_path) as one:
            one.stop_requested = True
            assert one.agree_to_stop()
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in guard.SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- Under a launcher ----------------------------------------------------------------------------


def run_command(command: str, directory: Path) -> int:
    """The command that the run has printed, as typed into a shell."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        shlex.split(command),
        env=launch_environment(directory.parent, PATH=path),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        timeout=200,
    ).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, inside", [(1, "epoch"), (2, "epoch"), (1, "evaluation"), (2, "evaluation")]
)
def test_sigterm_to_the_launcher(launch, tmp_path, uninterrupted, size, inside):
    directory, marker = tmp_path / "run", tmp_path / "marker"
    fault = PACE if inside == "epoch" else f"pause_in_evaluation:{marker}:1"
    config = "cpu.yaml" if size == 1 else "cpu_2.yaml"
    one = launch(directory, config, fault=fault, num_workers=2)
    wait_for(marker.exists if inside == "evaluation" else lambda: steps_in(directory) >= 1)
    one.find_family()
    assert len(one.alive()) >= size * 3  # with two loader processes each, or four
    one.process.send_signal(signal.SIGTERM)
    one.wait_until_all_are_gone(20.0)
    assert one.process.wait() != 0
    status = one.status()
    assert status["state"] == "preempted", one.output()
    assert status["step"] == 4 if inside == "evaluation" else 1 <= status["step"] < 8
    lines = one.output().splitlines()
    command = lines[lines.index(next(li for li in lines if "Continue with:" in li)) + 1]
    assert "cpu" in command and str(directory) in command
    assert run_command(command, directory) == 0
    run = read_run(directory)
    assert run["config"]["world_size"] == size and run["status"]["state"] == "finished"
    assert_complete(run, 8)
    assert_same_weights(uninterrupted(size), run)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_launcher_leaves_no_process(launch, tmp_path, size):
    directory = tmp_path / "run"
    config = "cpu.yaml" if size == 1 else "cpu_2.yaml"
    one = launch(directory, config, fault="pace:0.3", num_workers=1, epochs=50)
    wait_for(lambda: steps_in(directory) >= 1)
    one.find_family()
    assert len(one.alive()) >= 2 * size
    one.process.kill()
    one.wait_until_all_are_gone(60.0)
    status = one.status()
    assert status["state"] == "preempted" and "launcher" in status["reason"]
    assert (directory / "checkpoints" / f"step_{status['step']:08d}").is_dir()


@pytest.mark.slow
def test_max_restarts_does_not_restart_a_preempted_run(launch, tmp_path):
    directory = tmp_path / "run"
    one = launch(directory, "cpu_2.yaml", "--max_restarts", "2", epochs=50)
    wait_for(lambda: steps_in(directory) >= 1)
    one.find_family()
    for process in one.alive():  # as SLURM does it: to the processes, not to the launcher
        process.send_signal(signal.SIGUSR1)
    assert one.process.wait(150) != 0
    assert one.status()["state"] == "preempted"
    steps = steps_in(directory)
    assert read_run(directory)["status"]["step"] == max(read_run(directory)["metrics"])
    assert one.output().count("everything saved") == 1  # it was not gone on with
    assert steps < 100


def test_a_restart_is_told_from_a_new_launch(tmp_path, monkeypatch):
    def status(state: str, heartbeat: float, reason: str = "") -> None:
        content = {"state": state, "heartbeat": heartbeat, "reason": reason}
        write_json(tmp_path / "status.json", content)

    status("preempted", time.time())
    assert not stopped_before_restart(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not stopped_before_restart(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert stopped_before_restart(tmp_path)
    status("preempted", psutil.Process(os.getppid()).create_time() - 10)
    assert not stopped_before_restart(tmp_path)  # of an earlier launch
    status("running", time.time())
    assert not stopped_before_restart(tmp_path)
    assert not stopped_before_restart(tmp_path / "nothing")
    status("failed", time.time(), "RuntimeError: connection closed by peer")
    assert not stopped_before_restart(tmp_path)
    for reason in ("NonFiniteError: update 7", "rank 1: OutOfMemory: with micro_batch_size=8"):
        status("failed", time.time(), reason)
        with pytest.raises(ExplainedError, match=f"would fail again: {reason}"):
            stopped_before_restart(tmp_path)
