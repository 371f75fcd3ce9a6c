"""One update's gradient and figures, on any layout, against numpy in one process."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from tests.test_order import hash_reference
from utils.order import MicroBatchSampler, SampleOrder
from utils.plan import plan_batches
from utils.window import Totals, Window, WindowLoader

# 27 samples of 3 pixels, 8 samples an update: 3 updates an epoch, 7 in all. Labels of -100 do not
# count: many here and there, the first half of the second window, the whole third window.
SAMPLES, PIXELS, FEATURES, CLASSES, GLOBAL, TOTAL, SEED, RATE = 27, 3, 5, 4, 8, 7, 11, 0.5
LAYOUTS = [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 2, 2), (2, 1, 4), (4, 2, 1), (4, 1, 2)]


class Pixels(Dataset):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(SAMPLES, PIXELS, FEATURES))
        self.label = rng.integers(0, CLASSES, size=(SAMPLES, PIXELS))
        self.label[rng.random(size=self.label.shape) < 0.3] = -100
        ids = SampleOrder(SAMPLES, SEED).ids(0, 0, SAMPLES).numpy()
        self.label[ids[GLOBAL : GLOBAL + GLOBAL // 2]] = -100
        self.label[ids[2 * GLOBAL : 3 * GLOBAL]] = -100

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x, label = torch.from_numpy(self.x[i]), torch.from_numpy(self.label[i])
        return {"x": x, "label": label, "id": torch.tensor(i)}


def numpy_truth() -> list[dict]:
    """Each update's figures and gradient, by hand: softmax regression in float64."""
    data = Pixels()
    weight, bias = np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)
    weight[0, 0] = 1.0
    updates = []
    for step in range(1, TOTAL + 1):
        epoch, window = divmod(step - 1, SAMPLES // GLOBAL)
        ids = SampleOrder(SAMPLES, SEED).ids(epoch, window * GLOBAL, (window + 1) * GLOBAL).numpy()
        x, label = data.x[ids].reshape(-1, FEATURES), data.label[ids].reshape(-1)
        x, label = x[label >= 0] + epoch, label[label >= 0]  # the transform adds the epoch
        logits = x @ weight.T + bias
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        count = len(label)
        losses = -np.log(probabilities[np.arange(count), label])
        delta = probabilities.copy()
        delta[np.arange(count), label] -= 1
        gradient = np.concatenate([(delta.T @ x).ravel(), delta.sum(axis=0)]) / max(count, 1)
        updates.append(
            {
                "count": count,
                "loss": losses.sum() / count if count else math.nan,
                "gradient": gradient,
                "norm": np.sqrt((gradient**2).sum()),
                "digest": sum(hash_reference(int(i), 0, 0, 0) for i in ids) % 2**64,
                "epoch": epoch,
            }
        )
        weight = weight - RATE * gradient[: weight.size].reshape(weight.shape)
        bias = bias - RATE * gradient[weight.size :]
    return updates


def count_valid(batch):
    return (batch["label"] != -100).sum()


class HostReads(TorchDispatchMode):
    """Counts `.item()` and its like, which on an accelerator wait for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def run_updates(size, micro, accumulation, num_workers=0, start_step=0):
    from utils.start import open_accelerator

    torch.set_default_dtype(torch.float64)
    accelerator = open_accelerator()
    assert accelerator.num_processes == size
    plan = plan_batches(GLOBAL, micro, size)
    assert plan.accumulation == accumulation
    accelerator.gradient_accumulation_steps = accumulation
    order = SampleOrder(SAMPLES, SEED)
    sampler = MicroBatchSampler(order, plan, accelerator.process_index, TOTAL)
    sampler.start_step = start_step
    loader = DataLoader(
        Pixels(), batch_sampler=sampler, num_workers=num_workers, generator=torch.Generator()
    )
    windows = WindowLoader(
        loader, accelerator.device, count_valid, lambda b, epoch: {**b, "x": b["x"] + epoch}
    )
    model = torch.nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        model.weight.zero_()[0, 0] = 1.0
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)

    tolists, plain_tolist = [], torch.Tensor.tolist
    torch.Tensor.tolist = lambda self: tolists.append(self.shape) or plain_tolist(self)
    updates = []
    for window in windows:
        assert len(window.batches) == accumulation and window.total.dtype == torch.int64
        tolists.clear()
        loss_sum, synchronised = torch.zeros(()), []
        with HostReads() as reads:
            for batch in window.batches:
                with accelerator.accumulate(model):
                    logits = model(batch["x"])
                    loss = F.cross_entropy(
                        logits.flatten(0, 1), batch["label"].flatten(), reduction="sum"
                    )
                    accelerator.backward(loss * window.scale)
                    loss_sum += loss.detach()
                    synchronised.append(accelerator.sync_gradients)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
                        totals = window.reduce(loss_sum, norm)
                        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
                        gradient = gradient.clone().numpy()
                        if totals.count:
                            optimizer.step()
                    optimizer.zero_grad()
        assert synchronised == [False] * (accumulation - 1) + [True]
        assert len(tolists) == 1 and reads.count == 0  # one host read
        updates.append({"step": window.step, "epoch": window.epoch, "gradient": gradient}
                       | {"totals": totals._asdict()})  # fmt: skip
    torch.Tensor.tolist = plain_tolist
    return updates


def assert_equal_to_truth(replies, start_step=0):
    truth = numpy_truth()[start_step:]
    assert len(truth) == TOTAL - start_step
    for updates in replies:
        assert [update["step"] for update in updates] == list(range(start_step + 1, TOTAL + 1))
        for update, true in zip(updates, truth, strict=True):
            totals = Totals(**update["totals"])
            np.testing.assert_allclose(update["gradient"], true["gradient"], rtol=0, atol=1e-12)
            assert totals.count == true["count"] and type(totals.count) is int
            assert totals.loss == pytest.approx(true["loss"], rel=1e-12, nan_ok=True)
            assert totals.grad_norm == pytest.approx(true["norm"], rel=1e-12)
            assert totals.digest == true["digest"]
            assert update["epoch"] == true["epoch"]
            assert 0 <= totals.wait_seconds < 60


@pytest.mark.parametrize("size, micro, accumulation", LAYOUTS)
def test_every_layout_gives_the_true_gradient(pool, size, micro, accumulation):
    truth = numpy_truth()
    assert truth[2]["count"] == 0 and 0 < truth[1]["count"] <= GLOBAL // 2 * PIXELS
    replies = pool.run(size, run_updates, size, micro, accumulation, init=False)
    assert_equal_to_truth(replies)


def test_loader_workers_change_nothing(pool):
    assert_equal_to_truth(pool.run(2, run_updates, 2, 2, 2, num_workers=2, init=False))


def windows_only(start_step, processes=2):
    """The windows of rank 0, without a model."""
    plan = plan_batches(GLOBAL, 2, processes)
    sampler = MicroBatchSampler(SampleOrder(SAMPLES, SEED), plan, 0, TOTAL)
    sampler.start_step = start_step
    loader = DataLoader(Pixels(), batch_sampler=sampler)
    return list(WindowLoader(loader, torch.device("cpu"), count_valid, lambda batch, epoch: batch))


def test_a_resume_hands_out_the_same_windows():
    whole, resumed = windows_only(0), windows_only(4)
    assert [w.step for w in resumed] == [5, 6, 7]
    for one, other in zip(whole[4:], resumed, strict=True):
        assert (one.epoch, one.digest) == (other.epoch, other.digest)
        for a, b in zip(one.batches, other.batches, strict=True):
            assert a["id"].tolist() == b["id"].tolist()
    again = windows_only(4)  # nothing is left of an earlier iteration
    assert [w.digest for w in again] == [w.digest for w in resumed]


class CountedPixels(Pixels):
    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        return super().__getitem__(index)


class Busy:
    """An accelerator's event that has not been reached."""

    def __init__(self, device):
        self.recorded = False

    def record(self):
        self.recorded = True

    def query(self):
        assert self.recorded
        return False


def test_the_next_window_is_fetched_while_the_accelerator_computes(monkeypatch):
    expected = windows_only(0)
    plan = plan_batches(GLOBAL, 2, 2)
    sampler = MicroBatchSampler(SampleOrder(SAMPLES, SEED), plan, 0, TOTAL)
    pixels = CountedPixels()
    monkeypatch.setattr("utils.window.to_device", lambda batch, device: batch)
    monkeypatch.setattr(torch, "Event", Busy)
    loader = DataLoader(pixels, batch_sampler=sampler)
    loader = WindowLoader(loader, torch.device("cuda"), count_valid, lambda batch, epoch: batch)
    a_window = plan.micro_batch_size * plan.accumulation
    for window, same in zip(loader, expected, strict=True):
        assert pixels.asked == window.step * a_window
        assert window.digest == same.digest
        window.reduce(torch.tensor(1.0), torch.tensor(1.0))
        assert pixels.asked == min(window.step + 1, TOTAL) * a_window


DIGESTS = [2**64 - 1, 2**64 - 2**32 + 5, 2**63 + 12345, 0x0123456789ABCDEF]


def reduce_figures(size, count):
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    loss = torch.tensor(0.1 * (rank + 1), dtype=torch.float32)
    window = Window(
        step=1,
        epoch=0,
        batches=[],
        counted=lambda: torch.tensor(count),
        shares=size,
        digest=DIGESTS[rank],
        wait_seconds=float(rank),
    )
    return window.reduce(loss, torch.tensor(3.0, dtype=torch.float32))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_figures_are_reduced_exactly(pool, size):
    count = 2**40 + 1
    for totals in pool.run(size, reduce_figures, size, count):
        assert totals.digest == sum(DIGESTS[:size]) % 2**64
        assert totals.count == count
        exact = sum(float(np.float32(0.1 * (rank + 1))) for rank in range(size))
        assert totals.loss == pytest.approx(exact / count, rel=1e-15)
        assert totals.grad_norm == 3.0
        assert totals.wait_seconds == (size - 1) / 2  # the mean over the processes
        assert totals.skipped is False


def test_an_engine_that_tells_no_norm():
    window = windows_only(0)[0]
    totals = window.reduce(torch.tensor(2.0), None)
    assert math.isnan(totals.grad_norm) and totals.loss == 2 / totals.count


def test_nothing_valid_is_no_division_by_zero():
    totals = reduce_figures(1, 0)
    assert totals.count == 0 and math.isnan(totals.loss)
    third = windows_only(0, processes=1)[2]  # P * A = 4
    assert third.total.item() == 0 and third.scale.item() == 4.0


@pytest.mark.gpu
def test_only_the_reduction_waits_for_the_accelerator():
    device = torch.device("cuda")
    plan = plan_batches(GLOBAL, 4, 1)
    sampler = MicroBatchSampler(SampleOrder(SAMPLES, SEED), plan, 0, TOTAL)
    loader = DataLoader(Pixels(), batch_sampler=sampler, pin_memory=True)
    windows = iter(WindowLoader(loader, device, count_valid, lambda batch, epoch: batch))
    next(windows).reduce(torch.zeros((), device=device), torch.zeros((), device=device))
    torch.cuda.set_sync_debug_mode("error")
    try:
        window = next(windows)
        loss, norm = window.scale * 2, window.scale * 0
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            window.reduce(loss, norm)
        assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
