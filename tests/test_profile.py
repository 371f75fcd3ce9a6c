"""--profile: the shares against runs whose shares are known, and that it changes nothing."""

import gzip
import importlib
import io
import json
import re
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.scripts import assert_same_weights, run_cifar, small_cifar, small_data
from utils import marks
from utils.errors import UsageError
from utils.flags import RunFlags, check_flags
from utils.order import MicroBatchSampler, SampleOrder
from utils.plan import plan_batches
from utils.profile import Profiled
from utils.start import open_accelerator
from utils.time_shares import CATEGORIES, PHASE, Span, divide, shares_of
from utils.window import WindowLoader

SMALL = dict(num_train=75, num_test=20)  # 4 updates an epoch
SLEEP = 0.25  # seconds an update, far more than the rest of it


def config(directory: Path, **changes) -> dict:
    given = dict(output_dir=str(directory), global_batch_size=16, bn_group=8, epochs=2)
    return given | dict(eval_every=100) | changes


def summary(directory: Path) -> tuple[dict[str, float], list[str]]:
    """Share of each category, and the ten lines."""
    lines = (directory / "profile" / "summary.txt").read_text().splitlines()
    assert len(lines) == 10
    shares = {}
    for category, line in zip(CATEGORIES, lines[1:8], strict=True):
        found = re.match(rf"{category} +([\d.]+)%", line)
        assert found, line
        shares[category] = float(found[1]) / 100
    assert sum(shares.values()) == pytest.approx(1, abs=0.004)  # rounded to 0.1% each
    return shares, lines


def seconds_of(category: str, directory: Path) -> float:
    """An update's."""
    shares, lines = summary(directory)
    each = re.search(r", (\d+) ms each", lines[0])
    assert each
    return shares[category] * int(each[1]) / 1000


# ---- The arithmetic --------------------------------------------------------------------------


def test_each_moment_counts_once():
    second = 1e6
    spans = [
        Span(0, 4 * second, "host", "forward/"),
        Span(4 * second, 10 * second, "host", "backward/"),
        Span(5 * second, 6 * second, "work"),
        Span(5.5 * second, 6.5 * second, "work"),  # nested and overlapping ones are one
        Span(3 * second, 9 * second, "link"),
        Span(2 * second, 3.5 * second, "link"),
        Span(9 * second, 99 * second, "link"),  # the profile ends before
    ]
    shares = divide(spans)
    expected = {"forward/": 2, "communication/forward": 2, "communication/backward": 4.5}
    assert shares.seconds == pytest.approx(expected | {"backward/": 1.5})
    assert shares.total == pytest.approx(10)
    assert shares.hidden == pytest.approx(1.5)
    assert shares.idle is None
    assert shares.of("communication") == pytest.approx(0.65)
    assert list(shares.parts("communication")) == ["backward", "forward"]  # the largest first


def event(name: str, start: float, end: float, device: str = "CPU", id: int = 0, link: int = 0):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=name.startswith(PHASE),
        thread=1,
        id=id,
        linked_correlation_id=link,
    )


def test_a_gpu_is_judged_by_what_it_computes():
    """The host launches, then waits in "reduce", while the GPU computes."""
    events = [
        event(f"{PHASE}data", 0, 10),
        event(f"{PHASE}forward", 10, 40),
        event(f"{PHASE}reduce", 40, 100),
        event("aten::conv2d", 15, 16, id=1),
        event("autograd::engine::evaluate_function: ConvolutionBackward0", 20, 30, id=2),
        event("c10d::allreduce_", 25, 28, id=3),
        event("gemm", 16, 46, "CUDA", link=1),
        event("gemm", 46, 86, "CUDA", link=2),
        event("ncclDevKernel_AllReduce", 60, 90, "CUDA", link=3),
        event(f"{PHASE}forward", 16, 90, "CUDA"),  # a range's copy: not a kernel
    ]
    shares = shares_of(events)
    microseconds = {label: round(1e6 * seconds) for label, seconds in shares.seconds.items()}
    assert microseconds == {
        "data/transform": 10,
        "forward/": 36,  # 30 of the kernel, 6 before it was launched
        "backward/": 40,
        "communication/other": 4,
        "other/reduce": 10,
    }
    assert shares.hidden == pytest.approx(26e-6)
    assert shares.idle == pytest.approx(26e-6)


# ---- Loops whose shares are known ------------------------------------------------------------


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


def loop_with_a_slow_part(part: str, directory: Path) -> None:
    """Four updates on 8 points each, of which the last two are profiled.

    Args:
        part: what takes SLEEP seconds in each update; "rank 1": all there.
    """

    def maybe_sleep(here: str) -> None:
        time.sleep(SLEEP if here == part else 0)

    class Points(Dataset):
        def __getitems__(self, ids: list[int]) -> dict[str, torch.Tensor]:
            maybe_sleep("reading")
            return {"x": torch.ones(len(ids), 3), "id": torch.tensor(ids)}

    class SGD(torch.optim.SGD):
        def step(self, closure=None):
            maybe_sleep("step")
            return super().step(closure)

    def count_valid(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["id"] >= 0).sum()

    def transform(batch: dict[str, torch.Tensor], epoch: int) -> dict[str, torch.Tensor]:
        maybe_sleep("transform")
        return batch

    def forward(x: torch.Tensor) -> torch.Tensor:
        maybe_sleep("forward")
        maybe_sleep(f"rank {accelerator.process_index}")
        seconds = SLEEP if part == "backward" else 0
        return SlowBackward.apply(model(x), seconds).sum()  # type: ignore[union-attr]

    accelerator = open_accelerator()
    plan = plan_batches(8, 0, accelerator.num_processes)
    sampler = MicroBatchSampler(SampleOrder(32, 0), plan, accelerator.process_index, 4)
    loader = DataLoader(Points(), batch_sampler=sampler, collate_fn=lambda batch: batch)
    windows = WindowLoader(loader, accelerator.device, count_valid, transform)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters()))
    for window in Profiled(windows, "3:4", accelerator, directory):
        for batch in window.batches:
            loss = forward(batch["x"])
            accelerator.backward(loss * window.scale)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        window.reduce(loss.detach(), norm)
        optimizer.step()
        optimizer.zero_grad()
        maybe_sleep("metrics")
        marks.mark("evaluate")
        maybe_sleep("evaluation")
        marks.mark("save")
        maybe_sleep("saving")


@pytest.mark.parametrize(
    ("part", "category", "advice"),
    [
        ("reading", "data", "data: --num-workers"),
        ("transform", "data", "data: the script's own work"),
        ("forward", "forward", "forward and backward, as it should be: "),
        ("backward", "backward", "forward and backward, as it should be: "),
        ("step", "optimizer", "optimizer: a larger --global-batch-size"),
        ("metrics", "logging", "logging: --log-every"),
        ("evaluation", "logging", "logging: --eval-every"),
        ("saving", "logging", "logging: --save-every"),
    ],
)
def test_what_is_slow_is_the_largest(pool, tmp_path, part, category, advice):
    pool.run(1, loop_with_a_slow_part, part, tmp_path, init=False)
    shares, lines = summary(tmp_path)
    assert shares[category] > 0.8
    assert seconds_of(category, tmp_path) > 0.95 * SLEEP
    if part != category:
        assert lines[1 + CATEGORIES.index(category)].split()[2] == part  # the largest is the first
    assert lines[8].startswith(f"largest   {advice}")
    assert lines[0].startswith("profile   updates 3 to 4 on rank 0, ")


def test_waiting_for_another_process_is_communication(pool, tmp_path):
    pool.run(2, loop_with_a_slow_part, "rank 1", tmp_path, init=False)
    shares, lines = summary(tmp_path)
    assert shares["communication"] > 0.8
    assert seconds_of("communication", tmp_path) > 0.95 * SLEEP
    assert lines[4].split()[2] == "backward"  # in the sum of the gradients
    assert lines[8].startswith("largest   communication: the gradients' sum: --comm-hook bf16")


# ---- It changes nothing, and ends with the run -----------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_the_training_is_bitwise_the_same(pool, tmp_path, processes):
    data, results = small_data(**SMALL), []
    for profile in ("", "3:5"):  # the last update of an epoch in its middle
        given = config(tmp_path / profile, bn_group=16, eval_every=0, profile=profile)
        results.append(pool.run(processes, run_cifar, given, data, init=False)[0])
        assert results[-1]["config"]["world_size"] == processes
    assert_same_weights(*results)
    for step, values in results[0]["metrics"].items():
        for key in (key for key in values if not key.startswith("perf/")):
            assert results[1]["metrics"][step][key] == values[key], (step, key)
    assert not (tmp_path / "profile").exists()
    directory = tmp_path / "3:5" / "profile"
    ranks = [f"rank{rank}.json" for rank in range(processes)]
    names = [f"memory_{rank}" for rank in ranks] + [f"trace_{rank}.gz" for rank in ranks]
    assert sorted(path.name for path in directory.iterdir()) == sorted([*names, "summary.txt"])
    for rank in ranks:
        with gzip.open(directory / f"trace_{rank}.gz", "rt") as file:
            names = [entry.get("name") for entry in json.load(file)["traceEvents"]]
        assert names.count(f"{PHASE}forward") >= 3 and "aten::convolution" in names
        assert names.count("Optimizer.step#SGD.step") == 3
        assert processes == 1 or any(str(name).startswith("gloo:") for name in names)
        memory = json.loads((directory / f"memory_{rank}").read_text())
        assert memory["peak_resident_bytes"] > 0
        assert memory["allocated_bytes_by_operator"]["aten::conv2d"] > 0
    _, lines = summary(tmp_path / "3:5")
    assert "evaluation" in lines[6]
    if processes > 1:
        assert "forward" in lines[4]  # BatchNorm's, over both


def console_of(given: dict, data) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run; no profiler and no listener may be left."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = run_cifar(given, data)["code"]
    assert marks._listener is None and not torch.autograd._profiler_enabled()
    return code, out.getvalue(), errors.getvalue()


def test_stopped_in_the_middle_and_continued(pool, tmp_path):
    def run(**changes) -> tuple[int, str]:
        given, data = config(tmp_path, **changes), small_data(**SMALL)
        code, out, _ = pool.run(1, console_of, given, data, init=False)[0]
        return code, out

    code, out = run(profile="3:6", stop_after=4)
    assert code == 75
    assert "--output-dir" in out.splitlines()[-1]  # the last word stays the command to continue
    shares, lines = summary(tmp_path)
    assert lines[0].startswith("profile   updates 3 to 4 on rank 0 (where the run stopped), ")
    assert not list((tmp_path / "profile").glob(".*"))
    code, out = run(profile="2:6", stop_after=7)  # another value; what is left of them
    assert code == 75 and "profile   updates 5 to 6 on rank 0, " in out
    assert summary(tmp_path)[1] == out[out.index("profile   ") :].splitlines()[:10]
    code, out = run(profile="3:6")
    assert code == 0 and "profile   nothing is traced: update 6 was before this start" in out


def fails(given: dict, data) -> None:
    with small_cifar(data) as cifar, ExitStack() as stack:
        compute_loss, calls = cifar.compute_loss, []

        def failing(*args, **kwargs):
            calls.append(0)
            if len(calls) == 3:
                raise RuntimeError("in the middle")
            return compute_loss(*args, **kwargs)

        stack.enter_context(mock.patch.object(cifar, "compute_loss", failing))
        with pytest.raises(RuntimeError, match="in the middle"):
            cifar.main(cifar.Config(**given, tracker="none"))
        assert marks._listener is None and not torch.autograd._profiler_enabled()


def test_an_error_in_the_middle_stops_the_profiler(pool, tmp_path):
    pool.run(1, fails, config(tmp_path, profile="2:4"), small_data(**SMALL), init=False)
    _, lines = summary(tmp_path)
    assert "updates 2 to 3 on rank 0 (where the run stopped)" in lines[0]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(pool, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    given, data = config(tmp_path, profile="2:3"), small_data(**SMALL)
    code, _, errors = pool.run(1, console_of, given, data, init=False)[0]
    assert code == 0
    assert f"warning: profile not written to {tmp_path / 'profile'}: " in errors


# ---- Bad values ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["5", "9:3", "0:4", ":4", "4:", "a:b", "1:2:3", "-1:4"])
@pytest.mark.parametrize("script", ["cifar", "image_folder", "segmentation", "detection"])
def test_bad_values_are_refused_first(script, value):
    module = importlib.import_module(f"train.{script}")
    with mock.patch.object(module, "open_accelerator", side_effect=AssertionError):
        with pytest.raises(UsageError, match=rf"--profile {value} must be FIRST:LAST.* 10:14"):
            module.main(module.Config(dataset="none", profile=value))


def test_good_values():
    for value in ("", "1:1", "10:14"):
        check_flags(asdict(RunFlags(profile=value)))


@pytest.mark.parametrize(("value", "fix"), [("7:9", "6:8"), ("2:20", "1:8")])
def test_beyond_the_last_update_is_refused(pool, tmp_path, value, fix):
    given = config(tmp_path / "run", profile=value)
    with pytest.raises(AssertionError, match=f"UsageError: --profile {value} .* 8; .*{fix}, or"):
        pool.run(1, run_cifar, given, small_data(**SMALL), init=False)
    assert not (tmp_path / "run").exists()
