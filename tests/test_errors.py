"""Errors, exit codes, files, console, and what all processes learn of one's failure."""

import errno
import json
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from utils import console
from utils.console import Progress, Table, say, warn
from utils.distributed import (
    all_reduce_sum,
    broadcast_object,
    gather_objects,
    on_main_process,
    rank,
    world_size,
)
from utils.errors import (
    PRINT_SECONDS,
    ExplainedError,
    UsageError,
    exit_with,
    first_line,
)
from utils.files import read_json, read_json_lines, read_tensors, write_json, write_text
from utils.flags import NOT_NEGATIVE, POSITIVE, RunFlags, check_flags

# ---- Flags and exit codes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, good, bad",
    [
        ("positive", [1, 1e-9], [0, -1, float("nan")]),
        ("not_negative", [0, 0.0, 3], [-1, -1e-9, float("nan")]),
        ("below_one", [0, 0.5, 0.999], [1, 1.0, -0.1, float("nan")]),
        ("share", [0.01, 1], [0, 1.01, float("nan")]),
        ("from_minus_one", [-1, 0, 3], [-2, -1.5, float("nan")]),
    ],
)
def test_flags_out_of_range(rule, good, bad):
    run = asdict(RunFlags())
    for value in good:
        check_flags({**run, "some_flag": value, "other": -5}, **{rule: "some_flag"})
    for value in bad:
        with pytest.raises(UsageError, match=rf"^--some-flag {value} must "):
            check_flags({**run, "ok": 0.5, "some_flag": value}, **{rule: "ok some_flag"})
    with pytest.raises(KeyError):
        check_flags(run, positive="no_such_flag")


@pytest.mark.parametrize("name", [*POSITIVE.split(), *NOT_NEGATIVE.split()])
def test_common_flags_out_of_range(name):
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')} -1 must "):
        check_flags({**asdict(RunFlags()), name: -1})


def leave(error) -> int:
    def main() -> int:
        if isinstance(error, BaseException):
            raise error
        return error

    with pytest.raises(SystemExit) as caught:
        exit_with(main)
    return caught.value.code or 0


@pytest.mark.parametrize(
    "outcome, code, message",
    [
        (0, 0, ""),
        (75, 75, ""),
        (UsageError("--lr 0 must"), 2, "error: --lr 0 must\n"),
        (ExplainedError("out of memory"), 1, "error: [rank 3] out of memory\n"),
        (SystemExit(2), 2, ""),
    ],
)
def test_exit_codes_and_one_line(monkeypatch, capfd, outcome, code, message):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert leave(outcome) == code
    assert capfd.readouterr().err == message


def test_one_process_of_a_machine_prints_what_all_know(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)  # until the other one has printed
    assert leave(UsageError("--lr")) == 2
    assert capfd.readouterr().err == "" and waited == [PRINT_SECONDS]
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    assert leave(ExplainedError("x")) == 1
    assert capfd.readouterr().err == "error: [rank 0] x\n"


def test_other_errors_keep_their_traceback():
    def main() -> int:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        exit_with(main)


@pytest.mark.parametrize("kind", [UsageError, ExplainedError, ZeroDivisionError])
def test_errors_go_to_the_launchers_summary(tmp_path, monkeypatch, kind):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def main() -> int:
        raise kind("the reason")

    with pytest.raises((SystemExit, ZeroDivisionError)):
        exit_with(main)
    assert "the reason" in json.loads(file.read_text())["message"]["message"]


def test_first_line():
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"  # type: ignore[arg-type]


# ---- Processes ---------------------------------------------------------------------------------


class Local(Exception):
    pass


def failing(kind: str) -> tuple[str, str]:
    class Unpicklable(Exception):
        pass

    error = {
        "usage": UsageError("--x is wrong"),
        "explained": ExplainedError("no space"),
        "other": FileNotFoundError(errno.ENOENT, "missing", "file"),
        "unpicklable": Unpicklable("odd"),
    }[kind]
    called = []

    def work():
        called.append(rank())
        raise error

    try:
        on_main_process(work)
    except Exception as caught:
        assert called == ([0] if rank() == 0 else [])
        return type(caught).__name__, str(caught)
    raise AssertionError("no error")


@pytest.mark.parametrize("kind", ["usage", "explained", "other", "unpicklable"])
def test_a_failure_of_rank_0_ends_all(pool, kind):
    first, *others = pool.run(3, failing, kind)
    name, message = first
    if kind == "usage":
        assert others == [first] * 2 == [("UsageError", "--x is wrong")] * 2
    else:
        assert others == [("ExplainedError", f"rank 0: {name}: {message}")] * 2


def talk() -> tuple:
    result = on_main_process(lambda: {"rank": rank()})
    heard = broadcast_object(f"from {rank()}")
    total = all_reduce_sum(torch.tensor([rank() + 1, 2**53 + 1]))
    return result, heard, list(gather_objects(rank() * 10)), total.tolist(), world_size()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_talking_to_each_other(pool, size):
    expected = (
        {"rank": 0},
        "from 0",
        [10 * i for i in range(size)],
        [size * (size + 1) // 2, (2**53 + 1) * size],
        size,
    )
    assert pool.run(size, talk) == [expected] * size


def test_everything_works_without_a_process_group():
    assert (rank(), world_size()) == (0, 1)
    assert talk() == ({"rank": 0}, "from 0", [0], [1, 2**53 + 1], 1)
    with pytest.raises(ZeroDivisionError):
        on_main_process(lambda: 1 / 0)


# ---- Files -------------------------------------------------------------------------------------


def test_json_files(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path) is None
    write_json(path, {"a": [1, None, "\u00e4"]})
    assert read_json(path) == {"a": [1, None, "\u00e4"]} and path.read_text().endswith("}\n")
    for broken in (b'{"a": [1', b"\xff\xfe", b""):
        path.write_bytes(broken)
        assert read_json(path) is None
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and path.read_bytes() == b""


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_lines_that_a_kill_has_torn(tmp_path):
    path = tmp_path / "a.jsonl"
    assert read_json_lines(path) == []
    path.write_bytes(b'{"a": 1}\n\n[1]\n5\n{"a": \xff}\n{"a": 2}\n{"a": 3')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]


def test_tensor_files(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(3)}, path)
    for mmap in (False, True):
        assert read_tensors(path, mmap=mmap)["a"].tolist() == [0, 1, 2]
        with pytest.raises(OSError):
            read_tensors(tmp_path / "missing", mmap=mmap)
    content = path.read_bytes()
    for broken in (b"", b"x", content[: len(content) // 2], content[len(content) // 2 :]):
        path.write_bytes(broken)
        for mmap in (False, True):
            with pytest.raises(ValueError, match=r"a\.pt is broken"):
                read_tensors(path, mmap=mmap)


# ---- Console -----------------------------------------------------------------------------------


def test_plain_lines_come_every_few_seconds_and_at_the_end(capfd, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    progress = Progress(total=100, done=0)
    for step in range(1, 101):
        clock[0] += 0.5
        progress.update(step, f"loss {step}")
    progress.close()
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "step 1/100  loss 1" and lines[-1] == "step 100/100  loss 100"
    assert [line.split("/")[0] for line in lines[:3]] == ["step 1", "step 11", "step 21"]


def test_a_bar_on_a_terminal(capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(total=10, done=4)
    progress.update(7, "loss 1.0")
    say("a line")
    progress.close()
    said = capfd.readouterr()
    assert "7/10" in said.err and said.out == "a line\n"


def test_a_bar_is_drawn_a_few_times_a_second_and_at_the_end(monkeypatch):
    clock, shown = [0.0], []
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(total=100, done=0)
    monkeypatch.setattr(progress._bar, "set_postfix_str", shown.append)
    for step in range(1, 101):
        clock[0] += 0.03
        progress.update(step, f"loss {step}")
    progress.close()
    assert shown[:3] == ["loss 1", "loss 5", "loss 9"] and shown[-1] == "loss 100"


def test_evaluations_are_a_table(capfd):
    table = Table()
    table.row(117, 1.04, loss=1.5, accuracy=0.5)
    table.row(1234567, 10.4, loss=12.25, accuracy=1.0)
    table.row(2345678, 20.0, loss=0.125, classes=11)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        "evaluation after epoch loss accuracy".split(),
        "update 117 1.0 1.5000 0.5000".split(),
        "update 1234567 10.4 12.2500 1.0000".split(),
        "update 2345678 20.0 0.1250 11".split(),
    ]
    assert len({len(line) for line in lines}) == 1


def test_the_log_file_has_what_was_said_but_no_bar(tmp_path, capfd, monkeypatch):
    path = tmp_path / "log.txt"
    console.open_log(None)
    say("before there is a directory")
    console.open_log(path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(total=10, done=4)
    progress.update(10, "loss 1.0")
    progress.close()
    warn("careful\nvery")
    console.open_log(None)
    say("of the next run")
    lines = path.read_text().splitlines()
    assert [line[21:] for line in lines] == [
        "before there is a directory", "step 10/10  loss 1.0", "warning: careful", "very"
    ]  # fmt: skip
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    console.open_log(tmp_path / "missing" / "log.txt")  # costs the log, not the run
    say("on the console")
    assert "cannot be written" in capfd.readouterr().err
    console.open_log(None)


def speak(directory: Path) -> None:
    out = os.open(directory / f"{rank()}.txt", os.O_CREAT | os.O_WRONLY)
    saved = [os.dup(1), os.dup(2)]
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        say("to the reader")
        warn("careful")
        Progress(total=1, done=0).update(1, "x")
        sys.stdout.flush()
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)


def test_only_the_main_process_speaks_and_warnings_carry_the_rank(pool, tmp_path):
    pool.run(2, speak, tmp_path)
    first, second = ((tmp_path / f"{i}.txt").read_text() for i in range(2))
    assert "to the reader" in first and "warning: [rank 0] careful" in first
    assert second == "warning: [rank 1] careful\n"


def test_alone_a_warning_needs_no_rank(capfd):
    warn("careful")
    assert capfd.readouterr().err == "warning: careful\n"
