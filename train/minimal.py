"""The smallest complete script, to read first: regression on made-up data, on any processes.

    python train/minimal.py
    accelerate launch --config_file accelerate_configs/cpu_2.yaml train/minimal.py

What a distributed script must not forget is here and nothing else; every layout ends with the same
loss. cifar.py adds real data, schedule, resume, tracking and export.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from safetensors.torch import save_file
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root: utils/ needs no install

from utils.batchnorm import convert_batchnorm, resolve_group
from utils.console import say
from utils.errors import FINISHED, exit_with
from utils.metrics import Sums
from utils.order import MicroBatchSampler, SampleOrder
from utils.plan import plan_batches
from utils.start import open_accelerator, world_line
from utils.window import Batch, Totals, Window, WindowLoader


@dataclass(frozen=True)
class Config:
    global_batch_size: int = 64  # examples per update, over all processes and micro-steps
    micro_batch_size: int = 0  # examples per process per forward; 0 = global/processes
    bn_group: int = 16  # examples that share BatchNorm statistics, on any layout
    max_steps: int = 200  # updates
    lr: float = 0.02  # learning rate, constant
    seed: int = 0  # of the weights and the order of samples
    output: Path = Path("minimal.safetensors")  # where the weights go


def make_points(count: int, seed: int) -> list[Batch]:
    """Points x (3,) with y = sin(x0) + x1 * x2, as a list of samples."""
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    y = x[:, 0].sin() + x[:, 1] * x[:, 2]
    return [{"x": x[i], "y": y[i], "id": torch.tensor(i)} for i in range(count)]


def count_valid(batch: Batch) -> torch.Tensor:
    """Examples of a micro-batch that count in the loss, all of them here: int64, 0-d."""
    return torch.ones_like(batch["id"]).sum()


def compute_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The SUM of the squared errors of the examples (0-d), and the outputs (B,)."""
    outputs = model(batch["x"]).squeeze(1)
    return (outputs - batch["y"]).square().sum(), outputs


@torch.no_grad()
def evaluate(model: torch.nn.Module, samples: list[Batch], device: torch.device):
    """Mean loss over all processes' samples, and their true number: nothing is padded."""
    model.eval()
    sums = Sums(device, floats=("loss",), counts=("num_examples",))
    for sample in samples:
        batch = {key: value[None].to(device) for key, value in sample.items()}
        sums.add(loss=compute_loss(model, batch)[0], num_examples=count_valid(batch))
    total = sums.reduce()
    return total["loss"] / total["num_examples"], total["num_examples"]


def main(cfg: Config) -> int:
    accelerator = open_accelerator()  # refuses a world that is not the one asked for
    device, rank = accelerator.device, accelerator.process_index
    plan = plan_batches(cfg.global_batch_size, cfg.micro_batch_size, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = plan.accumulation
    bn_group, _ = resolve_group(cfg.bn_group, plan.micro_batch_size, plan.num_processes)
    say(world_line(accelerator))

    train_set, test_set = make_points(4096, seed=0), make_points(997, seed=1)
    order = SampleOrder(len(train_set), cfg.seed)  # the same order of samples in every layout
    sampler = MicroBatchSampler(order, plan, rank, cfg.max_steps)
    loader = DataLoader(train_set, batch_sampler=sampler, generator=torch.Generator())  # type: ignore
    windows = WindowLoader(loader, device, count_valid)

    torch.manual_seed(cfg.seed)  # the same weights on every process
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 64, bias=False),  # before BatchNorm its gradient would be mere noise
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )
    bn_plan = convert_batchnorm(model, bn_group, plan.micro_batch_size)  # before the optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    model, optimizer = accelerator.prepare(model, optimizer)  # on the device, in DDP

    def update(window: Window) -> Totals:
        """One update: all micro-batches of its window, over all processes."""
        loss_sum = torch.zeros((), device=device)
        for batch in window.batches:
            with accelerator.accumulate(model):  # gradients travel in the last micro-step only
                loss, _ = compute_loss(model, batch)
                accelerator.backward(loss * window.scale)  # / the window's count, not the batch's
                loss_sum += loss.detach()
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
                    # Sums over all processes: one reduction, and the update's one host read.
                    totals = window.reduce(loss_sum, norm, statistics=bn_plan.statistics())
                    bn_plan.update_running_statistics()
                optimizer.step()  # Accelerate leaves both out until the last micro-step
                optimizer.zero_grad()
        return totals

    for window in windows:
        totals = update(window)
        if window.step % 50 == 0:
            say(f"step {window.step}  train loss {totals.loss:.6f}")
    plain_model = accelerator.unwrap_model(model)  # in evaluation nothing is to be synchronised
    val_loss, count = evaluate(plain_model, test_set[rank :: plan.num_processes], device)
    say(f"val loss {val_loss:.6f} on {count} examples")
    if accelerator.is_main_process:
        save_file(plain_model.state_dict(), cfg.output)
    return FINISHED


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Config, description=__doc__)))
