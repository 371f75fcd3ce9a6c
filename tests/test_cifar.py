"""train/cifar.py as a user runs it: resume, evaluation, export, bad input, flags."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.scripts import assert_same_weights, run_cifar, small_cifar, small_data
from train import cifar, image_folder
from utils.errors import UsageError

SMALL = dict(num_train=75, num_test=37)


def config(directory: Path, **changes) -> dict:
    return dict(output_dir=str(directory), global_batch_size=16, bn_group=8, epochs=2) | changes


def train(pool, processes: int, directory: Path, data=None, how=None, **changes) -> dict:
    """`how` goes to run_cifar, `changes` to the script's Config."""
    data, given = data or small_data(**SMALL), config(directory, **changes)
    result = pool.run(processes, run_cifar, given, data, init=False, **(how or {}))[0]
    assert result["config"]["world_size"] == processes
    return result


@pytest.mark.parametrize(
    ("processes", "stop_after", "workers"),
    [(1, 3, 0), (1, 4, 2), (2, 3, 2), (2, 4, 0)],  # 4 updates an epoch: inside, and its last
)
def test_stopped_and_continued_is_bitwise_the_same(pool, tmp_path, processes, stop_after, workers):
    whole = train(pool, processes, tmp_path / "whole", num_workers=workers)
    changes = dict(num_workers=workers)
    stopped = train(pool, processes, tmp_path / "parts", stop_after=stop_after, **changes)
    assert stopped["code"] == 75
    assert stopped["status"]["state"] == "preempted" and stopped["status"]["step"] == stop_after
    continued = train(pool, processes, tmp_path / "parts", **changes)
    assert continued["code"] == 0 and continued["status"]["state"] == "finished"
    assert_same_weights(whole, continued)
    assert whole["metrics"].keys() == continued["metrics"].keys() == set(range(1, 9))
    for step, values in whole["metrics"].items():
        for key in (key for key in values if not key.startswith("perf/")):
            assert continued["metrics"][step][key] == values[key], (step, key)


def with_spawned_workers(given: dict, data) -> dict:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        return run_cifar(given | {"num_workers": 1}, data)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_loader_workers_that_are_spawned(pool, tmp_path):
    """As on Windows and macOS: they are given pickles of what they need."""
    forked = train(pool, 1, tmp_path / "forked", num_workers=1)
    given = config(tmp_path / "spawned")
    spawned = pool.run(1, with_spawned_workers, given, small_data(**SMALL), init=False)[0]
    assert spawned["config"]["world_size"] == 1
    assert_same_weights(forked, spawned)


def test_finished_run_resumed_does_nothing(pool, tmp_path):
    train(pool, 1, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    result = pool.run(1, run_cifar, config(tmp_path), small_data(**SMALL), init=False)[0]
    assert result["code"] == 0
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}


def test_more_epochs_continue_a_finished_run(pool, tmp_path):
    train(pool, 1, tmp_path, epochs=1)
    longer = train(pool, 1, tmp_path, epochs=2)
    assert longer["code"] == 0 and max(longer["metrics"]) == 8
    assert longer["metrics"][8]["train/lr"] == 0.0  # the schedule was recomputed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(lr=0.05), "lr=0.05 .* 0.2"),
        (dict(seed=1), "seed=1 .* 0"),
        (dict(bn_group=4), "bn_group=4 .* 8"),
        (dict(global_batch_size=32, bn_group=8), "global_batch_size=32 .* 16"),
        (dict(epochs=1), "total_steps=4 .* 8"),
    ],
)
def test_another_recipe_is_not_continued(pool, tmp_path, change, words):
    train(pool, 1, tmp_path, stop_after=2)
    with pytest.raises(AssertionError, match=f"UsageError: .*{words}"):
        train(pool, 1, tmp_path, **change)


DIVISIBLE = dict(global_batch_size=48, bn_group=2, epochs=2)  # by 1, 2, 3 and 4 processes


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A finished run of one process, with a prime number of test examples."""
    directory, data = tmp_path_factory.mktemp("trained"), small_data(num_train=48, num_test=37)
    return data, train(pool, 1, directory, data, **DIVISIBLE), directory


def evaluate_only(given: dict, data) -> None:
    with small_cifar(data):
        assert cifar.main(cifar.Config(**given)) == 0


@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_evaluation_counts_each_example_once(pool, trained, tmp_path, processes, micro):
    data, reference, run = trained
    changes = dict(micro_batch_size=micro, resume=str(run), eval_only=True)
    given = config(tmp_path / "evaluation", tracker="none", **DIVISIBLE, **changes)
    pool.run(processes, evaluate_only, given, data, init=False)
    metrics = json.loads((tmp_path / "evaluation" / "metrics.jsonl").read_text())
    assert metrics["val/num_examples"] == 37
    for key in ("val/loss", "val/accuracy"):
        assert metrics[key] == pytest.approx(reference["metrics"][2][key], rel=1e-12)


def test_export_loads_into_a_plain_torchvision_resnet(pool, tmp_path):
    """In this process, which has no process group, from model.json alone."""
    data = small_data(**SMALL)
    result = train(pool, 2, tmp_path, data, dict(narrow=False, dtype=torch.float32), epochs=1)
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    model = torchvision.models.get_model(
        description["architecture"], num_classes=len(description["classes"])
    )
    assert description["small_image_stem"]
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"), strict=True)
    mean, std = (torch.tensor(description[key]).reshape(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        logits = model.eval()((data.test.images / 255 - mean) / std)
    accuracy = (logits.argmax(1) == data.test.labels).double().mean().item()
    assert accuracy == pytest.approx(result["metrics"][4]["val/accuracy"], abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(global_batch_size=500, micro_batch_size=64),
            "micro_batch_size=64 x 1 .*; use 512 or",
        ),
        (dict(global_batch_size=128), "75 examples, fewer than .*128"),
        (dict(model="resnet81"), "resnet81 is not in torchvision; did you mean .*resnet18"),
        (dict(bn_group=12), "bn_group=12 .*use 8 or 16"),
        (dict(lr=-1.0), "--lr -1.0 must be greater than 0"),
        (dict(warmup_fraction=1.5), "--warmup-fraction 1.5 must"),
        (dict(resume="/does/not/exist"), "--resume /does/not/exist"),
        (dict(output_dir="/dev/null/run"), "--output-dir /dev/null/run"),
        (dict(weights="/does/not/exist.pt"), "/does/not/exist.pt"),
        (dict(eval_only=True), "no usable checkpoint"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(pool, tmp_path, changes, words):
    given = config(tmp_path / "run") | changes
    with pytest.raises(AssertionError, match=f"UsageError: .*{words}"):
        pool.run(1, run_cifar, given, small_data(**SMALL), narrow=False, init=False)
    assert list(tmp_path.iterdir()) == []


def test_dataset_that_does_not_exist(pool, tmp_path):
    with pytest.raises(AssertionError, match="UsageError: .*--dataset ./nowhere"):
        pool.run(2, run_cifar, config(tmp_path / "run", dataset="./nowhere"), init=False)
    assert list(tmp_path.iterdir()) == []


def out_of_memory(given: dict, data) -> None:
    def compute_loss(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    saved, cifar.compute_loss = cifar.compute_loss, compute_loss
    try:
        run_cifar(given, data)
    finally:
        cifar.compute_loss = saved


def test_out_of_memory_names_the_flag(pool, tmp_path):
    given = config(tmp_path, bn_group=4)
    with pytest.raises(AssertionError, match="OutOfMemory: .*--micro-batch-size 8 "):
        pool.run(1, out_of_memory, given, small_data(**SMALL), init=False)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


CONTRACT_FLAGS = (
    "dataset global_batch_size micro_batch_size lr lr_reference_batch warmup_fraction epochs "
    "max_steps max_grad_norm bn_group find_unused_parameters comm_hook weights seed num_workers "
    "subset output_dir resume stop_after save_every keep_checkpoints eval_every log_every "
    "eval_only tracker"
).split()


def test_flags_of_the_contract_and_their_help():
    assert set(CONTRACT_FLAGS) <= cifar.Config.__dataclass_fields__.keys()
    text = subprocess.run(
        [sys.executable, "train/cifar.py", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": ""},
    ).stdout
    for flag in CONTRACT_FLAGS:
        assert f"--{flag.replace('_', '-')}" in text
    assert "default: 256" in text


def test_wrong_flag_is_exit_code_2():
    command = [sys.executable, "train/cifar.py", "--global-batch", "3"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2


def test_usage_error_is_one_line_and_exit_code_2():
    command = [sys.executable, "train/cifar.py", "--dataset", "digits", "--lr", "0"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.strip() == "error: --lr 0.0 must be greater than 0"


def test_usage_error_class():
    with pytest.raises(UsageError):
        cifar.main(cifar.Config(lr=0.0))


def test_a_resnet_for_small_images_has_torchs_initial_weights():
    """Uniform up to 1 / sqrt(fan in); torchvision's go further. Alike in both scripts."""
    models = []
    for script in (cifar, image_folder):
        torch.manual_seed(0)
        models.append(script.build_model("resnet18", 10, 32))
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name
    convolutions = [m for m in models[0].modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 20
    for layer in convolutions:
        bound = layer.weight[0].numel() ** -0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound
