"""Two machines with two processes each, as network namespaces: one run, and what cuts it."""

import re
import shutil

import pytest
import torch

from tests.multinode.conftest import Launch
from tests.multinode.network import Network
from tests.scripts import read_run, relative_difference, run_cifar

pytestmark = pytest.mark.slow

DIGITS = dict(
    dataset="digits", global_batch_size=64, bn_group=32, epochs=1, max_steps=8, eval_every=4
)


def assert_same_training(expected: dict, found: dict) -> None:
    """Weights, momentum, losses and samples, to 1e-10."""
    for kind in ("model", "momentum"):
        for name, value in expected[kind].items():
            assert relative_difference(value, found[kind][name]) < 1e-10, name
    for step, values in expected["metrics"].items():
        assert found["metrics"][step]["data/digest"] == values["data/digest"]
        for key in {"train/loss", "val/loss"} & values.keys():
            assert found["metrics"][step][key] == pytest.approx(values[key], rel=1e-10)


def test_two_nodes_train_what_one_does(launch, tmp_path):
    two = launch(tmp_path / "two", tracker="wandb", **DIGITS)
    assert two.wait(240.0) == [0, 0], two.output()
    with Network(1, tmp_path / "one-node") as alone:
        one = Launch(alone, tmp_path / "one", processes=4, **DIGITS)
        assert one.wait(240.0) == [0], one.output()
    found, expected = read_run(two.directory), read_run(one.directory)
    assert found["config"]["world_size"] == expected["config"]["world_size"] == 4
    assert found["model"]["conv1.weight"].dtype == torch.float64
    assert "host node0" in two.logs[0].read_text()
    assert_same_training(expected, found)
    assert len(list((two.directory / "wandb").glob("offline-run-*"))) == 1  # of rank 0 alone
    assert two.output().count("world     4 processes") == 1


def test_no_shared_disk(launch, network, tmp_path, pool):
    """Each machine sees a disk of its own under the same path."""
    directory = network.local_disk / "run"
    first, second = (disk / "run" for disk in network.disks)
    recipe = DIGITS | dict(save_every=2, keep_checkpoints=9, tracker="wandb")
    each = dict(script_flags=("--save-on-each-node",))
    one = launch(directory, stop_after=4, **each, **recipe)
    assert one.wait(240.0) == [1, 1] and "everything saved" in one.output(), one.output()
    for run in (first, second):
        steps = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert steps == ["step_00000002", "step_00000004"]
    assert sorted(path.name for path in second.iterdir()) == ["checkpoints"]  # all else is rank 0's
    assert len(list((first / "wandb").glob("offline-run-*"))) == 1

    shutil.rmtree(second / "checkpoints" / "step_00000004")
    again = launch(directory, **each, **recipe)
    assert again.wait(240.0) == [0, 0], again.output()
    assert "step_00000004 skipped: not on machine 1" in again.output()
    assert re.search("resume .*step_00000002, after update 2 of 8", again.output())
    given = DIGITS | dict(output_dir=str(tmp_path / "whole"), lr=0.02, lr_reference_batch=0)
    expected = pool.run(1, run_cifar, given, None, init=False)[0]
    found = read_run(first)
    assert found["config"]["world_size"] == 4
    assert_same_training(expected, found)
    newest = [run / "checkpoints" / "step_00000008" / "model.pt" for run in (first, second)]
    weights = [torch.load(path, weights_only=True) for path in newest]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_one_machine_that_does_not_know_its_own_name(tmp_path):
    with Network(1, tmp_path) as alone:
        alone.set_known_hosts(0, {})
        one = Launch(alone, tmp_path / "run", epochs=1)
        assert one.wait(120.0) == [0], one.output()
    assert read_run(one.directory)["config"]["world_size"] == 2
