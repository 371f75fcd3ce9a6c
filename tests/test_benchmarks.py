"""The benchmarks run and say what they found; nothing here is about speed."""

import json
import os

import pytest

from tests.benchmarks import common, language_model, overhead, scaling, throughput
from tests.benchmarks.peers import PEERS


@pytest.fixture
def one_core():
    """One thread for each process: on a busy machine two wait for each other without end."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def test_overhead(one_core, tmp_path, capsys):
    tiny = "--rounds 2 --updates 1 --images 300 --processes 1 --precisions float32"
    file = tmp_path / "overhead.json"
    status = overhead.main([*tiny.split(), "--json", str(file)])
    [row] = json.loads(file.read_text())["rows"]
    assert len(row["seconds"]) == 2
    assert all(0 < seconds < 60 for blocks in row["seconds"] for seconds in blocks)
    low, high = row["interval"]
    assert low <= row["ratio"] <= high
    assert 0 < row["wait"] < 1
    assert status == (high >= overhead.BOUND or row["wait"] > overhead.MOST_WAIT)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILS" if status else "holds")
    assert f"{row['ratio']:.3f}" in last


@pytest.mark.parametrize(
    ("ratio", "wait", "status"), [(1.02, 0.01, 0), (1.04, 0.01, 1), (1.02, 0.03, 1)]
)
def test_exit_status_of_overhead(ratio, wait, status, capsys):
    seconds = [(ratio, 0.5, 1.0)] * 9
    rows = [overhead.figures(size, "float32", seconds, wait, 2) for size in (1, 2)]
    assert overhead.report(rows) == status
    output = capsys.readouterr().out
    assert f"2 x float32 {ratio:.3f} ({ratio:.3f} to {ratio:.3f})" in output
    assert f"| {2 * ratio:.3f} ({2 * ratio:.3f} to {2 * ratio:.3f}) |" in output


@pytest.mark.slow
def test_language_model(monkeypatch, capsys):
    monkeypatch.delenv("REAL_DATA_DIR", raising=False)
    status = language_model.main("--pairs 2 --updates 1 --cpu-time".split())
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILS" if status else "holds")


@pytest.mark.slow
def test_throughput(one_core, tmp_path, capsys):
    tiny = "--rounds 1 --updates 1 --calibration-rounds 0 --images 300 --processes 1"
    tiny += " --precisions float32 --compile off --only nowhere"
    status = throughput.main([*tiny.split(), "--output", str(tmp_path / "throughput")])
    assert "nowhere: not installed" in (tmp_path / "throughput.md").read_text()
    rows = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["bare", "ours"]
    bare, ours = rows
    assert bare["to_bare"] == [1.0, 1.0, 1.0]
    speedup = ours["images_per_second"][0] / bare["images_per_second"][0]
    assert ours["to_bare"][1] == bare["ours_to_it"][1] == pytest.approx(speedup)
    assert status == any(throughput.misses(row) for row in rows)
    assert capsys.readouterr().out.endswith("FAILS\n" if status else "holds\n")


def updates_of(name: str, precision: str) -> int:
    """How often a peer's loop comes by, stopped at the third time."""
    calls = []

    def pace() -> None:
        calls.append(name)
        if len(calls) == 3:
            raise TimeoutError

    common.as_launched(precision)
    settings = {"workers": 0, "threads": 1, "channels_last": True}
    with pytest.raises(TimeoutError):
        PEERS[name](pace, common.random_data(3 * 128), precision, False, **settings)
    return len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_train(pool, name):
    if name != "bare":
        pytest.importorskip(name)
    for size in (1, 2):
        assert pool.run(size, updates_of, name, "bf16", init=False) == [3] * size


def test_bounds_of_throughput():
    def row(name, size, precision, to_bare, ours_to_it=1.0, compiled=False, settings=None):
        contender = throughput.Contender(name, size, precision, compiled, settings or {})
        return {**vars(contender), "label": contender.label()} | {
            "to_bare": (to_bare,) * 3,
            "ours_to_it": (ours_to_it, 2.0, 2.0),
        }

    assert not throughput.misses(row("ours", 1, "float32", 1.15))
    assert throughput.misses(row("ours", 1, "float32", 1.14))
    hook = {"comm_hook": "bf16"}
    assert not throughput.misses(row("ours", 2, "bf16", 1.45))
    assert throughput.misses(row("ours", 2, "bf16", 1.45, settings=hook))
    assert not throughput.misses(row("timm", 2, "bf16", 3.0, 0.98))
    assert throughput.misses(row("timm", 2, "bf16", 3.0, 0.97, compiled=True))


@pytest.mark.slow
def test_scaling(tmp_path, capsys):
    tiny = "--only order checkpoints --largest 5 --rounds 1 --models squeezenet1_1 --images 300"
    assert scaling.main([*tiny.split(), "--json", str(tmp_path / "scaling.json")]) == 0
    tables = json.loads((tmp_path / "scaling.json").read_text())["tables"]
    assert [row[0] for row in tables["order"]] == ["10^4", "10^5"]
    [[name, parameters, size, *seconds]] = tables["checkpoints"]
    assert float(size) == pytest.approx(8 * float(parameters), rel=0.2)  # weights and momentum
    assert len(seconds) == 2
    assert "| 10^5 |" in capsys.readouterr().out


@pytest.mark.slow
def test_accumulation_sends_the_gradient_once(pool, tmp_path):
    for micro_batch in (4, 2):
        flags = {"global_batch_size": 8, "micro_batch_size": micro_batch, "bn_group": 2}
        task = common.random_data(100), tmp_path / str(micro_batch), flags, 2
        sent, _ = pool.run(2, scaling.gradient_bytes, *task, init=False)
        weights = sum(p.numel() for p in common.build_model().parameters())
        assert sent == 4 * weights
