"""FSDP2 and HSDP: train/language_model.py sharded, against the plain run in one process.

Accelerate offers FSDP2 on accelerators only. On the CPU its own path is reached here by telling it
that these gloo processes are of the kind MULTI_GPU, and by leaving out the refusal of start.py:
`accelerator.prepare`, `accumulate`, `clip_grad_norm_` and torch's `fully_shard` are the real ones.
"""

import json
import math
import os
import re
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.scripts import read_run
from tests.test_language_model import CONTEXT, assert_same_run, config, make_text, run, train
from train import language_model
from utils import checkpoint, engines, start, window
from utils.distributed import collective_timeout, rank
from utils.errors import UsageError
from utils.guard import Guard
from utils.order import ShardSampler
from utils.preflight import memory
from utils.preflight.job import FAIL, PASS, WARN
from utils.preflight.memory import Bytes, bytes_per_process, count_bytes, judge_memory
from utils.sharding import whole
from utils.token_sets import TokenWindows, load_tokens

FSDP2 = {  # what the launcher makes of fsdp2.yaml (tests/test_configs.py)
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
HSDP = FSDP2 | {  # and of hsdp.yaml, for two machines of two
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Token files whose validation split gives ranks unequal numbers of batches."""
    folder = tmp_path_factory.mktemp("text")
    rows = make_text(folder / "rows", num_rows=56)
    data = load_tokens(str(rows), "auto", folder / "tokens")
    assert len(TokenWindows(data.val, CONTEXT)) % 2  # by micro-batches of one
    return folder / "tokens"


# ---- The script under FSDP2 ------------------------------------------------------------------


@contextmanager
def fsdp_on_the_cpu(environment: dict, dtype: torch.dtype = torch.float64):
    """The script's Accelerator takes FSDP2 in these processes."""
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    open_state = PartialState.__init__

    def open_as_gpu(self, *args, **kwargs):
        is_new = not self._shared_state
        open_state(self, *args, **kwargs)
        if is_new:
            assert self.distributed_type == DistributedType.MULTI_CPU
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    with (
        mock.patch.object(PartialState, "__init__", open_as_gpu),
        mock.patch.object(start, "_check_launcher", lambda on_cpu, asked: None),
    ):
        yield
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])


def run_sharded(given: dict, environment: dict, dtype: torch.dtype = torch.float64) -> dict:
    """The script's main in this process; rank 0 returns what the run left behind, all what they
    had of the model, and of which kind the gradient's norm was."""
    seen: dict = {"norms": []}
    reduce, save = window.Window.reduce, language_model.checkpoint.save_checkpoint

    def reduce_seen(self, losses, grad_norm, *args, **kwargs):
        seen["norms"].append(isinstance(grad_norm, DTensor))
        return reduce(self, losses, grad_norm, *args, **kwargs)

    def save_seen(*args, model, optimizer, **kwargs):
        mesh = next(iter(model.state_dict().values())).device_mesh
        seen["mesh"] = list(mesh.shape)
        backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
        seen["timeout"] = min(backend.options._timeout for backend in backends)
        seen["parts"] = sum(p.to_local().numel() for p in model.state_dict().values())
        seen["moments"] = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
        return save(*args, model=model, optimizer=optimizer, **kwargs)

    with (
        fsdp_on_the_cpu(environment, dtype),
        mock.patch.object(window.Window, "reduce", reduce_seen),
        mock.patch.object(language_model.checkpoint, "save_checkpoint", save_seen),
    ):
        code = language_model.main(language_model.Config(**given))
    if dist.get_rank():
        return {"seen": seen}
    return {"code": code, "seen": seen, **read_run(Path(given["output_dir"]))}


def run_in(environment: dict, given: dict) -> dict:
    """The plain run in float32, as this environment has it."""
    os.environ.update(environment)
    return run(given, torch.float32)


def preflight_sharded(given: dict, environment: dict) -> int:
    stay_open = mock.patch.object(Accelerator, "end_training", lambda self: None)
    with fsdp_on_the_cpu(environment), stay_open:
        return language_model.main(language_model.Config(**given))


def train_sharded(
    pool, processes: int, dataset: Path, directory: Path, engine=FSDP2, **changes
) -> dict:
    given = config(dataset, directory, **changes)
    results = pool.run(processes, run_sharded, given, engine, init=False)
    assert results[0]["config"]["world_size"] == processes
    return {**results[0], "all_seen": [result["seen"] for result in results]}


@pytest.mark.parametrize(
    ("engine", "processes", "micro", "clip"),
    [
        pytest.param(FSDP2, 2, 1, 0.05, id="fsdp2, accumulation, clipped"),
        pytest.param(FSDP2, 4, 2, 1.0, id="fsdp2, 4", marks=slow),
        pytest.param(FSDP2, 2, 4, 0.0, id="fsdp2, norm measured alone", marks=slow),
        pytest.param(HSDP, 4, 1, 0.05, id="hsdp, accumulation, clipped", marks=slow),
    ],
)
def test_sharded_run_is_the_plain_one(pool, tokens, tmp_path, engine, processes, micro, clip):
    """Order, window, loss, norm, clipping, evaluation and weights; ranks differ in tokens."""
    changes = dict(max_grad_norm=clip, max_steps=3, eval_every=2)
    plain = train(pool, 1, tokens, tmp_path / "plain", **changes)
    result = train_sharded(
        pool,
        processes,
        tokens,
        tmp_path / "sharded",
        engine,
        micro_batch_size=micro,
        **changes,
    )
    assert_same_run(plain, result)
    assert "val/loss" in result["metrics"][2]
    log = (tmp_path / "sharded" / "log.txt").read_text()
    assert f" with {'HSDP' if engine is HSDP else 'FSDP2'}, mixed precision no" in log
    if clip == 0.05:  # it did something
        assert all(plain["metrics"][step]["train/grad_norm"] > clip for step in (1, 2, 3))
    total = result["config"]["num_parameters"]
    seen = result["all_seen"]
    replicas = 2 if engine is HSDP else 1
    for one in seen:
        assert all(one["norms"]) and len(one["norms"]) == 3
        assert one["mesh"] == ([2, 2] if engine is HSDP else [processes])
        assert one["timeout"] == collective_timeout()
        assert one["parts"] == one["moments"] < 0.75 * total
    assert sum(one["parts"] for one in seen) == replicas * total
    exported = load_file(tmp_path / "sharded" / "model" / "model.safetensors")
    for name, value in result["model"].items():
        assert torch.equal(exported[name], value), name


ENGINES = {"plain": None, "fsdp2": FSDP2, "hsdp": HSDP}


@slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp2", 2), ("plain", 1)),
        (("fsdp2", 2), ("fsdp2", 4)),
        (("plain", 2), ("fsdp2", 2)),
        (("fsdp2", 4), ("hsdp", 4)),
        (("hsdp", 4), ("fsdp2", 2)),
    ],
)
def test_saved_by_one_engine_continued_by_another(pool, tokens, tmp_path, before, after):
    def go_on(engine, processes, folder, **changes):
        if engine == "plain":
            return train(pool, processes, tokens, folder, **changes)
        return train_sharded(pool, processes, tokens, folder, ENGINES[engine], **changes)

    expected = train(pool, 1, tokens, tmp_path / "plain")
    stopped = go_on(*before, tmp_path / "run", stop_after=2)
    assert stopped["code"] == 75 and stopped["status"]["step"] == 2
    continued = go_on(*after, tmp_path / "run")
    assert continued["code"] == 0 and continued["config"]["world_size"] == after[1]
    assert_same_run(expected, continued)


@slow
def test_bf16_loses_no_more_than_ddp(pool, tokens, tmp_path):
    """Weights are gathered in bf16; sums of gradients and losses stay in float32."""
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    exact = pool.run(1, run, config(tokens, tmp_path / "exact"), torch.float32, init=False)[0]
    ddp = pool.run(2, run_in, bf16, config(tokens, tmp_path / "ddp"), init=False)[0]
    given = config(tokens, tmp_path / "sharded")
    fsdp = pool.run(2, run_sharded, given, FSDP2 | bf16, torch.float32, init=False)[0]
    for result in (ddp, fsdp):
        assert result["config"]["precision"] == "bf16" and result["config"]["world_size"] == 2
        assert all(value.dtype == torch.float32 for value in result["model"].values())
        for step, values in exact["metrics"].items():
            for key in ("train/loss", "train/grad_norm"):
                found = result["metrics"][step][key]
                assert found == pytest.approx(values[key], rel=1e-2), (step, key)
                assert found != pytest.approx(values[key], rel=1e-8), (step, key)
        assert result["metrics"][5]["val/loss"] == pytest.approx(
            exact["metrics"][5]["val/loss"], rel=1e-3
        )


@slow
def test_recomputed_blocks_samples_and_skipped_updates(pool, tokens, tmp_path):
    changes = dict(sample=4, dropout=0.2, max_steps=3)
    runs = [
        train_sharded(pool, 2, tokens, tmp_path / name, **changes, activation_checkpointing=again)
        for name, again in (("kept", False), ("recomputed", True))
    ]
    assert_same_run(*runs, tolerance=1e-12)
    log = (tmp_path / "kept" / "log.txt").read_text()
    assert log.count("sample    ") == 1


@contextmanager
def nan_in_the_second_update():
    """Of the last process alone."""
    compute_loss, seen = language_model.compute_loss, []

    def poisoned(model, batch):
        loss, logits = compute_loss(model, batch)
        seen.append(model.training)
        is_last = rank() == int(os.environ["WORLD_SIZE"]) - 1
        return loss * (math.nan if is_last and sum(seen) == 2 else 1), logits

    with mock.patch.object(language_model, "compute_loss", poisoned):
        yield


def run_poisoned(given: dict, environment: dict) -> dict:
    with nan_in_the_second_update():
        return run_sharded(given, environment) if environment else run(given)


@slow
def test_an_update_that_is_not_finite(pool, tokens, tmp_path):
    """Left out on all processes, whose parts stay as they were; or the end of all."""
    given = config(tokens, tmp_path / "plain", nonfinite="skip", max_steps=3)
    plain = pool.run(1, run_poisoned, given, {}, init=False)[0]
    given["output_dir"] = str(tmp_path / "sharded")
    sharded = pool.run(2, run_poisoned, given, FSDP2, init=False)[0]
    assert sharded["metrics"][3]["train/skipped_updates"] == 1
    del plain["metrics"][2]["train/loss"], sharded["metrics"][2]["train/loss"]  # NaN
    del plain["metrics"][2]["train/grad_norm"], sharded["metrics"][2]["train/grad_norm"]
    assert_same_run(plain, sharded)
    given |= dict(output_dir=str(tmp_path / "stopped"), nonfinite="stop")
    with pytest.raises(AssertionError, match="NonFiniteError: update 2: .*rank 1, micro-step 1"):
        pool.run(2, run_poisoned, given, FSDP2, init=False)


@slow
def test_preflight_of_a_sharded_model(pool, tokens, tmp_path):
    given = config(tokens, tmp_path, preflight=True)
    assert pool.run(2, preflight_sharded, given, FSDP2, init=False) == [0, 0]
    report = json.loads((tmp_path / "preflight.json").read_text())
    results = {entry["check"]: entry["result"] for entry in report["checks"]}
    assert (
        report["ok"]
        and results["memory"] == results["evaluation"] == results["checkpoint"] == "pass"
    )
    assert results["gradient"] == "not checked"


@slow
def test_real_text(pool, real_data, tmp_path):
    """The losses of DDP, to the rounding of float32."""
    text = next((real_data / "tinyshakespeare").rglob("*.txt"))
    changes = dict(tokenizer="characters", context=64, max_steps=20, layers=4, heads=4, width=128)
    given = config(text, tmp_path / "ddp", **changes)
    ddp = pool.run(2, run_in, {}, given, init=False, timeout=300)[0]
    given["output_dir"] = str(tmp_path / "fsdp")
    fsdp = pool.run(2, run_sharded, given, FSDP2, torch.float32, init=False, timeout=300)[0]
    assert ddp["config"]["world_size"] == fsdp["config"]["world_size"] == 2
    for step, values in ddp["metrics"].items():
        found = fsdp["metrics"][step]["train/loss"]
        assert found == pytest.approx(values["train/loss"], rel=1e-5), step
    assert ddp["metrics"][20]["train/loss"] < ddp["metrics"][1]["train/loss"] - 0.5


# ---- The parts -------------------------------------------------------------------------------


def small_model(sharded: bool):
    """A model with uneven parts, and its AdamW after one step."""
    torch.manual_seed(0)
    # No bias before BatchNorm: its gradient is rounding alone, which AdamW would make large.
    first, last = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(7), last)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step_once(model, optimizer) -> None:
    model(torch.arange(20.0).view(4, 5).sin()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_parts(directory: Path) -> None:
    model, optimizer = small_model(sharded=True)
    step_once(model, optimizer)
    extra = dict(extra={"a": 1}, manifest={"recipe": {}, "total_steps": 5}, keep=1, scaler=None)
    checkpoint.save_checkpoint(directory, 1, model=model, optimizer=optimizer, **extra)


def load_parts(directory: Path, sharded: bool) -> dict[str, torch.Tensor]:
    """Loaded, and trained one step further; whole, from every process."""
    model, optimizer = small_model(sharded)
    found = checkpoint.find_checkpoint(directory)
    checkpoint.load_checkpoint(found, model=model, optimizer=optimizer)
    if sharded:
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())
    step_once(model, optimizer)
    return whole(dict(model.state_dict()))


def test_checkpoint_of_parts_is_whole(pool, tmp_path):
    """Saved by two processes; continued by one with a plain model, and by three."""
    model, optimizer = small_model(sharded=False)
    for _ in range(2):
        step_once(model, optimizer)
    pool.run(2, save_parts, tmp_path)
    results = [load_parts(tmp_path, sharded=False), *pool.run(3, load_parts, tmp_path, True)]
    assert len(results) == 4
    for result in results:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)


def count_batches(directory: Path, is_sharded: bool) -> tuple[int, bool]:
    """How many batches of an evaluation this process sees when rank 1 alone is told to stop."""
    os.environ["ACCELERATE_USE_FSDP"] = str(is_sharded)
    guard = Guard(directory, hang_timeout=0)
    seen = 0
    for seen, _ in enumerate(guard.batches([{}] * 5), start=1):  # noqa: B007
        guard.stop_requested = guard.stop_requested or (rank() == 1 and seen == 2)
    return seen, guard.agree_to_stop()


def test_all_leave_an_evaluation_at_the_same_batch(pool, tmp_path):
    assert pool.run(2, count_batches, tmp_path, True) == [(2, True), (2, True)]
    assert pool.run(2, count_batches, tmp_path, False) == [(5, True), (2, True)]


@pytest.mark.parametrize(("count", "processes"), [(7, 2), (8, 2), (1, 4), (9, 4), (5, 1)])
def test_even_shards(count, processes):
    shards = [list(ShardSampler(count, processes, r, even=True)) for r in range(processes)]
    assert len({len(shard) for shard in shards}) == 1
    indices = sorted(index for shard in shards for index in shard)
    assert indices[:count] == list(range(count)) and len(indices) - count < processes


def test_windows_after_the_end_have_no_label(tokens, tmp_path):
    windows = TokenWindows(load_tokens(str(tokens), "auto", tmp_path).val, CONTEXT)
    batch = windows.__getitems__([len(windows) - 1, len(windows), len(windows) + 3])
    assert batch["tokens"].shape == (3, CONTEXT)
    assert (batch["label"] != -100).any(dim=1).tolist() == [True, False, False]


# ---- What is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "how", "words"),
    [
        (FSDP2, dict(can_shard=False), "FSDP: this script evaluates .*multi_gpu.yaml"),
        (FSDP2 | {"FSDP_VERSION": "1"}, {}, "fsdp_version: 1 .*use 2"),
        (FSDP2, dict(comm_hook="bf16"), "--comm-hook bf16 is DistributedDataParallel's"),
        (FSDP2, dict(precision="fp16"), "mixed_precision=fp16 with FSDP"),
        (ZERO, dict(can_shard=False), "DeepSpeed: this script evaluates .*multi_gpu.yaml"),
        (ZERO, dict(precision="fp16"), "mixed_precision=fp16 with DeepSpeed"),
    ],
)
def test_a_sharded_engine_is_refused(monkeypatch, environment, how, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = dict(precision="bf16", can_shard=True, comm_hook="none") | how
    with pytest.raises(UsageError, match=words):
        engines.check_sharded(given.pop("precision"), **given)


def test_a_missing_deepspeed_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(engines, "find_spec", lambda name: name == "deepspeed")
    with pytest.raises(UsageError, match="needs transformers; pip install deepspeed transformers"):
        engines.check_launched_engine(4)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_stage: 1 .*use 2 or 3"),
        (ZERO | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "device: cpu .*use none"),
        (ZERO | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "a.json"}, "deepspeed_config_file: .*leave"),
        (ZERO | {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "gradient_clipping: 1.0 .*max-grad-norm"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "MEGATRON_LM trains .*fsdp2.yaml"),
        (HSDP | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size=2: several processes .*use 1"),
        (
            HSDP | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"},
            "=2 x .*=8 .*--num_processes 16",
        ),
    ],
)
def test_launched_engine_is_refused(monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        engines.check_launched_engine(4)


def test_fsdp_sums_in_float32(monkeypatch):
    assert engines.fsdp_plugin() is None
    for name, value in (FSDP2 | {"ACCELERATE_MIXED_PRECISION": "bf16"}).items():
        monkeypatch.setenv(name, value)
    policy = engines.fsdp_plugin().mixed_precision_policy
    kinds = policy.param_dtype, policy.reduce_dtype, policy.output_dtype
    assert kinds == (torch.bfloat16, torch.float32, torch.float32)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert engines.fsdp_plugin().mixed_precision_policy is None


# ---- Memory ----------------------------------------------------------------------------------

GB = 10**9


def test_bytes_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10, bias=False))
    model[1].requires_grad_(False)
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1)
    assert count_bytes(model, adam) == Bytes(4 * 210, 4 * 110, 8 * 110)
    assert count_bytes(model, sgd) == Bytes(4 * 210, 4 * 110, 0)
    sgd.param_groups[0]["momentum"] = 0.9
    assert count_bytes(model, sgd) == Bytes(4 * 210, 4 * 110, 4 * 110)
    step = model(torch.ones(2, 10)).sum()
    step.backward()
    adam.step()
    kept = sum(v.nbytes for s in adam.state.values() for v in s.values() if v.ndim)
    assert kept == count_bytes(model, adam).optimizer


def test_a_model_that_cannot_fit_is_refused_before_prepare(monkeypatch, tokens, tmp_path):
    """Not by the device, in the middle of `prepare`."""
    seen = []
    monkeypatch.setattr(memory, "_device_bytes", lambda device: seen.append(device) or 100_000)
    monkeypatch.setattr(Accelerator, "prepare", None)
    given = language_model.Config(**config(tokens, tmp_path))
    with pytest.raises(UsageError, match="one process does not fit: weights 74.1 KB, .*; fewer"):
        language_model.main(given)
    assert seen == [torch.device("cpu")]


def test_bytes_of_each_engine():
    """The table of accelerate_configs/README.md, for a billion parameters."""
    sizes = Bytes(4 * GB, 4 * GB, 8 * GB)
    zero = {"ZeRO-2": 6 * GB, "ZeRO-3": 4 * GB}
    expected = {"DDP": 16 * GB, "HSDP": 2 * GB, "FSDP2": 2 * GB, **zero}
    assert bytes_per_process(sizes, 8, 8) == expected
    assert bytes_per_process(sizes, 4, 4)["ZeRO-3"] == 5 * GB
    assert bytes_per_process(sizes, 16, 8)["HSDP"] == 2 * GB
    assert bytes_per_process(sizes, 1, 1)["DDP"] == 16 * GB


@pytest.mark.parametrize(
    ("engine", "processes", "local", "total", "result", "words"),
    [
        ("DDP", 8, 8, 80, PASS, ""),
        ("DDP", 8, 8, 20, WARN, "DDP leaves little .*FSDP2 fits: accelerate_configs/fsdp2.yaml"),
        ("DDP", 8, 8, 15, FAIL, "DDP does not fit: .*16 GB with DDP.*FSDP2 fits"),
        ("DDP", 16, 8, 15, FAIL, "HSDP fits: accelerate_configs/hsdp.yaml"),
        ("DDP", 2, 2, 6, FAIL, "on 4 GPUs or more"),
        ("DDP", 1, 1, 15, FAIL, "one process does not fit.*on 2 GPUs or more"),
        ("FSDP2", 8, 8, 15, PASS, ""),
        ("FSDP2", 2, 2, 6, FAIL, "FSDP2 does not fit.*on 4 GPUs or more"),
        ("HSDP", 16, 4, 5, WARN, "HSDP leaves little .*FSDP2 fits"),
        ("HSDP", 4, 4, 15, PASS, "4 GB with HSDP"),  # all of them shard: as FSDP2
        ("ZeRO-3", 8, 8, 5, WARN, "ZeRO-3 leaves little .*FSDP2 fits"),
    ],
)
def test_memory_names_the_engine_that_fits(engine, processes, local, total, result, words):
    sizes = Bytes(4 * GB, 4 * GB, 8 * GB)
    finding = judge_memory(sizes, engine, processes, local, total * GB, on_cpu=False)
    assert finding.result == result, finding
    assert re.search(words, f"{finding.seen} {finding.remedy}"), finding


def test_memory_of_a_cpu():
    sizes = Bytes(4 * GB, 4 * GB, 8 * GB)
    finding = judge_memory(sizes, "DDP", 2, 2, 12 * GB, on_cpu=True)
    assert finding.result == FAIL and "fewer processes" in finding.remedy
