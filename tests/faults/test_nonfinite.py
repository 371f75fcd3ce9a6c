"""A loss or gradient that is not finite: all processes act on it in the same update."""

import re
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from tests.faults.job import EPOCH_STEPS, NUM_TRAIN, Job
from tests.scripts import read_run
from utils.guard import Guard
from utils.nonfinite import NonFiniteError
from utils.order import SampleOrder
from utils.window import MicroBatches, Window


def update_of(sample: int, batch: int = 16, seed: int = 0) -> tuple[int, int]:
    """The update of the first epoch that takes this sample, and its place in the window."""
    ids = SampleOrder(NUM_TRAIN, seed).ids(0, 0, EPOCH_STEPS * batch).tolist()
    place = ids.index(sample)
    return place // batch + 1, place % batch


def sample_in(step: int, place: int) -> int:
    return SampleOrder(NUM_TRAIN, 0).ids(0, 0, NUM_TRAIN)[(step - 1) * 16 + place].item()


def test_one_bad_sample_stops_all_four_ranks_at_the_same_update(tmp_path):
    bad = sample_in(step=3, place=9)  # 4 ranks x 2 examples x 2 micro-steps: rank 0, micro-step 2
    assert update_of(bad) == (3, 9)
    job = Job(4, tmp_path / "run", f"nan:{bad}", micro_batch_size=2, bn_group=4, save_every=1)
    assert job.wait() == [1] * 4
    run, output = read_run(job.directory), job.output()
    assert run["config"]["world_size"] == 4
    assert max(run["metrics"]) == 2  # and the weights are those after it:
    newest = sorted((job.directory / "checkpoints").glob("step_*"))[-1].name
    assert newest == "step_00000002"
    status = run["status"]
    assert status["state"] == "failed" and status["step"] == 2
    for text in (status["reason"], output):
        assert "update 3: loss nan, gradient norm nan" in text
        assert f"rank 0, micro-step 2: inputs not finite, sample ids [{bad}]" in text
        assert "last checkpoint: step_00000002" in text and "--warmup-fraction" in text
    assert output.count("error: ") == 1  # all four know; one says it
    assert "Traceback" not in output
    saved = torch.load(job.directory / "nonfinite" / "step_00000003_rank_0.pt")
    assert saved["step"] == 3 and bad in saved["batches"][0]["id"].tolist()
    assert saved["batches"][0]["image"].isnan().any()


def test_skip_goes_on_without_the_update(tmp_path):
    bad = sample_in(step=2, place=5)
    job = Job(2, tmp_path / "run", f"nan:{bad}", nonfinite="skip", epochs=1)
    assert job.wait() == [0, 0], job.output()
    run = read_run(job.directory)
    assert run["config"]["world_size"] == 2 and run["status"]["state"] == "finished"
    assert [run["metrics"][s]["train/skipped_updates"] for s in range(1, 5)] == [0, 1, 1, 1]
    assert run["metrics"][2]["train/loss"] is None and run["metrics"][3]["train/loss"] > 0
    assert all(v.isfinite().all() for v in run["model"].values() if v.is_floating_point())
    assert run["model"]["bn1.num_batches_tracked"].item() == 3  # no running statistics of it
    assert "left out on all processes: update 2: loss nan" in job.output()
    assert str([bad]) in job.output()


def test_an_infinite_gradient_of_a_finite_loss(tmp_path):
    job = Job(2, tmp_path / "run", "inf_gradient:1:2", bn_group=8, save_every=1)
    assert job.wait() == [1, 1]
    assert job.status()["state"] == "failed"
    assert re.search(
        r"update 2: loss \d.*, gradient norm (nan|inf); all losses are finite: the gradient is not",
        job.status()["reason"],
    )


# ---- The guard by itself -------------------------------------------------------------------------


def window(step: int, losses, images=None, size: int = 2) -> Window:
    batches = [
        {"image": torch.ones(size, 3) if images is None else images[i],
         "id": torch.arange(size) + 10 * i}
        for i in range(len(losses))
    ]  # fmt: skip
    return Window(
        step,
        0,
        MicroBatches(batches, step),
        lambda: torch.tensor(size * len(losses)),
        1,
        0,
        0.0,
    )


def check(guard, step: int, losses, norm=1.0, scaler=None, images=None):
    one = window(step, losses, images)
    totals = one.reduce(torch.tensor(losses), torch.tensor(norm), guard.stop_requested)
    return guard.check(one, totals, scaler)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "losses, norm, words",
    [
        ([1.0, NAN], 1.0, r"update 7: loss nan, .*rank 0, micro-step 2: sample ids \[10, 11\]"),
        ([1.0, -INF], NAN, r"micro-step 2: sample ids \[10, 11\]"),
        ([INF, -INF], 1.0, r"micro-step 1, 2: sample ids \[0, 1, 10, 11\]"),
        ([1.0, 1.0], INF, r"gradient norm inf; all losses are finite"),
    ],
)
def test_stop_names_the_micro_batch(tmp_path, losses, norm, words):
    guard = Guard(tmp_path)
    assert not check(guard, 6, [1.0, 2.0]).skipped
    with pytest.raises(NonFiniteError, match=words):
        check(guard, 7, losses, norm)
    assert (tmp_path / "nonfinite" / "step_00000007_rank_0.pt").exists()


def test_more_than_ten_in_a_row_stop(tmp_path):
    guard = Guard(tmp_path, nonfinite="skip")
    for step in range(1, 11):
        assert check(guard, step, [NAN]).skipped
    assert not check(guard, 11, [1.0]).skipped  # a good one: counted anew
    for step in range(12, 22):
        assert check(guard, step, [1.0], NAN).skipped
    with pytest.raises(NonFiniteError, match="update 22"):
        check(guard, 22, [NAN])


def scaled(model, scaler, factor: float, overflow: bool = False):
    """A backward pass and its unscaled gradient norm, as accelerator.clip_grad_norm_ does it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3)).sum() * factor
    scaler.scale(loss).backward()
    if overflow:
        model.weight.grad.fill_(INF)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), INF)
    return optimizer, loss.detach(), norm


def test_fp16_overflow_is_skipped_and_the_scaler_can_go_on_after_a_skip(tmp_path):
    guard, model = Guard(tmp_path, nonfinite="skip"), torch.nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = model.weight.detach().clone()
    # A loss that is not finite is no overflow of the scaled gradient: left out, without a step.
    for factor, valid in ((NAN, 2), (1.0, 0)):  # and a window without a valid element likewise
        optimizer, loss, norm = scaled(model, scaler, factor)
        one = window(1, [0.0])
        one.counted = partial(torch.tensor, valid)
        totals = guard.check(one, one.reduce(loss, norm), scaler)
        assert totals.skipped
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0  # halved once, for the first
    # An overflow: the loss is finite, the scaled gradient is not. Left out, without an error; not
    # by `scaler.step`, which for fused optimizers leaves no sign that it did.
    optimizer, loss, norm = scaled(model, scaler, 1.0, overflow=True)
    assert not norm.isfinite()
    one = window(3, [0.0])
    assert guard.check(one, one.reduce(loss, norm), scaler).skipped
    optimizer.zero_grad()
    assert torch.equal(model.weight, weights) and scaler.get_scale() == 1.0
    # And an ordinary update works after all this.
    optimizer, loss, norm = scaled(model, scaler, 1.0)
    one = window(4, [0.0])
    assert not guard.check(one, one.reduce(loss, norm), scaler).skipped
    scaler.step(optimizer)
    assert not torch.equal(model.weight, weights)
    with pytest.raises(NonFiniteError, match="fp16 overflows 30 times in a row"):
        for step in range(5, 40):
            check(guard, step, [1.0], INF, scaler=Mock())
