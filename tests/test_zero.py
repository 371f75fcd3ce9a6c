"""ZeRO-2 and ZeRO-3: train/language_model.py by DeepSpeed, against the plain run in one process.

Accelerate offers DeepSpeed on accelerators only. On the CPU it is reached here by telling it that
these gloo processes are of the kind DEEPSPEED, and by leaving out the refusal of start.py: the
engine, its accumulation, clipping, norm and step are DeepSpeed's own. It knows no float64.
"""

import importlib.util
import json
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _world

from tests.scripts import read_run, relative_difference
from tests.test_language_model import assert_same_run, config, make_text, run
from tests.test_sharding import nan_in_the_second_update
from train import language_model
from utils import start, zero
from utils.distributed import collective_timeout
from utils.token_sets import load_tokens

ZERO2 = {  # what the launcher makes of deepspeed_zero2.yaml (tests/test_configs.py)
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}
ON_THE_CPU = {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}
ZERO3 = ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
STAGES = {"zero2": ZERO2, "zero3": ZERO3}
slow = pytest.mark.slow
deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
pytestmark = [slow, deepspeed]


@contextmanager
def zero_on_the_cpu(environment: dict):
    """The script's Accelerator takes DeepSpeed in these processes."""
    os.environ.update(environment | ON_THE_CPU)
    open_state = AcceleratorState.__init__

    def open_as_gpu(self, mixed_precision=None, cpu=False, **kwargs):
        if not PartialState._shared_state:
            from deepspeed import comm

            state = PartialState(cpu=True, timeout=kwargs["timeout"])
            assert state.distributed_type == DistributedType.MULTI_CPU
            PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
            # Sums over gloo: those through shared memory leave 70 MB a process behind.
            with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):
                comm.init_distributed("gloo")
        open_state(self, mixed_precision, **kwargs)

    def plugin(**kwargs):
        """ZeRO-3 keeps small parameters whole: here the vectors alone, as in a model of size."""
        made = DeepSpeedPlugin(**kwargs)
        made.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
        return made

    with (
        mock.patch.object(AcceleratorState, "__init__", open_as_gpu),
        mock.patch.object(zero, "DeepSpeedPlugin", plugin),
        mock.patch.object(start, "_check_launcher", lambda on_cpu, asked: None),
    ):
        yield
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])


def run_zero(given: dict, environment: dict) -> dict:
    """The script's main in this process; rank 0 returns what the run left behind."""
    with zero_on_the_cpu(environment):
        code = language_model.main(language_model.Config(**given))
    backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
    assert len(backends) > 1  # DeepSpeed's own
    assert {backend.options._timeout for backend in backends} == {collective_timeout()}
    return {} if dist.get_rank() else {"code": code, **read_run(Path(given["output_dir"]))}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    load_tokens(str(make_text(folder / "rows", num_rows=56)), "auto", folder / "tokens")
    return folder / "tokens"


def run_alone(pool, processes: int, function, *args) -> list:
    """In fresh processes: DeepSpeed keeps the groups of the first run."""
    pool.close()
    try:
        return pool.run(processes, function, *args, init=False, timeout=240.0)
    finally:
        pool.close()


def train_zero(pool, processes: int, dataset: Path, directory: Path, stage: str, **changes) -> dict:
    given = config(dataset, directory, **changes)
    result = run_alone(pool, processes, run_zero, given, STAGES[stage])[0]
    assert result["config"]["world_size"] == processes
    return result


def train_plain(pool, dataset: Path, directory: Path, **changes) -> dict:
    return pool.run(1, run, config(dataset, directory, **changes), torch.float32, init=False)[0]


def assert_close_run(expected: dict, actual: dict, tolerance: float = 2e-5) -> None:
    """To the rounding of float32, which AdamW magnifies in weights that have almost no gradient."""
    for name, value in expected["model"].items():
        assert relative_difference(value, actual["model"][name]) < 5 * tolerance, name
    assert_same_run({**expected, "model": {}}, {**actual, "model": {}}, tolerance)


@pytest.mark.parametrize(
    ("stage", "processes", "micro", "clip"),
    [("zero2", 2, 1, 0.05), ("zero3", 2, 1, 0.05), ("zero2", 3, 2, 0.0), ("zero3", 3, 2, 0.0)],
)
def test_zero_run_is_the_plain_one(pool, tokens, tmp_path, stage, processes, micro, clip):
    """Order, window, loss, norm, clipping, evaluation and weights; ranks differ in tokens."""
    changes = dict(max_grad_norm=clip, max_steps=3, eval_every=2, global_batch_size=6 * processes)
    if stage == "zero3":  # gathered once more for the backward pass, and for made-up text
        changes |= dict(activation_checkpointing=True, sample=4)
    plain = train_plain(pool, tokens, tmp_path / "plain", **changes)
    result = train_zero(
        pool, processes, tokens, tmp_path / "zero", stage, micro_batch_size=micro, **changes
    )
    assert_close_run(plain, result)
    if clip:  # it did something
        assert all(plain["metrics"][step]["train/grad_norm"] > clip for step in (1, 2, 3))
    log = (tmp_path / "zero" / "log.txt").read_text()
    assert f" with ZeRO-{stage[-1]}, mixed precision no" in log
    exported = load_file(tmp_path / "zero" / "model" / "model.safetensors")
    for name, value in result["model"].items():
        assert torch.equal(exported[name], value), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero2", 2), ("plain", 1)),
        (("plain", 1), ("zero3", 2)),
        (("zero3", 3), ("zero2", 2)),
        (("zero2", 2), ("zero3", 3)),
    ],
)
def test_saved_by_one_engine_continued_by_another(pool, tokens, tmp_path, before, after):
    def go_on(stage, processes, folder, **changes):
        changes |= dict(global_batch_size=12)
        if stage == "plain":
            return train_plain(pool, tokens, folder, **changes)
        return train_zero(pool, processes, tokens, folder, stage, **changes)

    expected = go_on("plain", 1, tmp_path / "plain")
    stopped = go_on(*before, tmp_path / "run", stop_after=2)
    assert stopped["code"] == 75 and stopped["status"]["step"] == 2
    continued = go_on(*after, tmp_path / "run")
    assert continued["code"] == 0 and continued["config"]["world_size"] == after[1]
    assert_close_run(expected, continued)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_loses_no_more_than_ddp(pool, tokens, tmp_path, stage):
    """Autocast as with every other engine: weights, their gradients and losses are float32."""
    exact = train_plain(pool, tokens, tmp_path / "exact")
    given = config(tokens, tmp_path / "zero")
    bf16 = STAGES[stage] | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    result = run_alone(pool, 2, run_zero, given, bf16)[0]
    assert result["config"]["precision"] == "bf16" and result["config"]["world_size"] == 2
    assert all(value.dtype == torch.float32 for value in result["model"].values())
    for step, values in exact["metrics"].items():
        for key in ("train/loss", "train/grad_norm"):
            found = result["metrics"][step][key]
            assert found == pytest.approx(values[key], rel=1e-2), (step, key)
        assert found != pytest.approx(values[key], rel=1e-6), step  # the norm's
    found = result["metrics"][5]["val/loss"]
    assert found == pytest.approx(exact["metrics"][5]["val/loss"], rel=1e-3)


def run_poisoned(given: dict, environment: dict) -> dict:
    with nan_in_the_second_update():
        return run_zero(given, environment) if environment else run(given, torch.float32)


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_that_is_not_finite(pool, tokens, tmp_path, stage):
    """DeepSpeed has left it out when the script learns of it; or it is the end of all."""
    given = config(tokens, tmp_path / "plain", nonfinite="skip", max_steps=3)
    plain = pool.run(1, run_poisoned, given, {}, init=False)[0]
    given["output_dir"] = str(tmp_path / "zero")
    result = run_alone(pool, 2, run_poisoned, given, STAGES[stage])[0]
    assert result["metrics"][3]["train/skipped_updates"] == 1
    for one in (plain, result):
        del one["metrics"][2]["train/loss"], one["metrics"][2]["train/grad_norm"]  # not finite
    assert_close_run(plain, result)
    given |= dict(output_dir=str(tmp_path / "stopped"), nonfinite="stop")
    with pytest.raises(AssertionError, match="NonFiniteError: update 2: .*rank 1, micro-step 1"):
        run_alone(pool, 2, run_poisoned, given, STAGES[stage])


def preflight_zero(given: dict, environment: dict) -> int:
    stay_open = mock.patch.object(Accelerator, "end_training", lambda self: None)
    with zero_on_the_cpu(environment), stay_open:
        return language_model.main(language_model.Config(**given))


@pytest.mark.parametrize("stage", STAGES)
def test_preflight(pool, tokens, tmp_path, stage):
    given = config(tokens, tmp_path, preflight=True)
    assert run_alone(pool, 2, preflight_zero, given, STAGES[stage]) == [0, 0]
    report = json.loads((tmp_path / "preflight.json").read_text())
    results = {entry["check"]: entry["result"] for entry in report["checks"]}
    assert (
        report["ok"]
        and results["memory"] == results["evaluation"] == results["checkpoint"] == "pass"
    )
    assert results["gradient"] == "not checked"
