"""Two machines on a slow link: what preflight says of it, and how many bytes travel."""

import json
import re

import pytest

from tests.faults.job import steps_in, wait_for
from tests.multinode.conftest import Launch

pytestmark = pytest.mark.slow

MICRO, PROCESSES = 8, 4


def test_preflight_names_a_slow_link(launch, network, tmp_path):
    network.slow_down(1, mbit=10, delay_ms=50)
    recipe = dict(dataset="digits", global_batch_size=64, bn_group=16)
    one = launch(tmp_path / "run", script_flags=("--preflight",), **recipe)
    assert one.wait(400.0) == [0, 0], one.output()
    report = json.loads((one.directory / "preflight.json").read_text())
    speed = next(check for check in report["checks"] if check["check"] == "speed")
    assert speed["result"] == "warn", speed
    share = re.search(r"communication-bound: about (\d+)% of an update", speed["seen"])
    assert share and int(share.group(1)) > 80, speed
    for remedy in ("larger batch a device", "accumulation", "--comm-hook bf16"):
        assert remedy in speed["remedy"]


def bytes_per_sample(launch, network, directory, accumulation: int) -> float:
    """That both machines send in 8 updates, from their interfaces' counters."""
    batch = MICRO * PROCESSES * accumulation
    recipe = dict(dataset="digits", global_batch_size=batch, micro_batch_size=MICRO, bn_group=MICRO)
    recipe |= dict(eval_every=99, save_every=99)  # one line of metrics an update
    pace = f"pace:{0.6 / accumulation}"
    one: Launch = launch(directory, fault=pace, epochs=9, max_steps=12, **recipe)

    def sent_after(step: int) -> int:
        wait_for(lambda: steps_in(directory) >= step, 200.0, f"update {step}")
        assert steps_in(directory) == step
        return sum(network.bytes_sent(host) for host in network.hosts)

    before = sent_after(3)
    total = sent_after(11) - before
    assert one.wait(100.0) == [0, 0], one.output()
    return total / (8 * batch)


def test_accumulation_sends_as_much_for_more_samples(launch, network, tmp_path):
    plain = bytes_per_sample(launch, network, tmp_path / "plain", 1)
    accumulated = bytes_per_sample(launch, network, tmp_path / "accumulated", 8)
    print(f"{plain:.0f} and {accumulated:.0f} bytes a sample: {plain / accumulated:.2f} times")
    assert plain / accumulated == pytest.approx(8, rel=0.05)
