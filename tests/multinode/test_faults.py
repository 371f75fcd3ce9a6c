"""Two machines: a cable that is cut, a machine that dies and comes back."""

import re
import time

import pytest

from tests.faults.job import GLOBAL_BATCH, NUM_TEST, NUM_TRAIN, steps_in, wait_for
from tests.multinode.conftest import Launch
from tests.multinode.network import Network
from tests.multinode.test_nodes import assert_same_training
from tests.scripts import read_run, run_cifar, small_data

pytestmark = pytest.mark.slow

PACE = "pace:0.3"
HANG_SECONDS = 15.0
EPOCHS, UPDATES = 6, 24


def start(launch, directory, *launcher, **changes) -> Launch:
    """A run that takes a while, past its first save (a hang in it is waited for longer)."""
    one = launch(directory, *launcher, fault=PACE, epochs=EPOCHS, save_every=5, **changes)
    # Besides the updates: an evaluation after 4, a save after 5.
    wait_for(lambda: steps_in(directory) >= 8, 200.0, "sixth update")
    return one


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    """The run that nobody disturbs, in one process."""
    recipe = dict(global_batch_size=GLOBAL_BATCH, bn_group=8, epochs=EPOCHS, lr=0.02)
    given = recipe | dict(lr_reference_batch=0, output_dir=str(tmp_path_factory.mktemp("whole")))
    return pool.run(1, run_cifar, given, small_data(NUM_TRAIN, NUM_TEST), init=False)[0]


def test_a_cable_cut_for_good_and_on_with_one_machine(launch, network, tmp_path, whole):
    one = start(launch, tmp_path / "run", hang_timeout=HANG_SECONDS)
    network.cut(1)
    cut = time.monotonic()
    assert one.wait(HANG_SECONDS + 30.0) == [1, 1], one.output()
    print(f"ended {time.monotonic() - cut:.1f} s after the cut")
    status = one.status()
    assert status["state"] == "failed" and "no progress" in status["reason"], status
    assert re.search(r"rank 2 no longer answers", one.logs[0].read_text()), one.output()
    with Network(1, tmp_path / "alone") as alone:  # on what is left
        again = Launch(alone, tmp_path / "run", epochs=EPOCHS)
        assert again.wait(200.0) == [0], again.output()
    assert re.search("resume .*step_0000", again.output())
    run = read_run(one.directory)
    assert run["config"]["world_size"] == 2 and len(run["metrics"]) == UPDATES
    assert_same_training(whole, run)


def test_a_cable_cut_for_5_seconds(launch, network, tmp_path, whole):
    one = start(launch, tmp_path / "run", hang_timeout=60.0)
    network.cut(1)
    time.sleep(5.0)  # the cut's length
    steps = steps_in(one.directory)
    network.join(1)
    assert one.wait(200.0) == [0, 0], one.output()
    run = read_run(one.directory)
    assert steps < UPDATES and len(run["metrics"]) == UPDATES and run["config"]["world_size"] == 4
    assert_same_training(whole, run)


def test_a_machine_that_dies_and_comes_back(launch, network, tmp_path, whole):
    """With c10d the launchers meet anew; machine 0, which holds the store, has to live."""
    elastic = ["--rdzv_backend", "c10d", "--max_restarts", "3"]
    # Without it, torch 2.14 tells the newcomer no address, and all end after a minute.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    changes = dict(environment=own_store, hang_timeout=HANG_SECONDS)
    one = start(launch, tmp_path / "run", *elastic, **changes)
    network.kill_host(1)
    assert one.processes[1].wait(10.0) == -9
    steps = steps_in(one.directory)
    network.join(1)
    one.processes[1] = one.start(1)  # what boots with a machine: systemd, SLURM
    assert one.wait(240.0) == [0, 0], one.output()
    assert re.search(r"resume .*step_0000", one.output())
    run = read_run(one.directory)
    assert (
        8 <= steps < UPDATES and len(run["metrics"]) == UPDATES and run["config"]["world_size"] == 4
    )
    assert_same_training(whole, run)
