"""Image classification on your own photographs: train/CLASS/ and val/CLASS/, of any size and kind.

    python train/image_folder.py --dataset FOLDER --verify-data
    accelerate launch train/image_folder.py --dataset FOLDER --weights default --lr 0.02
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train/image_folder.py

Start a new task: copy this file, change the sections Data and Model and `compute_loss`.
"""

import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch.utils.data import BatchSampler
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root: utils/ needs no install

from utils import checkpoint, preflight
from utils.augment import IMAGENET_MEAN, IMAGENET_STD, centre_square, normalise
from utils.batchnorm import convert_batchnorm, resolve_group
from utils.console import Progress, Table, say
from utils.distributed import gather_objects
from utils.errors import FINISHED, PREEMPTED, UsageError, exit_with
from utils.export import describe_input, export_checkpoint, export_model
from utils.flags import BatchNormGroup, RunFlags, check_flags
from utils.guard import Guard, stopped_before_restart
from utils.image_loading import BadImages, ImageDataset, ImageLoader, verify_images
from utils.image_sets import open_image_sets
from utils.machines import find_on_each_machine
from utils.metrics import Speed, Sums, peak_memory_bytes
from utils.models import check_forward, load_initial_weights, torchvision_model
from utils.order import MicroBatchSampler, SampleOrder, ShardSampler, steps_per_epoch
from utils.pictures import ErrorFinder, draw_errors
from utils.plan import explain_out_of_memory, plan_batches
from utils.predict import classify
from utils.profile import Profiled
from utils.rundir import choose_directory, continue_command
from utils.start import default_workers, open_accelerator, seed_dropout, world_line
from utils.trackers import check_tracker
from utils.tracking import Run, is_finished
from utils.window import Batch, Totals, Window, WindowLoader, gradient_norm, to_device


@dataclass(frozen=True)
class Config(RunFlags):
    # Data
    dataset: str = "photos"  # folder of train/CLASS/ and val/CLASS/ or of parquet, or a hub name
    subset: int = 0  # only the first N examples of each split, all classes in turn; 0 = all
    num_workers: int = -1  # loader processes per process; -1 = cores/processes, at most 8
    image_size: int = 224  # pixels, height and width of what the model sees; on a CPU 64, say
    crop_scale: float = 0.08  # the random crop's smallest share of the area, in training
    crop_pct: float = 0.875  # the centre crop's share of the shorter side, in evaluation
    flip: bool = True  # whether a mirrored image keeps its label
    verify_data: bool = False  # read all images before training, list the unreadable ones
    bad_images: Literal["stop", "skip"] = "stop"  # at an unreadable one; skip: another replaces it
    # Model
    model: str = "resnet18"  # a torchvision classifier
    weights: str = "none"  # initial weights: none, default (torchvision's) or a file
    bn_group: BatchNormGroup = 0  # examples that share statistics; 0 = 32, at most the batch
    # Recipe
    global_batch_size: int = 64  # examples per update, over all processes and micro-steps
    micro_batch_size: int = 0  # examples per process per forward; 0 = global/processes
    epochs: int = 30  # passes over the training set
    max_steps: int = 0  # updates, at most, the schedule cut too; 0 = as epochs says
    lr: float = 0.1  # peak learning rate at the reference batch
    lr_reference_batch: int = 256  # examples; the rate is lr * global_batch_size / N; 0 = lr as is
    warmup_fraction: float = 0.05  # share of all updates spent in linear warm-up
    momentum: float = 0.9  # Nesterov momentum
    weight_decay: float = 1e-4  # per update, times the rate; not on biases and norms
    label_smoothing: float = 0.1  # share of the target spread over all classes, in training only
    max_grad_norm: float = 0.0  # clip the global gradient norm; 0 = off (it is logged either way)
    seed: int = 0  # of weights, sample order and augmentation


# ---- Data ------------------------------------------------------------------------------------


def train_transform(image_size: int, crop_scale: float, flip: bool) -> v2.Transform:
    """Of uint8 (3, H, W), in the workers; any will do: all generators are seeded by the sample."""
    crop = v2.RandomResizedCrop(image_size, scale=(crop_scale, 1.0), antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 if flip else 0.0)])


def eval_transform(image: torch.Tensor, image_size: int, crop_pct: float) -> torch.Tensor:
    """The middle square, resized; of --predict too."""
    return centre_square(image, image_size, crop_pct)


# ---- Model -----------------------------------------------------------------------------------


def build_model(name: str, num_classes: int, image_size: int) -> torch.nn.Module:
    """A torchvision model; a ResNet for tiny images gets a 3x3 stem and no max-pool."""
    model = torchvision_model(name, num_classes)
    for block in model.modules():  # blocks start as the identity (Goyal et al. 2017, section 5.1)
        if isinstance(block, (BasicBlock, Bottleneck)):
            last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
            torch.nn.init.zeros_(last.weight)  # type: ignore[arg-type]
    if isinstance(model, ResNet) and image_size <= 32:
        model.conv1 = torch.nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
        model.maxpool = torch.nn.Identity()  # type: ignore[assignment]
        for layer in model.modules():  # smaller weights than torchvision's, which learn faster
            if isinstance(layer, torch.nn.Conv2d):
                layer.reset_parameters()
    return model


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

    `model` is the unwrapped one: in evaluation nothing needs to be synchronised, and ranks may
    have different numbers of batches.
    """
    model.eval()
    sums = Sums(device, floats=("loss",), counts=("correct", "num_examples"))
    for batch in loader:
        batch = transform(to_device(batch, device))
        loss_sum, logits = compute_loss(model, batch)
        correct = (logits.argmax(dim=1) == batch["label"]).sum()
        if finder is not None:
            finder.add(batch, logits)  # for the pictures
        sums.add(loss=loss_sum, correct=correct, num_examples=count_valid(batch))
    model.train()
    total = sums.reduce()
    return {
        "val/loss": total["loss"] / total["num_examples"],
        "val/accuracy": total["correct"] / total["num_examples"],
        "val/num_examples": total["num_examples"],
    }


def main(cfg: Config) -> int:
    # ---- Setup -------------------------------------------------------------------------------
    cfg = cfg.as_in_run()  # --export and --predict: the run's own flags
    check_flags(
        asdict(cfg),
        positive="epochs lr image_size",
        not_negative="subset max_steps lr_reference_batch momentum weight_decay max_grad_norm",
        below_one="warmup_fraction label_smoothing",
        from_minus_one="num_workers",
        share="crop_scale crop_pct",
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
        cfg.bn_group or min(32, cfg.global_batch_size), plan.micro_batch_size, num_processes
    )
    tracker = check_tracker(cfg.tracker)
    directory = choose_directory(cfg.output_dir, cfg.resume, "image_folder")
    if stopped_before_restart(directory):
        return PREEMPTED
    guard = Guard(directory, nonfinite=cfg.nonfinite, hang_timeout=cfg.hang_timeout)
    resume_from = checkpoint.resume_path(cfg.resume, directory)
    say(f"world     {world_line(accelerator)}")
    if cfg.predict:
        return classify(cfg.predict, cfg.resume, directory, build_model, eval_transform, device)

    # ---- Data --------------------------------------------------------------------------------
    data = find_on_each_machine(cfg.dataset, partial(open_image_sets, cfg.dataset, cfg.subset))
    image_size, bad_images = cfg.image_size, BadImages(directory, cfg.bad_images)
    num_workers = default_workers() if cfg.num_workers == -1 else cfg.num_workers
    if cfg.verify_data:
        verify_images([data.train, data.test], num_workers, bad_images)
    augment = train_transform(image_size, cfg.crop_scale, cfg.flip)
    to_square = partial(eval_transform, image_size=image_size, crop_pct=cfg.crop_pct)
    train_set = ImageDataset(data.train, augment, cfg.seed, replace=cfg.bad_images == "skip")
    test_set = ImageDataset(data.test, to_square, cfg.seed, replace=False)  # does not count
    epoch_steps = steps_per_epoch(len(train_set), cfg.global_batch_size)
    total_steps = min(cfg.epochs * epoch_steps, cfg.max_steps or sys.maxsize)
    order = SampleOrder(len(train_set), cfg.seed)
    sampler = MicroBatchSampler(
        order, plan, accelerator.process_index, total_steps, carry_epoch=True
    )
    shard = ShardSampler(len(test_set), num_processes, accelerator.process_index)
    # Both are sharded already: they stay outside `prepare`, which would shard them again.
    make_loader = partial(
        ImageLoader, bad_images=bad_images, workers=num_workers, pin=device.type == "cuda"
    )

    def to_input(batch: Batch, epoch: int = 0) -> Batch:
        return {**batch, "image": normalise(batch["image"], IMAGENET_MEAN, IMAGENET_STD)}

    micro_batches = make_loader(train_set, batch_sampler=sampler)
    train_loader = WindowLoader(micro_batches, device, count_valid, to_input)
    windows = Profiled(train_loader, cfg.profile, accelerator, directory)
    test_batches = BatchSampler(shard, plan.micro_batch_size, drop_last=False)
    test_loader = make_loader(test_set, batch_sampler=test_batches)

    # ---- Model -------------------------------------------------------------------------------
    build = partial(build_model, cfg.model, len(data.classes), image_size)
    torch.manual_seed(cfg.seed)  # the same weights on every process
    model = build()
    if cfg.export == "none":  # else the checkpoint has them all
        load_initial_weights(model, cfg.weights, cfg.model)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Before the optimizer and `prepare`: groups of examples share statistics, on any layout.
    bn_plan = convert_batchnorm(model, bn_group, plan.micro_batch_size)
    example = torch.linspace(-2, 2, 3 * image_size**2).reshape(1, 3, image_size, image_size)
    bn_plan.check_values_per_channel(lambda: check_forward(model, example, cfg.model))
    num_parameters = sum(p.numel() for p in model.parameters())
    built = preflight.fingerprint(model)  # `prepare` makes rank 0's weights everybody's

    # ---- Optimizer ---------------------------------------------------------------------------
    lr_used = cfg.lr * (cfg.global_batch_size / (cfg.lr_reference_batch or cfg.global_batch_size))
    warmup_steps = min(round(cfg.warmup_fraction * total_steps), total_steps - 1)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # biases and norms: no decay
    optimizer = torch.optim.SGD(
        [
            {"params": matrices, "weight_decay": cfg.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=lr_used,
        momentum=cfg.momentum,
        nesterov=cfg.momentum > 0,
        fused=True,  # one kernel for all parameters
    )

    def learning_rate(step: int) -> float:
        """Linear warm-up, then a cosine that ends at 0 on the last update; `step` from 1."""
        if step <= warmup_steps:
            return lr_used * step / warmup_steps
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return lr_used * 0.5 * (1 + math.cos(math.pi * progress))

    # ---- Prepare -----------------------------------------------------------------------------
    model, optimizer = accelerator.prepare(model, optimizer)  # on the device, in DDP, compiled
    plain_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    parameters = list(model.parameters())
    seed_dropout(cfg.seed, accelerator.process_index)  # from here on the ranks' numbers differ

    train_loss = partial(compute_loss, label_smoothing=cfg.label_smoothing)

    def update(window: Window) -> Totals:
        """One update: the window's micro-steps, then clip, step, statistics."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(window.step)
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
    recipe = checkpoint.recipe_of(asdict(cfg), bn_group=bn_group, **data.identity)
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
        "architecture": cfg.model,
        "small_image_stem": isinstance(plain_model, ResNet) and image_size <= 32,
        "classes": data.classes,
        **describe_input(IMAGENET_MEAN, IMAGENET_STD, image_size, cfg.crop_pct),
    }
    about = {"flags": asdict(cfg), "model": description, "build": build.args}
    export = partial(export_model, directory, plain_model, description, build)
    if cfg.export != "none":
        on_cpu = partial(evaluate, transform=to_input, device=torch.device("cpu"))
        return export_checkpoint(cfg.export, export, example, test_loader, on_cpu)

    # ---- Train -------------------------------------------------------------------------------
    say(f"""\
data      {data.name}: {len(train_set)} train, {len(test_set)} test, {image_size}x{image_size}
batch     {cfg.global_batch_size} = {num_processes} processes x {plan.micro_batch_size} examples \
x {plan.accumulation} micro-steps; {epoch_steps} updates an epoch, {total_steps} in all
model     {cfg.model}, {num_parameters:,} parameters; learning rate {lr_used:g} at its peak
batchnorm {bn_plan.describe()}{bn_advice and "; " + bn_advice}
run       {directory}""")
    if step == total_steps and is_finished(directory) and not cfg.eval_only:
        say("finished  already: nothing to do (more --epochs would continue it)")
        return FINISHED
    job = preflight.Job(accelerator, model, optimizer, bn_plan, directory, asdict(cfg), built)
    job.set_data(train_loader, test_loader, num_classes=len(data.classes))
    evaluate_all = partial(evaluate, plain_model, test_loader, to_input, device)
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
        metrics = evaluate(plain_model, batches, to_input, device, finder)
        if guard.agree_to_stop():
            return None
        bad_images.write()
        errors = finder.reduce()
        peak = max(gather_objects(peak_memory_bytes(device)))
        run.log(step, {**metrics, "perf/peak_memory_bytes": peak})
        loss, accuracy = metrics["val/loss"], metrics["val/accuracy"]
        table.row(step, step / epoch_steps, loss=loss, accuracy=accuracy)
        run.draw(step, partial(draw_errors, errors, data.classes, test_set))
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
                bad_images.write()
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
