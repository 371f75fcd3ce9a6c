"""train/language_model.py: layouts, resume, exact evaluation, communication hooks, export."""

import io
import json
import math
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.scripts import read_run, relative_difference
from tests.test_ship import command
from train import language_model
from train.language_model import Transformer
from utils import start
from utils.errors import UsageError
from utils.generate import generate
from utils.order import SampleOrder
from utils.preflight import fingerprint
from utils.token_sets import TokenWindows, load_tokens
from utils.vocabulary import from_dict

CONTEXT, GLOBAL_BATCH, SEED = 12, 8, 3
SMALL = dict(layers=2, heads=2, width=16)


def make_text(path: Path, num_rows: int = 60) -> Path:
    """Questions and answers of many lengths, as rows; the questions are not to be predicted."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        word = "".join(generator.choice(list("abcd"), generator.integers(1, 40)))
        rows.append({"prompt": f"{word}?", "completion": word[::-1].upper()})
    path.mkdir(parents=True)
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text") / "rows")


@pytest.fixture(scope="module")
def tokens(rows):
    """Their token files, which the script takes as they are."""
    load_tokens(str(rows), "auto", rows.parent / "tokens")
    return rows.parent / "tokens"


def config(dataset: Path, directory: Path, **changes) -> dict:
    given = dict(
        dataset=str(dataset),
        output_dir=str(directory),
        context=CONTEXT,
        global_batch_size=GLOBAL_BATCH,
        epochs=1,
        max_steps=5,
        eval_every=1000,  # at the end alone
        seed=SEED,
        tracker="none",
        **SMALL,
    )
    return given | changes


def run(given: dict, dtype: torch.dtype = torch.float64) -> dict:
    """The script's main in this process; rank 0 returns what the run left behind."""
    torch.set_default_dtype(dtype)
    code = language_model.main(language_model.Config(**given))
    if dist.get_rank() if dist.is_initialized() else 0:
        return {}
    return {"code": code, **read_run(Path(given["output_dir"]))}


def train(pool, processes: int, dataset: Path, directory: Path, **changes) -> dict:
    result = pool.run(processes, run, config(dataset, directory, **changes), init=False)[0]
    assert result["config"]["world_size"] == processes
    return result


# ---- One recipe, any layout ------------------------------------------------------------------


def assert_same_run(expected: dict, actual: dict, tolerance: float = 1e-10) -> None:
    for kind in ("model", "momentum"):
        assert expected[kind].keys() == actual[kind].keys()
        for name, value in expected[kind].items():
            assert relative_difference(value, actual[kind][name]) < tolerance, name
    assert expected["metrics"].keys() == actual["metrics"].keys()
    for step, values in expected["metrics"].items():
        for key, value in values.items():
            if key.startswith(("train/", "val/")):
                found = actual["metrics"][step][key]
                assert found == pytest.approx(value, rel=tolerance, abs=1e-14), (step, key)
            elif key.startswith("data/"):
                assert actual["metrics"][step][key] == value, (step, key)


@pytest.fixture(scope="module")
def reference(pool, tokens, tmp_path_factory):
    """The run in one process, without accumulation."""
    return train(pool, 1, tokens, tmp_path_factory.mktemp("reference"))


slow = pytest.mark.slow
LAYOUTS = [
    pytest.param(2, 2, 2),
    pytest.param(4, 2, 1),
    pytest.param(1, 2, 4, marks=slow),
    pytest.param(1, 4, 2, marks=slow),
    pytest.param(2, 4, 1, marks=slow),
    pytest.param(2, 1, 4, marks=slow),
    pytest.param(4, 1, 2, marks=slow),
]


@pytest.mark.parametrize(("processes", "micro", "accumulation"), LAYOUTS)
def test_layout_gives_the_same_run(
    pool, tokens, reference, tmp_path, processes, micro, accumulation
):
    result = train(pool, processes, tokens, tmp_path, micro_batch_size=micro)
    assert result["config"]["accumulation"] == accumulation
    assert len(result["metrics"]) == 5 and result["metrics"][5]["train/lr"] == 0.0
    assert_same_run(reference, result)


@slow
def test_another_seed_is_another_run(pool, tokens, reference, tmp_path):
    """The comparison can fail."""
    with pytest.raises(AssertionError):
        assert_same_run(reference, train(pool, 1, tokens, tmp_path, seed=4), tolerance=1e-3)


def test_gradient_of_ranks_with_other_token_counts(pool, tokens, reference, tmp_path):
    """Of the first update: the norm is that of plain autograd over the whole window."""
    windows = TokenWindows(load_tokens(str(tokens), "auto", tmp_path).train, CONTEXT)
    batch = windows.__getitems__(SampleOrder(len(windows), SEED).ids(0, 0, GLOBAL_BATCH).tolist())
    counts = [(labels != -100).sum().item() for labels in batch["label"].split(2)]
    assert len(set(counts)) == 4  # of four ranks' halves
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(SEED)
        model = Transformer(257, **SMALL)
        logits = model(batch["tokens"]).flatten(0, 1)
        F.cross_entropy(logits, batch["label"].flatten(), ignore_index=-100).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    finally:
        torch.set_default_dtype(torch.float32)
    for run_ in (reference, train(pool, 4, tokens, tmp_path / "run", max_steps=1)):
        assert run_["metrics"][1]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-10)


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 4, marks=slow)])
def test_saved_on_some_processes_continued_on_others(
    pool, tokens, reference, tmp_path, before, after
):
    stopped = train(pool, before, tokens, tmp_path, micro_batch_size=2, stop_after=2)
    assert stopped["code"] == 75 and stopped["status"]["step"] == 2
    continued = train(pool, after, tokens, tmp_path)
    assert continued["code"] == 0 and continued["config"]["world_size"] == after
    assert_same_run(reference, continued)


@slow
def test_other_text_is_another_recipe(pool, tokens, tmp_path):
    train(pool, 1, tokens, tmp_path / "run", stop_after=2)
    other = make_text(tmp_path / "other", num_rows=50)
    with pytest.raises(AssertionError, match="UsageError: .*data_fingerprint"):
        train(pool, 1, other, tmp_path / "run")


@slow
def test_dropout_and_recomputed_blocks(pool, tokens, tmp_path):
    """The blocks computed again draw the same numbers, so the runs are equal bit for bit."""
    plain = train(pool, 2, tokens, tmp_path / "plain", dropout=0.3)
    recomputed = train(
        pool, 2, tokens, tmp_path / "again", dropout=0.3, activation_checkpointing=True
    )
    assert_same_run(plain, recomputed, tolerance=1e-12)
    without = train(pool, 2, tokens, tmp_path / "without")
    assert plain["metrics"][1]["train/loss"] != without["metrics"][1]["train/loss"]


# ---- Evaluation and export -------------------------------------------------------------------


def test_evaluation_is_exact(rows, tokens, reference, tmp_path):
    """Over the whole split at once, with the weights that the run ended with."""
    data = load_tokens(str(tokens), "auto", tmp_path)
    windows = TokenWindows(data.val, CONTEXT)
    batch = windows.__getitems__(list(range(len(windows))))
    model = Transformer(257, **SMALL).double()
    model.load_state_dict(reference["model"])
    with torch.no_grad():
        logits = model(batch["tokens"]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["label"].flatten(), ignore_index=-100, reduction="sum")
    answers = [json.loads(row)["completion"] for row in (rows / "rows.jsonl").open()][54:]
    num_bytes = sum(len(answer.encode()) for answer in answers)
    count = num_bytes + len(answers) - 1  # a boundary in front of each row but the first
    metrics = reference["metrics"][5]
    assert metrics["val/num_tokens"] == count == (batch["label"] != -100).sum()
    assert metrics["val/loss"] == pytest.approx(loss.item() / count, rel=1e-10)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]), rel=1e-10)
    bits = loss.item() / math.log(2) / num_bytes
    assert metrics["val/bits_per_byte"] == pytest.approx(bits, rel=1e-10)


def run_listened(given: dict) -> tuple[dict, str]:
    """The run, and what this process has printed."""
    with redirect_stdout(io.StringIO()) as said:
        result = run(given, torch.float32)
    return result, said.getvalue()


def test_export_and_sample(pool, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be\n" * 40)
    changes = dict(tokenizer="characters", sample=20, max_steps=2)
    given = config(path, tmp_path / "run", **changes)
    (result, said), (_, said_by_rank_1) = pool.run(2, run_listened, given, init=False)
    assert result["config"]["world_size"] == 2
    about = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    shape, vocabulary = about["architecture"], from_dict(about["vocabulary"])
    assert shape.pop("name") == "Transformer" and about["context"] == CONTEXT
    model = Transformer(**shape)
    model.load_state_dict(load_file(tmp_path / "run" / "model" / "model.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, result["model"][name])
    tokens = generate(model, vocabulary.boundary, 20, CONTEXT, SEED)
    assert tokens == generate(model, vocabulary.boundary, 20, CONTEXT, SEED)
    assert tokens != generate(model, vocabulary.boundary, 20, CONTEXT, SEED + 1)
    assert said.count(f"sample    {vocabulary.decode(tokens)}\n") == 1
    assert "sample" not in said_by_rank_1


@slow
@pytest.mark.parametrize("format", ["torch-export", "onnx"])
def test_exported_graphs_take_any_batch_and_length(tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxscript")
        onnxruntime = pytest.importorskip("onnxruntime")
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 40)
    run, given = tmp_path / "run", f"--dataset {tmp_path / 'text.txt'} --tokenizer characters"
    given += " --layers 2 --heads 2 --width 16 --context 16 --global-batch-size 8 --max-steps 2"
    command("language_model", *given.split(), "--tracker", "none", "--output-dir", str(run))
    said = command("language_model", "--export", format, "--resume", str(run))
    assert "val/bits_per_byte" in said and "outputs differ by" in said
    about = json.loads((run / "model" / "model.json").read_text())
    shape = {name: value for name, value in about["architecture"].items() if name != "name"}
    model = Transformer(**shape).float()
    model.load_state_dict(load_file(run / "model" / "model.safetensors"))
    tokens = torch.arange(3 * 7).view(3, 7) % shape["vocabulary"]
    if format == "onnx":
        session = onnxruntime.InferenceSession(run / "model" / "model.onnx")
        logits = torch.from_numpy(session.run(None, {"input": tokens.numpy()})[0])
    else:
        logits = torch.export.load(run / "model" / "model.pt2").module()(tokens)
    torch.testing.assert_close(logits, model.eval()(tokens).detach(), rtol=1e-4, atol=1e-5)


# ---- Model -----------------------------------------------------------------------------------


def test_a_token_is_predicted_from_those_before_it():
    torch.manual_seed(0)
    model = Transformer(20, **SMALL)
    tokens = torch.randint(20, (3, CONTEXT))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 20
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 0


def test_rotary_positions_are_relative():
    cos, sin = language_model.rotary_tables(32, 8, torch.device("cpu"))

    def turned(x, place):
        return x * cos[place, 0] + x.roll(4, -1) * sin[place, 0]

    q, k = torch.randn(2, 8)
    for distance in (0, 1, 5):
        products = [turned(q, place + distance) @ turned(k, place) for place in (0, 3, 20)]
        assert torch.allclose(products[0], torch.stack(products), atol=1e-5)
    assert not torch.allclose(turned(q, 1) @ turned(k, 0), turned(q, 5) @ turned(k, 0), atol=1e-3)


def test_recomputed_blocks_have_the_same_gradient():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Transformer(20, **SMALL, recompute=recompute)
        with mock.patch.object(
            language_model, "recomputed", side_effect=language_model.recomputed
        ) as called:
            model(torch.randint(20, (3, CONTEXT))).square().sum().backward()
        assert called.call_count == (2 if recompute else 0)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


# ---- Communication ---------------------------------------------------------------------------

WIDE = dict(layers=2, heads=2, width=64)
START = 2  # updates that PowerSGD sends whole, here


def run_counted(given: dict) -> tuple[dict, dict[int, int], dict[str, str]]:
    """The run, the bytes that this process gives into gradient sums by update, and checksums of
    its weights at the end."""
    sent: dict[int, int] = {}
    weights: dict[str, str] = {}
    save = language_model.checkpoint.save_checkpoint
    reduce, build = dist.all_reduce, DistributedDataParallel.__init__
    iterate = language_model.WindowLoader.__iter__

    def counted(tensor, *args, **kwargs):
        if tensor.dtype not in (torch.int64, torch.float64):  # counts and figures
            sent[max(sent)] += tensor.nbytes
        return reduce(tensor, *args, **kwargs)

    def build_with_hook(self, *args, **kwargs):
        build(self, *args, **kwargs)
        if given["comm_hook"] == "none":  # what DDP does by itself, in Python
            self.register_comm_hook(None, allreduce_hook)

    def windows(loader):
        for window in iterate(loader):
            sent[window.step] = 0
            yield window

    def save_seen(*args, model, **kwargs):
        weights.update(fingerprint(model))
        return save(*args, model=model, **kwargs)

    with (
        mock.patch.object(language_model.checkpoint, "save_checkpoint", save_seen),
        mock.patch.object(dist, "all_reduce", counted),
        mock.patch.object(DistributedDataParallel, "__init__", build_with_hook),
        mock.patch.object(language_model.WindowLoader, "__iter__", windows),
        mock.patch.object(start, "POWERSGD_START", START),
    ):
        return run(given, torch.float32), sent, weights


def bytes_of_powersgd() -> int:
    """What it promises: n x m numbers as (n + m) x rank, where that is less than half of them."""
    numbers = 0
    for p in Transformer(257, **WIDE).parameters():
        rows, columns = p.shape[0], p.numel() // p.shape[0]
        low_rank = (rows + columns) * start.POWERSGD_RANK
        numbers += low_rank if p.ndim > 1 and 2 * low_rank < p.numel() else p.numel()
    return 4 * numbers


@pytest.mark.parametrize(
    "hook", ["bf16", "powersgd", pytest.param("none", marks=slow), pytest.param("fp16", marks=slow)]
)
def test_bytes_of_an_update(pool, tokens, tmp_path, hook):
    given = config(tokens, tmp_path, comm_hook=hook, micro_batch_size=2, max_steps=4, **WIDE)
    whole = 4 * sum(p.numel() for p in Transformer(257, **WIDE).parameters())
    per_update = {"none": whole, "powersgd": bytes_of_powersgd()}.get(hook, whole // 2)
    first = whole if hook == "powersgd" else per_update
    answers = pool.run(2, run_counted, given, init=False)
    for result, sent, weights in answers:
        assert sent == {1: first, 2: first, 3: per_update, 4: per_update}
        assert result.get("code", 0) == 0
        assert weights == answers[0][2] and len(weights) > 0
    assert bytes_of_powersgd() < whole / 4


@slow
@pytest.mark.parametrize("hook", ["bf16", "fp16", "powersgd"])
def test_hook_learns_as_well(pool, tmp_path, hook):
    rows = make_text(tmp_path / "rows", num_rows=600)
    changes = dict(max_steps=400, epochs=99, layers=3, heads=2, width=128)
    losses = []
    for name in ("none", hook):
        given = config(rows, tmp_path / name, comm_hook=name, **changes)
        result = pool.run(2, run, given, torch.float32, init=False, timeout=600)[0]
        assert result["config"]["world_size"] == 2
        losses.append(result["metrics"][400]["val/loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


# ---- Preflight -------------------------------------------------------------------------------


def run_preflight(given: dict) -> int:
    return language_model.main(language_model.Config(**given, preflight=True))


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (2, {}),
        pytest.param(1, {}, marks=slow),
        pytest.param(2, {"micro_batch_size": 2, "activation_checkpointing": True}, marks=slow),
        pytest.param(2, {"comm_hook": "powersgd"}, marks=slow),
        pytest.param(1, {"dropout": 0.2, "num_workers": 1}, marks=slow),
    ],
)
def test_preflight_passes(pool, tokens, tmp_path, processes, changes):
    given = config(tokens, tmp_path, **changes)
    assert pool.run(processes, run_preflight, given, init=False) == [0] * processes
    report = json.loads((tmp_path / "preflight.json").read_text())
    assert len(report["ranks"]) == processes
    assert {entry["check"]: entry["result"] for entry in report["checks"]} == {
        entry["check"]: "pass" for entry in report["checks"]
    }


# ---- Bad input -------------------------------------------------------------------------------


FLAGS = [  # refused before any process is started
    (dict(width=18, heads=4), "--width 18 must divide by 2 x --heads 4; use 16"),
    (dict(width=6, heads=4), "use 8"),
    (dict(context=0), "--context 0 must be greater than 0"),
    (dict(beta2=1.0), "--beta2 1.0 must be"),
    (dict(sample=-1), "--sample -1 must not be negative"),
    (dict(comm_hook="powersgd", nonfinite="skip"), "--comm-hook powersgd .*--nonfinite skip"),
]
DATA = [
    (dict(dataset="./nowhere"), "--dataset ./nowhere: no such file or folder"),
    (dict(predict="./nowhere"), "--predict ./nowhere: no such file"),
    (dict(dataset="./nowhere", tokenizer="./here"), "--(dataset|tokenizer) ./.*here: no such"),
    (dict(global_batch_size=4096), "examples, fewer than .*4096"),
    (dict(weights="default"), "--weights default: .*give --weights FILE or none"),
]


@pytest.mark.parametrize(("changes", "words"), FLAGS)
def test_bad_flags_are_refused(tokens, tmp_path, changes, words):
    with pytest.raises(UsageError, match=words):
        language_model.main(language_model.Config(**config(tokens, tmp_path / "run", **changes)))
    assert list(tmp_path.iterdir()) == []


def refusal(given: dict) -> str:
    """What the script refuses these flags with."""
    with pytest.raises(UsageError) as error:
        run(given)
    return str(error.value)


@pytest.mark.parametrize(("changes", "words"), DATA)
def test_bad_data_are_refused_and_leave_nothing(pool, tokens, tmp_path, changes, words):
    given = config(tokens, tmp_path / "run") | changes
    assert re.search(words, pool.run(1, refusal, given, init=False)[0])
    assert list(tmp_path.iterdir()) == []


def test_powersgd_in_fp16_is_refused():
    with mock.patch.object(start, "Accelerator") as accelerator:
        accelerator.return_value.mixed_precision = "fp16"
        accelerator.return_value.num_processes = 1
        with pytest.raises(UsageError, match="--comm-hook powersgd .*--mixed_precision bf16"):
            start.open_accelerator(comm_hook="powersgd")


# ---- Real text -------------------------------------------------------------------------------


@slow
def test_tiny_shakespeare_learns(pool, real_data, tmp_path):
    """The first 300 of the 2,000 updates whose loss train/README.md tells."""
    given = config(
        real_data / "tinyshakespeare" / "input.txt",
        tmp_path,
        tokenizer="characters",
        layers=4,
        heads=4,
        width=128,
        context=64,
        global_batch_size=12,
        max_steps=300,
    )
    result = pool.run(1, run, given, torch.float32, init=False, timeout=600)[0]
    assert result["config"]["world_size"] == 1
    assert result["metrics"][300]["val/num_tokens"] == 111_540
    assert result["metrics"][300]["val/loss"] < 2.3
    assert result["metrics"][300]["val/bits_per_byte"] == pytest.approx(
        result["metrics"][300]["val/loss"] / math.log(2), rel=1e-6
    )
