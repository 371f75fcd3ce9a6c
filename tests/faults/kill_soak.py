"""Kill a run again and again, at any moment, and continue it in another layout each time.

    python tests/faults/kill_soak.py --kills 50

The weights must be those of the run that nobody disturbs, every update must stand in metrics.jsonl
exactly once, and no kill may leave a newest checkpoint that cannot be used.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.job import EPOCH_STEPS, Job, steps_in
from tests.scripts import read_run, relative_difference
from utils.checkpoint import find_checkpoint

LAYOUTS = [(1, 16), (1, 8), (2, 8), (2, 4), (4, 4), (4, 2)]  # processes, micro-batch; groups of 8
TOLERANCE = 1e-10


def unfinished(directory: Path) -> set[tuple[str, int]]:
    """The folders of saves that have begun; a killed one stays until the next save."""
    found = set()
    for path in (directory / "checkpoints").glob(".writing_*"):
        with suppress(FileNotFoundError):  # just renamed
            found.add((path.name, path.stat().st_ino))
    return found


def newest(directory: Path) -> int:
    """The newest checkpoint by its name, which must be usable."""
    steps = sorted(int(p.name[5:]) for p in (directory / "checkpoints").glob("step_*"))
    if not steps:
        return 0
    found = find_checkpoint(directory)
    assert found is not None and found.step == steps[-1], f"{steps[-1]} cannot be used"
    return found.step


def soak(directory: Path, kills: int, seed: int = 0, save_every: int = 3) -> dict[str, int]:
    """Run to the end through `kills` kills; half of them wait for a save. Figures of what happened.

    A run of 6 updates for each kill: most starts get to a save and beyond.
    """
    rng = random.Random(seed)
    epochs = max(-(-6 * kills // EPOCH_STEPS), 2)
    changes = dict(epochs=epochs, save_every=save_every, eval_every=10)
    whole = Job(1, directory / "whole", **changes)
    assert whole.wait(1000.0) == [0], whole.output()
    run, inside, starts = directory / "run", 0, 0
    for kill in range(kills):
        before = newest(run)
        old, lines = unfinished(run), steps_in(run)
        processes, micro = rng.choice(LAYOUTS)
        job = Job(processes, run, micro_batch_size=micro, **changes)
        starts += 1
        # In a save of this start, at any moment after it, or while it trains; before work runs out.
        most = epochs * EPOCH_STEPS * (kill + 1) // kills - 2
        way, patience, deadline = kill % 4, rng.uniform(0.0, 2.0), time.monotonic() + 200.0
        since = time.monotonic() if way == 1 else None
        while any(process.is_alive() for process in job.processes):
            assert time.monotonic() < deadline, job.output()[-2000:]
            if way in (0, 2) and unfinished(run) - old:
                break
            if since is None and steps_in(run) != lines:
                since = time.monotonic()
            if way in (1, 3) and since is not None and time.monotonic() - since > patience:
                break
            if steps_in(run) > max(most, lines + 1):
                break
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.01) if way in (0, 2) else 0.0)
        job.kill()
        assert all(p.exitcode == -9 for p in job.processes), job.output()[-3000:]
        inside += bool(unfinished(run) - old)
        after = newest(run)
        assert after >= before, f"update {before} was saved, now {after}"
        print(f"kill {kill + 1}: {processes} x {micro}, saved {before} -> {after}", flush=True)
    last = Job(2, run, **changes)
    assert last.wait(1000.0) == [0, 0], last.output()[-3000:]
    expected, actual = read_run(whole.directory), read_run(run)
    steps = epochs * EPOCH_STEPS
    assert list(expected["metrics"]) == list(actual["metrics"]) == list(range(1, steps + 1))
    for step, values in expected["metrics"].items():
        assert values["data/digest"] == actual["metrics"][step]["data/digest"]
        assert ("val/loss" in values) == ("val/loss" in actual["metrics"][step])
    worst = max(
        relative_difference(value, actual[kind][name])
        for kind in ("model", "momentum")
        for name, value in expected[kind].items()
    )
    assert worst < TOLERANCE, worst
    print(f"{kills} kills, {inside} inside a save, {steps} updates; weights differ by {worst:.1e}")
    return {"kills": kills, "inside": inside, "steps": steps, "starts": starts}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak(Path(folder), arguments.kills, arguments.seed)
