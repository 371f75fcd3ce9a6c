"""Semantic segmentation: a torchvision model on images with masks, few of them on each device.

    python train/segmentation.py --dataset camvid        # images/, masks/ and meta.json in there
    accelerate launch train/segmentation.py --dataset camvid --model deeplabv3_resnet50
    accelerate launch train/segmentation.py --dataset owner/name --num-classes 150 --crop-size 480

Start a new task: copy this file, change the sections Data and Model and `compute_loss`.
"""

import math
import random
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch.utils.data import BatchSampler
from torchvision import tv_tensors
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root: utils/ needs no install

from utils import checkpoint, preflight
from utils.augment import IMAGENET_MEAN, IMAGENET_STD, normalise
from utils.batchnorm import convert_batchnorm, resolve_group
from utils.console import Progress, Table, say
from utils.distributed import gather_objects
from utils.errors import FINISHED, PREEMPTED, UsageError, exit_with
from utils.export import describe_input, export_checkpoint, export_model
from utils.flags import BatchNormGroup, RunFlags, check_flags
from utils.guard import Guard, stopped_before_restart
from utils.image_loading import BadImages, ImageLoader, verify_samples
from utils.machines import find_on_each_machine
from utils.mask_sets import find_masked_images
from utils.masks import IGNORED, MASK_REMEDY
from utils.metrics import ConfusionMatrix, Speed, Sums, intersection_over_union, peak_memory_bytes
from utils.models import check_forward, load_initial_weights, torchvision_model
from utils.order import MicroBatchSampler, SampleOrder, ShardSampler, steps_per_epoch
from utils.pictures import draw_masks
from utils.plan import explain_out_of_memory, plan_batches
from utils.predict import segment
from utils.profile import Profiled
from utils.rundir import choose_directory, continue_command
from utils.start import default_workers, open_accelerator, seed_dropout, world_line
from utils.trackers import check_tracker
from utils.tracking import Run, is_finished
from utils.window import Batch, Totals, Window, WindowLoader, gradient_norm, to_device


@dataclass(frozen=True)
class Config(RunFlags):
    # Data
    dataset: str = "camvid"  # a folder of images/, masks/, meta.json, one of parquet, or a hub name
    num_classes: int = 0  # mask values are 0 to N-1; 0 = as meta.json says
    ignore_index: int = -1  # mask value of pixels without a label; -1 = as meta.json says, or none
    crop_size: int = 160  # height and width in training; evaluation takes whole images
    max_scale: float = 2.0  # images are scaled at random, by 1/N to N, before the crop; 1 = not
    verify_data: bool = True  # read all images and masks before training; faults are named
    subset: int = 0  # only the first N examples of each split; 0 = all
    num_workers: int = -1  # loader processes per process; -1 = its cores, at most 8
    # Model
    model: str = "lraspp_mobilenet_v3_large"  # a torchvision segmentation model
    weights: str = "none"  # none, default (torchvision's), backbone (its ImageNet ones) or a file
    bn_group: BatchNormGroup = 0  # examples that share statistics; 0 = 16, at most the batch
    # Recipe
    global_batch_size: int = 16  # examples per update, over all processes and micro-steps
    micro_batch_size: int = 0  # examples per process per forward; 0 = global/processes
    epochs: int = 60  # passes over the training set
    max_steps: int = 0  # updates, at most, the schedule cut too; 0 = as epochs says
    lr: float = 0.1  # peak learning rate at the reference batch
    lr_reference_batch: int = 16  # examples; the rate is lr * global_batch_size / N; 0 = lr as is
    warmup_fraction: float = 0.05  # share of all updates spent in linear warm-up
    momentum: float = 0.9  # Nesterov momentum
    weight_decay: float = 5e-4  # per update, times the rate; not on biases and norms
    auxiliary_weight: float = 0.5  # of the loss of a second head (FCN, DeepLabV3); 0 = no such head
    max_grad_norm: float = 0.0  # clip the global gradient norm; 0 = off (it is logged either way)
    seed: int = 0  # of weights, sample order and augmentation


# ---- Data ------------------------------------------------------------------------------------


def scale_crop_flip(cfg: Config, image: torch.Tensor, mask: torch.Tensor):
    """Crop, then scale at random: the same cost for images of any size. Padding is ignored."""
    scale, size = cfg.max_scale ** random.uniform(-1, 1), cfg.crop_size
    fill = {tv_tensors.Image: [round(255 * x) for x in IMAGENET_MEAN], tv_tensors.Mask: IGNORED}
    crop = v2.RandomCrop(round(size / scale) or 1, pad_if_needed=True, fill=fill)
    image, mask = v2.Resize((size, size))(*crop(image, mask))  # of a mask, the nearest value
    return v2.RandomHorizontalFlip()(image, mask)


def to_input(batch: Batch, epoch: int = 0) -> Batch:
    """Normalised images, and labels as the loss takes them; in every epoch the same."""
    images = normalise(batch["image"], IMAGENET_MEAN, IMAGENET_STD)
    return {**batch, "image": images, "label": batch["label"].long()}


# ---- Model -----------------------------------------------------------------------------------


def build_model(name: str, num_classes: int, auxiliary: bool) -> torch.nn.Module:
    """A torchvision model with fresh weights; FCN and DeepLabV3 may have a second head."""
    options = {"weights_backbone": None, "aux_loss": auxiliary and not name.startswith("lraspp")}
    model = torchvision_model(name, num_classes, "segmentation", **options)
    for layer in model.modules():  # MobileNetV3 has 0.01, for runs of 100,000s of updates
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 0.1
    return model


# ---- Loss and evaluation ---------------------------------------------------------------------


def count_valid(batch: Batch) -> torch.Tensor:
    """Labelled pixels of a micro-batch: int64, 0-d."""
    return (batch["label"] != IGNORED).sum()


def compute_loss(
    model: torch.nn.Module, batch: Batch, auxiliary_weight: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The SUM of the losses over the labelled pixels (0-d), and the logits (B, classes, H, W)."""
    outputs = model(batch["image"])  # "out", and of a second head "aux"
    # Summed apart: the sum of cross_entropy itself adds up in any order on a GPU.
    options = {"target": batch["label"], "ignore_index": IGNORED, "reduction": "none"}
    loss_sum = F.cross_entropy(outputs["out"], **options).sum()
    if auxiliary_weight and "aux" in outputs:
        loss_sum += auxiliary_weight * F.cross_entropy(outputs["aux"], **options).sum()
    return loss_sum, outputs["out"]


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader, transform, device, classes) -> dict[str, float]:
    """Plain loss and mean IoU over the whole split: this rank's share, reductions at the end.

    `model` is the unwrapped one: in evaluation nothing needs to be synchronised, and ranks may
    have different numbers of batches.
    """
    model.eval()
    sums = Sums(device, floats=("loss",), counts=("pixels", "images"))
    confusion = ConfusionMatrix(len(classes), device)
    for batch in loader:
        batch = transform(to_device(batch, device))
        loss_sum, logits = compute_loss(model, batch)
        confusion.add(batch["label"], logits.argmax(dim=1), ignore_index=IGNORED)
        sums.add(loss=loss_sum, pixels=count_valid(batch), images=torch.tensor(len(logits)))
    model.train()
    total, matrix = sums.reduce(), confusion.reduce()
    iou = intersection_over_union(matrix, classes)  # absent classes are left out of the mean
    return {
        "val/loss": total["loss"] / max(1, total["pixels"]),
        "val/miou": sum(iou.values()) / max(1, len(iou)),
        "val/pixel_accuracy": int(matrix.trace()) / max(1, total["pixels"]),
        "val/num_examples": total["images"],
        "val/num_pixels": total["pixels"],
        "val/classes_present": len(iou),
        **{f"val/iou/{name}": value for name, value in iou.items()},
    }


def main(cfg: Config) -> int:
    # ---- Setup -------------------------------------------------------------------------------
    cfg = cfg.as_in_run()  # --export and --predict: the run's own flags
    check_flags(
        asdict(cfg),
        positive="epochs lr crop_size max_scale",
        not_negative="subset max_steps lr_reference_batch momentum weight_decay auxiliary_weight "
        "max_grad_norm num_classes",
        below_one="warmup_fraction",
        from_minus_one="num_workers ignore_index",
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
        cfg.bn_group or min(16, cfg.global_batch_size), plan.micro_batch_size, num_processes
    )
    tracker = check_tracker(cfg.tracker)
    directory = choose_directory(cfg.output_dir, cfg.resume, "segmentation")
    if stopped_before_restart(directory):
        return PREEMPTED
    guard = Guard(directory, nonfinite=cfg.nonfinite, hang_timeout=cfg.hang_timeout)
    resume_from = checkpoint.resume_path(cfg.resume, directory)
    say(f"world     {world_line(accelerator)}")
    if cfg.predict:
        return segment(cfg.predict, cfg.resume, directory, build_model, device)

    # ---- Data --------------------------------------------------------------------------------
    find = partial(find_masked_images, cfg.dataset, cfg.subset, cfg.num_classes, cfg.ignore_index)
    data = find_on_each_machine(cfg.dataset, find)
    classes = data.classes.names
    train_set, test_set = data.train.augmented(partial(scale_crop_flip, cfg), cfg.seed), data.test
    num_workers = default_workers() if cfg.num_workers == -1 else cfg.num_workers
    if cfg.verify_data:
        verify_samples("images and masks", MASK_REMEDY, train_set, test_set)
    epoch_steps = steps_per_epoch(len(train_set), cfg.global_batch_size)
    total_steps = min(cfg.epochs * epoch_steps, cfg.max_steps or sys.maxsize)
    order = SampleOrder(len(train_set), cfg.seed)
    sampler = MicroBatchSampler(
        order, plan, accelerator.process_index, total_steps, carry_epoch=True
    )
    shard = ShardSampler(len(test_set), num_processes, accelerator.process_index)
    # Both are sharded already: they stay outside `prepare`, which would shard them again.
    make_loader = partial(
        ImageLoader,
        bad_images=BadImages(directory, "stop", remedy=MASK_REMEDY),
        workers=num_workers,
        pin=device.type == "cuda",
    )
    micro_batches = make_loader(train_set, batch_sampler=sampler)
    train_loader = WindowLoader(micro_batches, device, count_valid, to_input)
    windows = Profiled(train_loader, cfg.profile, accelerator, directory)
    test_loader = make_loader(test_set, batch_sampler=BatchSampler(shard, 1, False))  # of any size

    # ---- Model -------------------------------------------------------------------------------
    build = partial(build_model, cfg.model, len(classes), cfg.auxiliary_weight > 0)
    torch.manual_seed(cfg.seed)  # the same weights on every process
    model = build()
    if cfg.export == "none":  # else the checkpoint has them all
        load_initial_weights(model, cfg.weights, cfg.model)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Before the optimizer and `prepare`: groups of examples share statistics, on any layout.
    bn_plan = convert_batchnorm(model, bn_group, plan.micro_batch_size)
    example = torch.linspace(-2, 2, 3 * cfg.crop_size**2).view(1, 3, cfg.crop_size, cfg.crop_size)
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

    train_loss = partial(compute_loss, auxiliary_weight=cfg.auxiliary_weight)

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
        "architecture": cfg.model,
        "auxiliary_head": getattr(plain_model, "aux_classifier", None) is not None,
        "classes": classes,
        "palette": data.classes.palette,
        "mask_values": data.classes.values,
        **describe_input(IMAGENET_MEAN, IMAGENET_STD),
    }
    about = {"flags": asdict(cfg), "model": description, "build": build.args}
    export = partial(export_model, directory, plain_model, description, build)
    if cfg.export != "none":
        on_cpu = partial(evaluate, transform=to_input, device=torch.device("cpu"), classes=classes)
        return export_checkpoint(cfg.export, export, example, test_loader, on_cpu)

    # ---- Train -------------------------------------------------------------------------------
    say(f"""\
data      {data.describe()}
batch     {cfg.global_batch_size} = {num_processes} processes x {plan.micro_batch_size} examples \
x {plan.accumulation} micro-steps; {epoch_steps} updates an epoch, {total_steps} in all
model     {cfg.model}, {num_parameters:,} parameters; learning rate {lr_used:g} at its peak
batchnorm {bn_plan.describe()}{bn_advice and "; " + bn_advice}
run       {directory}""")
    if step == total_steps and is_finished(directory) and not cfg.eval_only:
        say("finished  already: nothing to do (more --epochs would continue it)")
        return FINISHED
    job = preflight.Job(accelerator, model, optimizer, bn_plan, directory, asdict(cfg), built)
    job.set_data(train_loader, test_loader, num_classes=len(classes), ignore_index=IGNORED)
    evaluate_all = partial(evaluate, plain_model, test_loader, to_input, device, classes)
    job.set_functions(update, train_loss, learning_rate, evaluate_all, count_key="val/num_pixels")
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

    def logits_of(batch: Batch) -> torch.Tensor:
        return compute_loss(plain_model, to_input(to_device(batch, device)))[1]

    def evaluate_now() -> float | None:
        """Evaluate, log and draw; the score, or None when a signal came in its middle."""
        metrics = evaluate(plain_model, guard.batches(test_loader), to_input, device, classes)
        if guard.agree_to_stop():
            return None
        peak = max(gather_objects(peak_memory_bytes(device)))
        run.log(step, {**metrics, "perf/peak_memory_bytes": peak})
        loss, miou = metrics["val/loss"], metrics["val/miou"]
        present = metrics["val/classes_present"]
        table.row(step, step / epoch_steps, loss=loss, mIoU=miou, classes=present)
        run.draw(step, partial(draw_masks, plain_model, logits_of, test_set, classes))
        return miou  # higher is better: the best checkpoint stays

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
