"""CIFAR-10 as fast as possible: a small network and a short recipe, after airbench94.

    python train/cifar_fast.py
    accelerate launch --mixed_precision bf16 train/cifar_fast.py

The network and most of the recipe are Keller Jordan's (2024, "94% on CIFAR-10 in 3.29 seconds on a
single GPU", arXiv 2404.00498): a frozen first layer that whitens patches, convolution - max-pool -
BatchNorm - GELU blocks that start as the identity, BatchNorm without scales and with fast biases,
label smoothing, Nesterov, a triangular learning rate, alternating flips.
"""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.data import BatchSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root: utils/ needs no install

from utils import checkpoint, preflight
from utils.augment import centre_square, normalise, random_crop_flip, whitening_filters
from utils.batchnorm import convert_batchnorm, resolve_group
from utils.console import Progress, Table, say
from utils.distributed import gather_objects, on_main_process
from utils.errors import FINISHED, PREEMPTED, UsageError, exit_with
from utils.export import describe_input, export_checkpoint, export_model
from utils.flags import BatchNormGroup, RunFlags, check_flags
from utils.guard import Guard, stopped_before_restart
from utils.metrics import Speed, Sums, peak_memory_bytes
from utils.models import check_forward, load_initial_weights
from utils.order import MicroBatchSampler, SampleOrder, ShardSampler, steps_per_epoch
from utils.pictures import ErrorFinder, draw_errors
from utils.plan import explain_out_of_memory, plan_batches
from utils.predict import classify
from utils.profile import Profiled
from utils.rundir import choose_directory, continue_command
from utils.small_images import ImageData, TensorLoader, Tensors, load_small_images, storage_device
from utils.start import open_accelerator, seed_dropout, world_line
from utils.trackers import check_tracker
from utils.tracking import Run, is_finished
from utils.window import Batch, Totals, Window, WindowLoader, gradient_norm, to_device


@dataclass(frozen=True)
class Config(RunFlags):
    # Data
    dataset: str = "auto"  # auto, cifar10, cifar100, digits, a hub name, or a folder of parquet
    subset: int = 0  # only the first N examples of each split; 0 = all
    num_workers: int = 0  # loader processes per process; 0 is fast, the images are in memory
    # Model
    width: float = 1.0  # times 64, 256, 256 channels of the three blocks
    weights: str = "none"  # initial weights: none or a file
    bn_group: BatchNormGroup = 0  # examples that share statistics; 0 = 256, at most the batch
    # Recipe
    global_batch_size: int = 512  # examples per update, over all processes and micro-steps
    micro_batch_size: int = 0  # examples per process per forward; 0 = global/processes
    epochs: int = 10  # passes over the training set
    max_steps: int = 0  # updates, at most, the schedule cut too; 0 = as epochs says
    lr: float = 1.5  # peak learning rate at the reference batch
    lr_reference_batch: int = 1024  # examples; the rate is lr * global_batch_size / N; 0 = lr as is
    warmup_fraction: float = 0.23  # share of all updates spent in linear warm-up
    bias_lr_factor: float = 64.0  # of BatchNorm's biases
    momentum: float = 0.85  # Nesterov momentum
    weight_decay: float = 1.3e-3  # per update, times the rate
    label_smoothing: float = 0.2  # share of the target spread over all classes, in training only
    max_grad_norm: float = 0.0  # clip the global gradient norm; 0 = off (it is logged either way)
    seed: int = 0  # of weights, sample order and augmentation


# ---- Data ------------------------------------------------------------------------------------


def to_input(data: ImageData, batch: Batch) -> Batch:
    """Normalised images (B, C, H, W)."""
    return {**batch, "image": normalise(batch["image"], data.mean, data.std)}


def augment(data: ImageData, seed: int, batch: Batch, epoch: int) -> Batch:
    """The whole batch cropped and mirrored at random, where it is: on the accelerator if any."""
    images, ids, padding = batch["image"], batch["id"], batch["image"].shape[-1] // 16
    crop_flip = partial(random_crop_flip, padding=padding, flip=data.flip, alternate=True)
    images = crop_flip(images, ids, seed=seed, epoch=epoch)
    return to_input(data, {**batch, "image": images})


# ---- Model -----------------------------------------------------------------------------------


def block(channels_in: int, channels: int, pool: nn.Module) -> nn.Sequential:
    """(B, channels_in, H, W) -> (B, channels, H/2, W/2)."""
    layers: list[nn.Module] = []
    for first in (True, False):
        conv = nn.Conv2d(channels_in if first else channels, channels, 3, padding=1, bias=False)
        nn.init.dirac_(conv.weight[: conv.in_channels])  # starts as the identity
        norm = nn.BatchNorm2d(channels, momentum=0.4)
        norm.weight.requires_grad_(False)
        layers += [conv, *([pool] if first else []), norm, nn.GELU()]
    return nn.Sequential(*layers)


class FastNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, num_classes)."""

    def __init__(self, width: float, num_classes: int, image_size: int):
        super().__init__()
        channels = [round(width * base) for base in (64, 256, 256)]
        pool = nn.MaxPool2d(2, ceil_mode=image_size < 16)  # 8 pixels are halved three times too
        self.whiten = nn.Conv2d(3, 24, kernel_size=2)
        self.whiten.weight.requires_grad_(False)
        pairs = zip([24, *channels], channels, strict=False)
        self.blocks = nn.Sequential(*(block(into, out, pool) for into, out in pairs))
        self.head = nn.Linear(channels[-1], num_classes, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.blocks(F.gelu(self.whiten(images)))  # (B, C, H/8, W/8)
        return self.head(maps.amax(dim=(2, 3))) / 9


# ---- Loss and evaluation ---------------------------------------------------------------------


def count_valid(batch: Batch) -> torch.Tensor:
    """Labelled examples of a micro-batch: int64, 0-d."""
    return (batch["label"] != -100).sum()


def compute_loss(
    model: torch.nn.Module, batch: Batch, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The SUM of the losses over the labelled examples (0-d), and the logits (B, classes)."""
    logits = model(batch["image"])
    loss_sum = F.cross_entropy(
        logits, batch["label"], reduction="sum", ignore_index=-100, label_smoothing=label_smoothing
    )
    return loss_sum, logits


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, loader, transform, device, finder: ErrorFinder | None = None
) -> dict[str, float]:
    """Plain loss and accuracy over the whole split: this rank's share, one reduction at the end.

    val/accuracy_flip is of the mean of the outputs for an image and its mirror image.
    `model` is the unwrapped one: in evaluation nothing needs to be synchronised, and ranks may
    have different numbers of batches.
    """
    model.eval()
    sums = Sums(device, floats=("loss",), counts=("correct", "correct_flip", "num_examples"))
    for batch in loader:
        batch = transform(to_device(batch, device))
        loss_sum, logits = compute_loss(model, batch)
        correct = (logits.argmax(dim=1) == batch["label"]).sum()
        if finder is not None:
            finder.add(batch, logits)  # for the pictures
        sums.add(loss=loss_sum, correct=correct, num_examples=count_valid(batch))
        both = logits + model(batch["image"].flip(3))
        sums.add(correct_flip=(both.argmax(dim=1) == batch["label"]).sum())
    model.train()
    total = sums.reduce()
    return {
        "val/loss": total["loss"] / total["num_examples"],
        "val/accuracy": total["correct"] / total["num_examples"],
        "val/accuracy_flip": total["correct_flip"] / total["num_examples"],
        "val/num_examples": total["num_examples"],
    }


def main(cfg: Config) -> int:
    # ---- Setup -------------------------------------------------------------------------------
    cfg = cfg.as_in_run()  # --export and --predict: the run's own flags
    check_flags(
        asdict(cfg),
        positive="width epochs lr bias_lr_factor",
        not_negative="subset num_workers max_steps lr_reference_batch momentum weight_decay "
        "max_grad_norm",
        below_one="warmup_fraction label_smoothing",
    )
    accelerator = open_accelerator(
        find_unused_parameters=cfg.find_unused_parameters,
        comm_hook=cfg.comm_hook,
        hang_timeout=cfg.hang_timeout,
    )
    device, num_processes = accelerator.device, accelerator.num_processes
    plan = plan_batches(cfg.global_batch_size, cfg.micro_batch_size, num_processes)
    accelerator.gradient_accumulation_steps = plan.accumulation
    bn_group, bn_advice = resolve_group(
        cfg.bn_group or min(256, cfg.global_batch_size), plan.micro_batch_size, num_processes
    )
    tracker = check_tracker(cfg.tracker)
    directory = choose_directory(cfg.output_dir, cfg.resume, "cifar_fast")
    if stopped_before_restart(directory):
        return PREEMPTED
    guard = Guard(directory, nonfinite=cfg.nonfinite, hang_timeout=cfg.hang_timeout)
    resume_from = checkpoint.resume_path(cfg.resume, directory)
    say(f"world     {world_line(accelerator)}")
    if cfg.predict:
        return classify(cfg.predict, cfg.resume, directory, FastNet, centre_square, device)

    # ---- Data --------------------------------------------------------------------------------
    data = on_main_process(
        lambda: load_small_images(cfg.dataset, cfg.subset, on_accelerator=device.type != "cpu")
    )
    store = storage_device(data, device, cfg.num_workers)  # on the accelerator, where they fit
    train_set = Tensors(store, image=data.train.images, label=data.train.labels)
    test_set = Tensors(store, image=data.test.images, label=data.test.labels)
    image_size = data.train.images.shape[-1]
    epoch_steps = steps_per_epoch(len(train_set), cfg.global_batch_size)
    total_steps = min(cfg.epochs * epoch_steps, cfg.max_steps or sys.maxsize)
    order = SampleOrder(len(train_set), cfg.seed)
    sampler = MicroBatchSampler(order, plan, accelerator.process_index, total_steps)
    shard = ShardSampler(len(test_set), num_processes, accelerator.process_index)
    # Both are sharded already: they stay outside `prepare`, which would shard them again.
    make_loader = partial(TensorLoader, num_workers=cfg.num_workers, pin=device.type == "cuda")
    micro_batches = make_loader(train_set, batch_sampler=sampler)
    train_loader = WindowLoader(
        micro_batches, device, count_valid, partial(augment, data, cfg.seed)
    )
    windows = Profiled(train_loader, cfg.profile, accelerator, directory)
    test_batches = BatchSampler(shard, plan.micro_batch_size, drop_last=False)
    test_loader = make_loader(test_set, batch_sampler=test_batches)

    # ---- Model -------------------------------------------------------------------------------
    build = partial(FastNet, cfg.width, len(data.classes), image_size)
    torch.manual_seed(cfg.seed)  # the same weights on every process
    model = build()
    some_images = to_input(data, {"image": data.train.images[:5000]})["image"]
    model.whiten.weight.data.copy_(whitening_filters(some_images, size=2))
    if cfg.export == "none":  # else the checkpoint has them all
        load_initial_weights(model, cfg.weights, "FastNet")
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Before the optimizer and `prepare`: groups of examples share statistics, on any layout.
    bn_plan = convert_batchnorm(model, bn_group, plan.micro_batch_size)
    example = to_input(data, {"image": data.test.images[:1]})["image"]
    bn_plan.check_values_per_channel(lambda: check_forward(model, example, "FastNet"))
    num_parameters = sum(p.numel() for p in model.parameters())
    built = preflight.fingerprint(model)  # `prepare` makes rank 0's weights everybody's

    # ---- Optimizer ---------------------------------------------------------------------------
    lr_used = cfg.lr * (cfg.global_batch_size / (cfg.lr_reference_batch or cfg.global_batch_size))
    warmup_steps = min(round(cfg.warmup_fraction * total_steps), total_steps - 1)
    weights = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    biases = [p for p in model.parameters() if p.ndim == 1 and p.requires_grad]
    factor = cfg.bias_lr_factor
    optimizer = torch.optim.SGD(
        [
            {"params": weights, "lr_factor": 1.0, "weight_decay": cfg.weight_decay},
            {"params": biases, "lr_factor": factor, "weight_decay": cfg.weight_decay / factor},
        ],
        lr=lr_used,
        momentum=cfg.momentum,
        nesterov=cfg.momentum > 0,
        fused=True,  # one kernel for all parameters
    )

    def learning_rate(step: int) -> float:
        """Linear from a fifth of the peak to it, then linear to 0 on the last update."""
        if step <= warmup_steps:
            return lr_used * (0.2 + 0.8 * step / warmup_steps)
        return lr_used * (total_steps - step) / (total_steps - warmup_steps)

    # ---- Prepare -----------------------------------------------------------------------------
    model, optimizer = accelerator.prepare(model, optimizer)  # on the device, in DDP, compiled
    plain_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    parameters = list(model.parameters())
    seed_dropout(cfg.seed, accelerator.process_index)  # from here on the ranks' numbers differ

    train_loss = partial(compute_loss, label_smoothing=cfg.label_smoothing)

    def update(window: Window) -> Totals:
        """One update: the window's micro-steps, then clip, step, statistics."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(window.step) * group["lr_factor"]
        losses = []
        for batch in window.batches:
            with accelerator.accumulate(model):  # gradients travel in the last micro-step only
                loss, _ = train_loss(model, batch)
                accelerator.backward(loss * window.scale)  # sum of losses / the window's count
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    if cfg.max_grad_norm:
                        norm = accelerator.clip_grad_norm_(parameters, cfg.max_grad_norm)
                    else:  # only measured
                        norm = gradient_norm(accelerator, parameters)
                    # The update's one host read. Not finite: all stop here, or leave it out.
                    totals = window.reduce(
                        torch.stack(losses), norm, guard.stop_requested, bn_plan.statistics()
                    )
                    totals = guard.check(window, totals, accelerator.scaler)
                    if totals.skipped:
                        bn_plan.discard_statistics()
                    else:
                        optimizer.step()
                        bn_plan.update_running_statistics()
                optimizer.zero_grad()
        return totals

    # ---- Resume ------------------------------------------------------------------------------
    recipe = checkpoint.recipe_of(asdict(cfg), bn_group=bn_group, data_fingerprint=data.fingerprint)
    step, digest, skipped, evaluation_due = 0, 0, 0, False
    found = checkpoint.find_checkpoint(resume_from, cfg.save_on_each_node) if resume_from else None
    if found is not None:
        checkpoint.check_same_recipe(found, recipe, total_steps)
        extra = checkpoint.load_checkpoint(
            found, model=plain_model, optimizer=optimizer, scaler=accelerator.scaler, seed=cfg.seed
        )
        step, digest, skipped = found.step, extra["digest"], extra["skipped"]
        evaluation_due = extra.get("evaluation_due", False)  # a signal came in its middle
        say(f"resume    {found.path}, after update {step} of {total_steps}")
    elif cfg.eval_only or cfg.resume not in ("auto", "never"):
        raise UsageError(f"no usable checkpoint in {resume_from or directory}")
    sampler.start_step = step
    description = {
        "architecture": "FastNet of train/cifar_fast.py",
        "width": cfg.width,
        "classes": data.classes,
        **describe_input(data.mean, data.std, image_size),
    }
    about = {"flags": asdict(cfg), "model": description, "build": build.args}
    export = partial(export_model, directory, plain_model, description, build)
    if cfg.export != "none":
        on_cpu = partial(evaluate, transform=partial(to_input, data), device=torch.device("cpu"))
        return export_checkpoint(cfg.export, export, example, test_loader, on_cpu)

    # ---- Train -------------------------------------------------------------------------------
    say(f"""\
data      {data.name}: {len(train_set)} train, {len(test_set)} test, {image_size}x{image_size}
batch     {cfg.global_batch_size} = {num_processes} processes x {plan.micro_batch_size} examples \
x {plan.accumulation} micro-steps; {epoch_steps} updates an epoch, {total_steps} in all
model     width {cfg.width:g}, {num_parameters:,} parameters; learning rate {lr_used:g} at its peak
batchnorm {bn_plan.describe()}{bn_advice and "; " + bn_advice}
run       {directory}""")
    if step == total_steps and is_finished(directory) and not cfg.eval_only:
        say("finished  already: nothing to do (more --epochs would continue it)")
        return FINISHED
    job = preflight.Job(accelerator, model, optimizer, bn_plan, directory, asdict(cfg), built)
    job.set_data(train_loader, test_loader, num_classes=len(data.classes))
    evaluate_all = partial(evaluate, plain_model, test_loader, partial(to_input, data), device)
    job.set_functions(update, train_loss, learning_rate, evaluate_all)
    if cfg.preflight:
        return preflight.check_all(job)
    preflight.check_start(job)
    derived = {
        **asdict(plan),
        "world_size": num_processes,
        "device": device.type,
        "precision": accelerator.mixed_precision,
        "bn_plan": bn_plan.as_dict(),
        "steps_per_epoch": epoch_steps,
        "total_steps": total_steps,
        "lr_used": lr_used,
        "num_parameters": num_parameters,
        "data_fingerprint": data.fingerprint,
    }

    def evaluate_now() -> float | None:
        """Evaluate, log and draw; the score, or None when a signal came in its middle."""
        finder, batches = ErrorFinder(len(data.classes), device), guard.batches(test_loader)
        metrics = evaluate(plain_model, batches, partial(to_input, data), device, finder)
        if guard.agree_to_stop():
            return None
        errors = finder.reduce()
        peak = max(gather_objects(peak_memory_bytes(device)))
        run.log(step, {**metrics, "perf/peak_memory_bytes": peak})
        loss, accuracy = metrics["val/loss"], metrics["val/accuracy"]
        flip = metrics["val/accuracy_flip"]
        table.row(step, step / epoch_steps, loss=loss, accuracy=accuracy, flip=flip)
        run.draw(step, partial(draw_errors, errors, data.classes, data.test.images))
        return accuracy  # higher is better: the best checkpoint stays

    table = Table()
    run = Run(directory, {**asdict(cfg), **derived}, tracker, step, read_only=cfg.eval_only)
    memory = explain_out_of_memory(plan, bn_group if bn_plan.num_layers else 0, directory)
    with guard.watching(run.report), run, memory:
        if cfg.eval_only:
            return PREEMPTED if evaluate_now() is None else FINISHED
        if evaluation_due and evaluate_now() is None:
            run.end("preempted", guard.reason)
            return PREEMPTED
        progress = Progress(total_steps, step)
        speed = Speed(cfg.global_batch_size)
        for window in windows:
            totals = update(window)
            step = run.step = window.step
            digest = (totals.digest + (digest if (step - 1) % epoch_steps else 0)) % 2**64
            skipped += totals.skipped
            speed.count(totals.wait_seconds)
            last = step == total_steps
            stop = guard.stopping or (step == cfg.stop_after and not last)
            if step % cfg.log_every == 0 or last or stop:
                run.log(
                    step,
                    {
                        "train/loss": totals.loss,
                        "train/lr": learning_rate(step),
                        "train/grad_norm": totals.grad_norm,
                        "train/skipped_updates": skipped,
                        "data/epoch": window.epoch,
                        "data/digest": f"{digest:016x}",
                        **speed.metrics(),
                    },
                )
            progress.update(step, f"loss {totals.loss:.4f}  {speed.examples_per_second:.0f} ex/s")
            evaluation_due = step % (cfg.eval_every or epoch_steps) == 0 or last
            score = evaluate_now() if evaluation_due and not guard.stopping else None
            evaluation_due &= score is None
            stop |= guard.stopping
            if step % cfg.save_every == 0 or last or stop:
                run.flush()  # the metrics are on disk before the checkpoint of the same update
                seconds = checkpoint.save_checkpoint(
                    directory / "checkpoints",
                    step,
                    model=plain_model,
                    optimizer=optimizer,
                    scaler=accelerator.scaler,
                    extra={"digest": digest, "skipped": skipped, "evaluation_due": evaluation_due},
                    manifest={"recipe": recipe, **about, **derived},
                    keep=cfg.keep_checkpoints,
                    score=score,
                    on_each_node=cfg.save_on_each_node,
                )
                run.log(step, {"perf/checkpoint_seconds": seconds})
            if stop:
                progress.close()
                run.end("preempted", guard.reason or "--stop-after")
                say(f"stopped   after update {step}, everything saved. Continue with:")
                say(continue_command(directory))
                return PREEMPTED
            speed.resume()
        progress.close()

        # ---- Finish --------------------------------------------------------------------------
        export(example.to(device))
        run.end("finished")
    say(f"finished  {directory}: metrics.jsonl, curves.png, model/model.safetensors")
    say(run.tracker_line())
    return FINISHED


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Config, description=__doc__)))
