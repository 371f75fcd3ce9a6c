"""What a run leaves behind: files, statuses, the tracker's record, the command that continues."""

import errno
import io
import json
import math
import os
import shlex
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import PIL.Image
import pytest

from tests.scripts import run_cifar, small_data
from utils import backends, rundir, trackers, tracking
from utils.errors import ExplainedError, UsageError
from utils.pictures import Picture
from utils.rundir import choose_directory, continue_command
from utils.trackers import check_tracker
from utils.tracking import Run, is_finished

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = {"lr": 0.1, "bn_plan": {"group": 4}, "nothing": None, "list": [1, 2], "flag": True}
CONFIG |= {"dataset": "path/to/data", "precision": "no", "world_size": 2}


def lines_of(directory: Path) -> list[dict]:
    text = (directory / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def pairs_of(directory: Path) -> list[tuple]:
    return [(line["step"], key) for line in lines_of(directory) for key in line if key != "step"]


def status_of(directory: Path) -> dict:
    return json.loads((directory / "status.json").read_text())


def log_steps(run: Run, steps) -> None:
    for step in steps:
        run.step = step
        run.log(step, {"train/loss": 1 / step, "data/digest": f"{step:016x}"})
        if step % 3 == 0:
            run.log(step, {"val/loss": 2 / step})


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# ---- Files of a run ----------------------------------------------------------------------------


def test_a_finished_run(tmp_path):
    directory = tmp_path / "a" / "run"
    assert not is_finished(directory)
    start_time = time.time()
    with Run(directory, CONFIG, "none") as run:
        running = status_of(directory)
        assert running["state"] == "running" and running["step"] == 0
        assert running["pid"] == os.getpid() and running["host"]
        assert start_time <= running["heartbeat"] <= time.time()
        assert not is_finished(directory)
        log_steps(run, range(1, 5))
        run.flush()
        run.end("finished")
        assert run.tracker_line() == ""
    assert status_of(directory)["state"] == "finished" and status_of(directory)["step"] == 4
    assert is_finished(directory)
    config = json.loads((directory / "config.json").read_text())
    assert CONFIG.items() <= config.items()
    assert config["versions"]["torch"] and config["versions"]["python"].startswith("3.")
    head = subprocess.run(
        ["git", "-C", REPOSITORY, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert config["git_commit"] == (head.stdout.strip() or None)
    assert [line["step"] for line in lines_of(directory)] == [1, 2, 3, 3, 4]
    assert sorted(contents(directory)) == [
        "config.json", "log.txt", "metrics.jsonl", "status.json"
    ]  # fmt: skip


def test_preempted_failed_and_silent(tmp_path):
    with Run(tmp_path, {}, "none") as run:
        run.step = 7
        run.end("preempted", "--stop-after")
    assert status_of(tmp_path).items() >= {
        "state": "preempted", "reason": "--stop-after", "step": 7
    }.items()  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        with Run(tmp_path, {}, "none", 7) as run:
            run.end("finished")  # too early
            _ = 1 / 0
    assert status_of(tmp_path)["state"] == "failed"
    assert status_of(tmp_path)["reason"] == "ZeroDivisionError: division by zero"
    with Run(tmp_path, {}, "none", 7):
        pass
    assert status_of(tmp_path)["state"] == "failed" and status_of(tmp_path)["reason"]


def test_the_heart_beats_while_running(tmp_path, monkeypatch):
    assert tracking.HEARTBEAT_SECONDS <= 30
    monkeypatch.setattr(tracking, "HEARTBEAT_SECONDS", 0.01)
    with Run(tmp_path, {}, "none") as run:
        first = status_of(tmp_path)["heartbeat"]
        run.step = 5
        deadline = time.monotonic() + 30
        while status_of(tmp_path)["step"] != 5 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert status_of(tmp_path)["step"] == 5 and status_of(tmp_path)["heartbeat"] > first
        run.end("finished")
    assert not run._heartbeat.is_alive()
    assert status_of(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("tail", ["", '{"step": 6, "train/lo', "\0\0\0", '{"step": 6}\n"x'])
def test_metrics_are_complete_and_without_duplicates_after_resumes(tmp_path, tail):
    with Run(tmp_path, {}, "none") as run:
        log_steps(run, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)  # torn by a kill
    with Run(tmp_path, {}, "none", 3) as run:  # the checkpoint was of step 3
        log_steps(run, range(4, 8))
        log_steps(run, [7])  # a second time: left out
        run.log(7, {"train/loss": 99.0, "val/accuracy": 0.5})
    with Run(tmp_path, {}, "none", 6) as run:
        log_steps(run, range(7, 10))
    expected = [(s, k) for s in range(1, 10) for k in ("train/loss", "data/digest")]
    expected += [(3, "val/loss"), (6, "val/loss"), (9, "val/loss")]
    assert sorted(pairs_of(tmp_path)) == sorted(expected)
    for line in lines_of(tmp_path):
        assert line.get("train/loss", 1 / line["step"]) == 1 / line["step"]
    with Run(tmp_path, {}, "none"):  # a fresh start
        assert lines_of(tmp_path) == []


def test_values_that_json_lacks_become_null(tmp_path):
    with Run(tmp_path, {}, "none") as run:
        run.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300, "e": 3, "f": "x"})
    assert lines_of(tmp_path) == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 1e300, "e": 3, "f": "x"}
    ]


def test_a_read_only_run_adds_metrics_and_changes_nothing_else(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(backends, "Wandb", recorder.open)
    with Run(tmp_path, CONFIG, "none") as live:
        log_steps(live, range(1, 4))
        (tmp_path / "checkpoints" / "step_00000009").mkdir(parents=True)
        before = contents(tmp_path)
        with Run(tmp_path, {"other": 1}, "wandb", 2, read_only=True) as reader:
            reader.log(2, {"val/accuracy": 0.5})
            reader.log(2, {"train/loss": 9.0})  # it is there already
            reader.draw(2, lambda: PICTURE)
            assert recorder.job_type == "eval"  # to the tracker it is a run of its own
        assert recorder.calls == [("log", 2), ("log", 2), ("show", 2), ("finish", "finished")]
        after = contents(tmp_path)
        added = after.pop("metrics.jsonl")[len(before.pop("metrics.jsonl")) :]
        assert after == before and json.loads(added) == {"step": 2, "val/accuracy": 0.5}
        assert (tmp_path / "checkpoints" / "step_00000009").exists()
        log_steps(live, [4])  # the other one may be running still
        live.end("finished")
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 3, 2, 4]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "torn')
    with Run(tmp_path, {}, "none", 4, read_only=True) as reader:
        reader.log(4, {"val/accuracy": 0.75})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith('torn\n{"step": 4, "val/accuracy": 0.75}\n')
    assert is_finished(tmp_path)


def test_a_run_that_goes_back_sets_newer_checkpoints_aside(tmp_path, capfd):
    for step in (3, 6):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    with Run(tmp_path, {}, "none", 3):
        pass
    assert [p.name for p in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000003"]
    assert "step_00000006 is newer than update 3" in capfd.readouterr().err


@pytest.mark.parametrize("place", ["below a file", "/proc"])
def test_a_directory_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").write_text("")
    directory = Path("/proc/run") if place == "/proc" else tmp_path / "file" / "run"
    if place == "/proc" and not Path("/proc/self").exists():
        pytest.skip("no /proc")
    with pytest.raises(UsageError, match=f"--output-dir {directory}"):
        Run(choose_directory(str(directory), "auto", "x"), {}, "none")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class FullDisk:
    """A file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = close = lambda self: self.write("")


def test_a_full_disk_is_named_and_ends_as_failed(tmp_path, capfd):
    with pytest.raises(ExplainedError, match=r"metrics.jsonl cannot be written: .*No space left"):
        with Run(tmp_path, {}, "none") as run:
            run._metrics.close()
            run._metrics = FullDisk()
            run.log(1, {"train/loss": 1.0})
    assert status_of(tmp_path)["state"] == "failed"
    assert "No space left" in status_of(tmp_path)["reason"]
    with Run(tmp_path, {}, "none") as run:
        plain = run._metrics
        run._metrics = FullDisk()
        with pytest.raises(OSError, match="No space left"):
            run.flush()  # before a checkpoint, on all ranks
        run._metrics = plain
        run.end("finished")
    capfd.readouterr()


# ---- Pictures ----------------------------------------------------------------------------------


def test_drawing_takes_its_share_of_the_time_only(tmp_path, monkeypatch):
    clock, drawn = [0.0], []
    monkeypatch.setattr(tracking.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(tracking.Curves, "draw", lambda curves: drawn.append("curves") or b"")

    def draw(step: int) -> Picture:
        clock[0] += 2.0
        drawn.append(step)
        return PICTURE

    with Run(tmp_path, {"total_steps": 20}, "none") as run:
        for step in range(1, 21):
            clock[0] += 200.0
            run.draw(step, lambda step=step: draw(step))
        run.end("finished")
    assert drawn.count("curves") == 20
    # 0.5% of 200 s is half of what one takes: every second one, and the last.
    assert [step for step in drawn if step != "curves"] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 20]


def test_a_picture_that_cannot_be_drawn_costs_no_run(tmp_path, capfd):
    with Run(tmp_path, {"total_steps": 1}, "none") as run:
        for step in (1, 2):
            run.draw(step, lambda: 1 / 0)
        (tmp_path / "predictions.png").mkdir()
        run.draw(3, lambda: PICTURE)
        run.end("finished")
    said = capfd.readouterr().err
    assert said.count("not drawn: division by zero") == 1 == said.count("warning")
    assert is_finished(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert not any(".tmp" in name for name in names)


# ---- Where a run lives -------------------------------------------------------------------------


def test_choosing_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    first = choose_directory("", "auto", "cifar")
    assert first.parent == Path("runs") and first.name.startswith("cifar-20")
    assert list(tmp_path.iterdir()) == []  # nothing is created yet
    first.mkdir(parents=True)
    assert choose_directory("", "auto", "cifar") != first
    assert choose_directory("here", "auto", "x") == Path("here")
    assert choose_directory("~/here", "never", "x") == Path.home() / "here"

    saved = tmp_path / "old" / "checkpoints" / "step_00000005"
    saved.mkdir(parents=True)
    for path in ("old", "old/", "old/checkpoints", "old/checkpoints/step_00000005"):
        assert choose_directory("", path, "x").resolve() == tmp_path / "old"
        assert choose_directory("old", path, "x") == Path("old")
    monkeypatch.chdir(saved.parent)
    assert choose_directory("", "step_00000005", "x").resolve() == tmp_path / "old"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "manifest.json").write_text("{}")  # a checkpoint outside of any run
    assert choose_directory("", "copy", "x").parent == Path("runs")
    assert choose_directory("new", "old", "x") == Path("new")

    assert choose_directory("old", "auto", "x") == Path("old")
    for resume in ("never", "copy"):
        with pytest.raises(UsageError, match=f"old already holds a run.*--resume {resume} out"):
            choose_directory("old", resume, "x")

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # it holds the run of this very command
    for resume in ("never", "copy"):
        assert choose_directory("old", resume, "x") == Path("old")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    for resume in ("auto", "old"):
        with pytest.raises(UsageError, match="--max_restarts needs an explicit --output-dir"):
            choose_directory("", resume, "x")
    assert choose_directory("here", "auto", "x") == Path("here")


class Process:
    """A process as psutil shows it."""

    def __init__(self, line: str, parents: tuple["Process", ...] = ()):
        self.line, self._parents = shlex.split(line), list(parents)

    def cmdline(self):
        return self.line

    def parents(self):
        return self._parents


LAUNCHES = {
    # process itself; parents, nearest first; the command that continues
    "python": ("python t/c.py F", (), "python t/c.py G"),
    "python of a venv": ("/v/bin/python -u t/c.py F", ("bash x",), "/v/bin/python -u t/c.py G"),
    "accelerate": (
        "/v/bin/python3 -u t/c.py F",
        ("/v/bin/python3 /v/bin/accelerate launch --config_file a/b.yaml t/c.py F", "bash"),
        "/v/bin/accelerate launch --config_file a/b.yaml t/c.py G",
    ),
    "torchrun": (
        "python -u t/c.py F",
        ("/v/bin/python3.11 /v/bin/torchrun --nproc_per_node 2 t/c.py F",),
        "/v/bin/torchrun --nproc_per_node 2 t/c.py G",
    ),
    "through another process": (
        "python t/c.py F", ("sh", "python /v/torchrun t/c.py F"), "/v/torchrun t/c.py G"
    ),
    "module": (
        "python -u t/c.py F",
        ("python -m torch.distributed.run --nproc_per_node=2 t/c.py F",),
        "python -m torch.distributed.run --nproc_per_node=2 t/c.py G",
    ),
    "accelerate's module, unbuffered": (
        "python -u t/c.py F",
        ("python -u -m accelerate.commands.launch t/c.py F",),
        "python -u -m accelerate.commands.launch t/c.py G",
    ),
    "script as a module": (
        "python -m t.c F", ("python /a/torchrun -m t.c F",), "/a/torchrun -m t.c G"
    ),
    "timeout is no launcher": (
        "python t/c.py F", ("timeout 99 python launch/t/c.py F", "srun x"), "python t/c.py G"
    ),
    "a shell's text is no launcher": (
        "python t/c.py F", ("bash -c 'accelerate launch t/c.py F'",), "python t/c.py G"
    ),
    "called from a test": ("pytest tests", (), f"{shlex.quote(sys.executable)} t/c.py G"),
}  # fmt: skip
FLAGS = {
    "--lr 0.1 --stop-after 5 --model vit": "--lr 0.1 --model vit --output-dir D",
    "--stop_after=5 --output_dir=old --lr=0.1": "--lr=0.1 --output-dir D",
    "--output-dir old --resume runs/a --resume_x 1": "--resume_x 1 --output-dir D",
    "--output-dir= --subset 5": "--subset 5 --output-dir D",
    "--subset 5 --no-eval-only --stop-after 3": "--subset 5 --no-eval-only --output-dir D",
    "--dataset 'my data' --resume never": "--dataset 'my data' --output-dir D",
    "": "--output-dir D",
}


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("flags", FLAGS)
def test_the_command_that_continues(monkeypatch, launch, flags):
    own, parents, expected = LAUNCHES[launch]

    def make(line):
        return line.replace(" F'", "'").replace(" F", f" {flags}")

    process = Process(make(own), tuple(Process(make(line)) for line in parents))
    monkeypatch.setattr(rundir.psutil, "Process", lambda: process)
    monkeypatch.setattr(rundir.shutil, "which", lambda name: None)
    script = "/abs/t/c.py" if launch == "script as a module" else "t/c.py"
    monkeypatch.setattr(sys, "argv", [script, *shlex.split(flags)])
    assert continue_command(Path("D")) == expected.replace(" G", f" {FLAGS[flags]}")


def test_programs_on_the_path_are_named_shortly(monkeypatch, tmp_path):
    tool = tmp_path / "torchrun"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["t/c.py"])
    parent = Process(f"python {tool} --nproc_per_node 2 t/c.py")
    monkeypatch.setattr(rundir.psutil, "Process", lambda: Process("python t/c.py", (parent,)))
    assert continue_command(Path("a b")).startswith(f"{tool} --nproc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert continue_command(Path("a b")) == (
        "torchrun --nproc_per_node 2 t/c.py --output-dir 'a b'"
    )


def test_a_real_process_knows_how_it_was_called(tmp_path):
    script = tmp_path / "my script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from pathlib import Path; from utils.rundir import continue_command\n"
        "print(continue_command(Path('D')))\n"
    )
    words = [sys.executable, "-u", str(script), "--stop-after", "3", "--lr", "1"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shlex.split(said)[1:] == ["-u", str(script), "--lr", "1", "--output-dir", "D"]
    assert os.path.basename(shlex.split(said)[0]) == os.path.basename(sys.executable)


# ---- Trackers ----------------------------------------------------------------------------------

SECRETS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HF_TOKEN": "hf_verySecretToken"}


def wandb_records(path: Path):
    """Records of a .wandb file: a 7-byte header, then LevelDB's log format in 32 KiB blocks."""
    from wandb.proto import wandb_internal_pb2

    content, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # too short for a header: padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += 7
        parts.append(content[position : position + length])
        position += length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def wandb_history(path: Path) -> dict[int, dict]:
    """Values by step."""
    history: dict[int, dict] = {}
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            own = {key: value for key, value in row.items() if not key.startswith("_")}
            history.setdefault(own.pop("step"), {}).update(own)
    return history


def wandb_run(path: Path):
    runs = [r.run for r in wandb_records(path) if r.WhichOneof("record_type") == "run"]
    return runs[0]


def wandb_config(path: Path) -> dict:
    configs = [r.config for r in wandb_records(path) if r.WhichOneof("record_type") == "config"]
    return {item.key: json.loads(item.value_json) for c in configs for item in c.update}


def wandb_summary(path: Path) -> dict:
    """The last value of each; of one with a minimum, say, a dict."""
    summary: dict = {}
    for record in wandb_records(path):
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return summary


def wandb_metrics(path: Path) -> dict[str, str]:
    """The x-axis by metric."""
    records = [r.metric for r in wandb_records(path) if r.WhichOneof("record_type") == "metric"]
    return {m.name or m.glob_name: m.step_metric for m in records}


def wandb_alerts(path: Path) -> list[str]:
    alerts = [r.alert for r in wandb_records(path) if r.WhichOneof("record_type") == "alert"]
    return [f"{alert.level} {alert.title}: {alert.text}" for alert in alerts]


def offline_runs(directory: Path) -> list[Path]:
    """The record files, once wandb's own process has written them to their ends."""
    paths = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + 60
    for path in paths:
        while "exit" not in [record.WhichOneof("record_type") for record in wandb_records(path)]:
            assert time.monotonic() < deadline, path
            threading.Event().wait(0.05)
    return paths


def run_with_wandb(directory: Path, steps: list[int], resume_step: int) -> str:
    from accelerate import PartialState

    os.environ.update(SECRETS, WANDB_MODE="offline")
    assert PartialState(cpu=True).num_processes == 2  # Accelerate's trackers want it
    with Run(directory, CONFIG, "wandb", resume_step) as run:
        log_steps(run, steps)
        run.log(steps[-1], {"val/nothing": math.nan})
        run.flush()
        run.end("finished")
    return run.tracker_line()


def test_wandb_offline_in_two_processes_and_after_a_resume(pool, tmp_path):
    directory = tmp_path / "run"
    lines = pool.run(2, run_with_wandb, directory, [1, 2, 3, 4], 0)
    assert len(offline_runs(directory)) == 1  # one run for all processes
    folder = offline_runs(directory)[0].parent
    assert shlex.split(lines[0])[-3:] == ["wandb", "sync", str(folder)] and lines[1] == ""
    assert list(tmp_path.iterdir()) == [directory]

    def logged() -> dict[int, dict]:
        truth: dict[int, dict] = {}
        for line in lines_of(directory):
            truth.setdefault(line.pop("step"), {}).update(line)
        return truth

    history = wandb_history(offline_runs(directory)[0])
    assert math.isnan(float(history[4].pop("val/nothing")))
    truth = logged()
    assert truth[4].pop("val/nothing") is None
    assert history == truth and sorted(truth) == [1, 2, 3, 4]
    settings = wandb_config(offline_runs(directory)[0])
    written = json.loads((directory / "config.json").read_text())
    assert settings["lr"] == 0.1 and settings["bn_plan/group"] == 4 and settings["flag"] is True
    assert json.loads(settings["list"]) == [1, 2] and json.loads(settings["nothing"]) is None
    assert {key.split("/")[0] for key in settings} >= {*written} - {"wandb_run_id"}
    about, metrics = (
        wandb_run(offline_runs(directory)[0]),
        wandb_metrics(offline_runs(directory)[0]),
    )
    assert about.job_type == "train" and about.display_name == "run" and "2 processes" in about.tags
    assert about.run_group.split("-")[-1] == backends.recipe_group(written).split("-")[-1]
    assert "continue with: " in about.notes
    assert metrics["*"] == metrics["val/loss"] == metrics["val/miou"] == "step"
    summary = wandb_summary(offline_runs(directory)[0])
    assert summary["train/loss"] == {"min": 1 / 4, "last": 1 / 4}
    assert summary["val/loss"]["min"] == 2 / 3

    lines = pool.run(2, run_with_wandb, directory, [4, 5], 3)
    first, second = offline_runs(directory)
    assert wandb_run(first).run_id == wandb_run(second).run_id
    config = json.loads((directory / "config.json").read_text())
    assert wandb_run(first).run_id == config["wandb_run_id"]
    assert shlex.split(lines[0])[-2:] == [str(first.parent), str(second.parent)]  # both, to sync
    assert wandb_run(first).run_group == wandb_run(second).run_group
    both = {**wandb_history(first), **wandb_history(second)}
    assert sorted(both) == sorted(logged()) == [1, 2, 3, 4, 5]
    assert all(both[s]["train/loss"] == logged()[s]["train/loss"] for s in both)
    assert len(pairs_of(directory)) == len(set(pairs_of(directory)))

    for path, content in contents(directory).items():
        for secret in SECRETS.values():
            assert secret.encode() not in content, path


@pytest.mark.slow  # half a minute
def test_wandb_has_all_of_a_script_s_metrics_pictures_and_summary(pool, tmp_path):
    recipe = dict(global_batch_size=16, bn_group=8, lr=0.02, tracker="wandb", save_every=3)
    recipe |= {"output_dir": str(tmp_path), "max_steps": 8, "eval_every": 3}
    data = small_data(40, 37)
    for more in ({"stop_after": 4}, {}):
        run = pool.run(2, run_cifar, {**recipe, **more}, data, init=False)[0]
    assert run["config"]["world_size"] == 2
    paths = offline_runs(tmp_path)
    assert len(paths) == 2 and len({wandb_run(path).run_id for path in paths}) == 1
    first, second = map(wandb_history, paths)
    assert max(first) == 4 and min(second) == 5  # the axis goes on
    for step, values in run["metrics"].items():
        found = {**first, **second}[step]
        assert {key: found[key] for key in values} == values
    row = second[8]  # the picture of the last update; this run is too short for more
    with PIL.Image.open(paths[1].parent / "files" / row["val/predictions.path"]) as image:
        assert image.size == (1200, 640)
    table = json.loads((paths[1].parent / "files" / row["val/samples.path"]).read_text())
    assert table["columns"] == ["id", "true", "predicted", "probability"]
    assert 0 < len(table["data"]) <= 16
    for path in paths:
        settings = wandb_config(path)
        assert settings["bn_plan/group"] == 8 and settings["world_size"] == 2
        assert all(settings[key] == value for key, value in recipe.items())
    losses = [values["val/loss"] for s, values in run["metrics"].items() if "val/loss" in values]
    assert wandb_summary(paths[1])["val/loss"]["min"] == min(losses[1:])
    assert (tmp_path / "predictions.png").stat().st_size > 1000
    log = (tmp_path / "log.txt").read_text()
    assert log.count("preempted: --stop-after") == 1 and log.count("  finished  ") == 1
    assert "evaluation after" in log and "world" in log and "wandb sync" in log


def alert_and_show(directory: Path) -> None:
    from accelerate import PartialState

    os.environ.update(WANDB_MODE="offline", WANDB_TAGS="mine,own")
    PartialState(cpu=True)
    pixels = PIL.Image.new("RGB", (20, 10), "red")
    file = io.BytesIO()
    pixels.save(file, "PNG")
    picture = Picture(file.getvalue(), ["id", "true"], [[7, "cat"], [9, "dog"]])
    with Run(directory, CONFIG, "wandb") as run:
        run.log(1, {"train/loss": 1.0, "val/loss": 2.0})
        run.draw(1, lambda: picture)
        log_steps(run, [2])
        run.end("preempted", "SIGTERM on rank 0")


def test_wandb_gets_pictures_tables_and_alerts_offline(pool, tmp_path):
    pool.run(1, alert_and_show, tmp_path)
    (path,) = offline_runs(tmp_path)
    history = wandb_history(path)
    assert sorted(history) == [1, 2] and history[1]["train/loss"] == 1.0
    row = history[1]
    with PIL.Image.open(path.parent / "files" / row["val/predictions.path"]) as image:
        assert image.size == (20, 10) and image.getpixel((3, 3))[:3] == (255, 0, 0)
    table = json.loads((path.parent / "files" / row["val/samples.path"]).read_text())
    assert table["columns"] == ["id", "true"] and table["data"] == [[7, "cat"], [9, "dog"]]
    (alert,) = wandb_alerts(path)
    assert alert == f"WARN {tmp_path.name}: preempted: SIGTERM on rank 0"
    assert list(wandb_run(path).tags) == ["mine", "own"]  # the user's environment goes before


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"world_size": 8}, {"bn_plan": {"group": 4, "n": 1}}]
)
def test_seeds_and_layouts_of_a_recipe_are_one_group(change):
    config = {**CONFIG, "seed": 0}
    name = backends.recipe_group(config)
    assert backends.recipe_group({**config, **change}) == name
    for other in ({"lr": 0.2}, {"bn_plan": {"group": 8}}, {"total_steps": 7}):
        assert backends.recipe_group({**config, **other}) != name


def run_without_the_service(directory: Path, mode: str) -> list[str]:
    from accelerate import PartialState

    PartialState(cpu=True)
    os.environ["WANDB_MODE"] = mode
    if (
        mode == "offline"
    ):  # there is a file where its folder would be, and the next choice fails too
        (directory / "wandb").write_text("")
        os.environ["TMPDIR"] = str(directory / "wandb")
    with Run(directory, CONFIG, "wandb") as run:
        log_steps(run, [1, 2, 3])
        run.draw(3, lambda: PICTURE)
        run.end("finished")
    return [run.tracker_line(), status_of(directory)["state"]]


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb_disabled_or_without_a_place_to_write(pool, tmp_path, mode):
    assert pool.run(1, run_without_the_service, tmp_path, mode) == [["", "finished"]]
    assert len(lines_of(tmp_path)) == 4


def test_offline_without_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.example.org/")
    assert not backends.has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.example.org login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    assert backends.has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not backends.has_wandb_key()
    (tmp_path / "netrc").write_text("garbage")
    assert not backends.has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert backends.has_wandb_key()


def run_out_of_reach(directory: Path) -> str:
    from accelerate import PartialState

    PartialState(cpu=True)
    os.environ.update(WANDB_API_KEY=SECRETS["WANDB_API_KEY"], WANDB_BASE_URL="http://127.0.0.1:9")
    with Run(directory, CONFIG, "wandb") as run:
        log_steps(run, [1, 2])
        run.end("finished")
    assert run._tracker.failures == 0
    return run.tracker_line()


@pytest.mark.slow  # the timeout is 20 s
def test_a_server_out_of_reach_leaves_an_offline_run(pool, tmp_path):
    (line,) = pool.run(1, run_out_of_reach, tmp_path)
    (path,) = offline_runs(tmp_path)
    assert str(path.parent) in line and sorted(wandb_history(path)) == [1, 2]
    assert not any(b"0123456789abcdef" in content for content in contents(tmp_path).values())


class Recorder:
    """In the place of backends.Wandb: remembers the calls in their order, or does what is wanted.

    Args:
        on_log: called with the number of the call, from 1, and its step.
    """

    def __init__(self, on_log=lambda number, step: None):
        self.on_log = on_log
        self.calls, self.number = [], 0

    def open(self, directory, run_id, config, job_type):
        self.job_type = job_type
        return self

    def log(self, step, values):
        self.number += 1
        self.on_log(self.number, step)
        self.calls.append(("log", step))

    def show(self, step, picture):
        self.calls.append(("show", step))

    def alert(self, state, title, text):
        self.calls.append(("alert", f"{title}: {text}"))

    def finish(self, state):
        self.calls.append(("finish", state))

    def steps(self) -> list[int]:
        return [what for kind, what in self.calls if kind == "log"]


PICTURE = Picture(b"PNG", ["id"], [[1]])


def test_calls_keep_their_order(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(backends, "Wandb", recorder.open)
    with Run(tmp_path, {}, "wandb") as run:
        log_steps(run, [1, 2])
        run.draw(2, lambda: PICTURE)
        log_steps(run, [3])
        run.report("running", "not finite, left out: update 3")
        run.end("preempted", "SIGTERM on rank 1")
    assert recorder.job_type == "train"
    name = tmp_path.name
    assert recorder.calls == [
        *[("log", 1), ("log", 2), ("show", 2), ("log", 3), ("log", 3)],
        ("alert", f"{name}: running: not finite, left out: update 3"),
        ("alert", f"{name}: preempted: SIGTERM on rank 1"),
        ("finish", "preempted"),
    ]
    assert (tmp_path / "predictions.png").read_bytes() == PICTURE.png
    with pytest.raises(ZeroDivisionError):
        with Run(tmp_path, {}, "wandb", 3):
            _ = 1 / 0
    failure = f"{name}: failed: ZeroDivisionError: division by zero"
    assert recorder.calls[-2:] == [("alert", failure), ("finish", "failed")]


def test_a_tracker_that_fails_in_the_middle(tmp_path, monkeypatch, capfd):
    """Its connection comes and goes: tried again, warned of once, counted."""

    def fail(number, step):
        if step in (2, 3):
            raise ConnectionError("connection reset\nby peer")

    flaky = Recorder(fail)
    monkeypatch.setattr(backends, "Wandb", flaky.open)
    with Run(tmp_path, {}, "wandb") as run:
        log_steps(run, range(1, 6))
        run.end("finished")
    assert flaky.steps() == [1, 4, 5] and flaky.calls[-1] == ("finish", "finished")
    said = capfd.readouterr().err
    assert said.count("connection reset") == 1 and "by peer" not in said
    assert "failed 3 times" in said  # step 3 has two lines
    assert status_of(tmp_path)["state"] == "finished"
    assert sorted({line["step"] for line in lines_of(tmp_path)}) == [1, 2, 3, 4, 5]


def test_a_tracker_that_goes_on_failing_is_left_behind(tmp_path, monkeypatch, capfd):
    def fail(number, step):
        if number >= 3:
            raise RuntimeError("gone")

    broken = Recorder(fail)
    monkeypatch.setattr(backends, "Wandb", broken.open)
    with Run(tmp_path, {}, "wandb") as run:
        log_steps(run, range(1, 31))
        run.end("finished")
    assert broken.number == 2 + trackers.MOST_FAILURES_IN_A_ROW
    assert broken.calls == [("log", 1), ("log", 2), ("finish", "finished")]
    said = capfd.readouterr().err
    assert said.count("gone") == 1 and said.count("warning") == 2
    assert len(lines_of(tmp_path)) == 40 and is_finished(tmp_path)


def test_a_tracker_that_hangs_delays_no_update_and_the_end_for_a_while(
    tmp_path, monkeypatch, capfd
):
    released, hanging = threading.Event(), threading.Event()

    def hang(number, step):
        if number == 3:
            hanging.set()
            released.wait(60)

    recorder = Recorder(hang)
    monkeypatch.setattr(backends, "Wandb", recorder.open)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1.0)
    monkeypatch.setattr(trackers, "MOST_WAITING", 20)
    with Run(tmp_path, {}, "wandb") as run:
        slowest = 0.0
        for step in range(1, 101):
            start_time = time.monotonic()
            run.log(step, {"train/loss": 1.0})
            slowest = max(slowest, time.monotonic() - start_time)
            if step == 3:
                assert hanging.wait(60)
        run.end("finished")
        start_time = time.monotonic()
    seconds = time.monotonic() - start_time
    assert slowest < 1.0 and 1.0 <= seconds < 30.0
    assert is_finished(tmp_path) and len(lines_of(tmp_path)) == 100
    said = capfd.readouterr().err
    assert "did not end in 1 s" in said and said.count("it misses entries") == 1
    left_out = run._tracker.left_out
    assert left_out >= 100 - 3 - 20 and f"missed {left_out} entries" in said
    released.set()
    run._tracker._thread.join(60)
    assert recorder.steps() == sorted(recorder.steps()) and len(recorder.steps()) <= 23
    assert recorder.calls[-1] == ("finish", "finished")


def test_a_tracker_whose_package_is_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert check_tracker("none") == "none"
    assert check_tracker("wandb") == "none"
    assert "wandb is not installed" in capfd.readouterr().err
    with Run(tmp_path, {}, "wandb") as run:  # a broken installation
        run.log(1, {"train/loss": 1.0})
        run.end("finished")
    assert "the tracker failed" in capfd.readouterr().err
    assert status_of(tmp_path)["state"] == "finished" and len(lines_of(tmp_path)) == 1
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        check_tracker("tensorboard")


def test_tensorboard_reads_back_the_same(tmp_path, capfd):
    pytest.importorskip("tensorboard")
    from accelerate import PartialState
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    PartialState(cpu=True)
    file = io.BytesIO()
    PIL.Image.new("RGB", (20, 10), "red").save(file, "PNG")
    for steps, resume_step in ((range(1, 6), 0), (range(4, 8), 3)):
        with Run(tmp_path, CONFIG, "tensorboard", resume_step) as run:
            log_steps(run, steps)
            run.draw(run.step, lambda: Picture(file.getvalue(), ["id"], [[7]]))
            run.end("finished")
        assert run._tracker.failures == 0, capfd.readouterr().err
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for key in ("train/loss", "val/loss"):
        truth = {line["step"]: line[key] for line in lines_of(tmp_path) if key in line}
        found = {event.step: event.value for event in events.Scalars(key)}
        assert found == pytest.approx(truth, rel=1e-6)  # it keeps float32
        assert len(events.Scalars(key)) == len(truth)  # none twice after the resume
    assert [event.step for event in events.Images("val/predictions")] == [7]
    texts = {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}
    assert texts == {"data/digest", "val/samples"}


# ---- Several processes -------------------------------------------------------------------------


def choose_and_run(root: Path) -> tuple[str, bool]:
    import torch.distributed as dist

    os.chdir(root)
    directory = choose_directory("", "auto", "cifar")
    with Run(directory, {}, "none") as run:
        run.log(1, {"rank": dist.get_rank()})
        run.flush()
        run.end("finished")
    dist.barrier()
    finished = is_finished(directory)
    os.chdir(REPOSITORY)
    return str(directory), finished


def test_only_the_main_process_writes(pool, tmp_path):
    (one, finished), (other, also) = pool.run(2, choose_and_run, tmp_path)
    assert one == other and finished and also
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [Path(one).name]
    assert lines_of(tmp_path / one) == [{"step": 1, "rank": 0}]


def fail_to_open(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        Run(directory, {}, "none")
    return str(caught.value)


def test_all_ranks_learn_of_a_bad_directory(pool, tmp_path):
    (tmp_path / "file").write_text("")
    for message in pool.run(2, fail_to_open, tmp_path / "file" / "run"):
        assert "cannot be written" in message
