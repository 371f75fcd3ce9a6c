"""Object detection: a torchvision detector on images with boxes in COCO's JSON.

    python train/detection.py --dataset bccd             # annotations/ (COCO) and images/ in there
    accelerate launch train/detection.py --dataset coco --weights default --trainable-bn

Each image's losses are its own, with its own random regions (utils/detectors.py), on any layout.

Start a new task: copy this file, change the sections Data and Model and `compute_loss`.
"""

import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from torch.utils.data import BatchSampler
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root: utils/ needs no install

from utils import checkpoint, preflight
from utils.augment import ScaleJitter
from utils.average_precision import average_precision, check_coco_evaluator
from utils.batchnorm import convert_batchnorm, resolve_group
from utils.box_pictures import draw_boxes
from utils.box_sets import find_boxes
from utils.boxes import BOX_REMEDY, MEAN_COLOUR, NO_BOX, describe_square, fit, fitted_back
from utils.console import Progress, Table, say
from utils.detectors import build_detector, check_export, region_keys
from utils.distributed import gather_objects, on_main_process
from utils.errors import FINISHED, PREEMPTED, UsageError, exit_with
from utils.export import export_checkpoint, export_model
from utils.flags import BatchNormGroup, RunFlags, check_flags
from utils.guard import Guard, stopped_before_restart
from utils.image_loading import BadImages, ImageLoader, verify_samples
from utils.metrics import Speed, Sums, peak_memory_bytes
from utils.models import check_forward, load_initial_weights
from utils.order import MicroBatchSampler, SampleOrder, ShardSampler, steps_per_epoch
from utils.plan import explain_out_of_memory, plan_batches
from utils.predict import detect
from utils.profile import Profiled
from utils.rundir import choose_directory, continue_command
from utils.start import default_workers, open_accelerator, seed_dropout, world_line
from utils.trackers import check_tracker
from utils.tracking import Run, is_finished
from utils.window import Batch, Totals, Window, WindowLoader, gradient_norm, to_device


@dataclass(frozen=True)
class Config(RunFlags):
    # Data
    dataset: str = "bccd"  # a folder of annotations/ (COCO's JSON) and images/
    train_json: str = ""  # in annotations/, or a path; "" = instances_train.json or COCO's own
    val_json: str = ""  # in annotations/, or a path; "" = instances_val.json, or val2017, test
    image_size: int = 320  # height and width of a model's inputs; the longer side is scaled to it
    max_scale: float = 1.5  # images are scaled at random, by 1/N to N, and cropped; 1 = not
    vertical_flip: bool = False  # mirror upside down too: where there is no up, as in microscopy
    verify_data: bool = True  # read all images before training; faults are named
    subset: int = 0  # only the first N examples of each split; 0 = all
    num_workers: int = -1  # loader processes per process; -1 = its cores, at most 8
    # Model
    model: str = "fasterrcnn_mobilenet_v3_large_320_fpn"  # a torchvision detector of boxes
    weights: str = "none"  # none, default (torchvision's), backbone (its ImageNet ones) or a file
    trainable_bn: bool = False  # train BatchNorm with weights given, else frozen; without: always
    bn_group: BatchNormGroup = 0  # examples that share statistics; 0 = 16, at most the batch
    regions: int = 128  # of an image that the second stage of Faster R-CNN learns from
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
    max_grad_norm: float = 0.0  # clip the global gradient norm; 0 = off (it is logged either way)
    seed: int = 0  # of weights, sample order and augmentation


# ---- Data ------------------------------------------------------------------------------------


def scale_crop_flip(cfg: Config, image, boxes, labels):
    """Scale and crop at random, mirror; boxes are cut at the edge, slivers of them left out."""
    size = (cfg.image_size, cfg.image_size)
    transform = v2.Compose(
        [
            ScaleJitter(size, scale_range=(1 / cfg.max_scale, cfg.max_scale)),
            v2.RandomCrop(size, pad_if_needed=True, fill=MEAN_COLOUR),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(0.5 if cfg.vertical_flip else 0.0),
            v2.ClampBoundingBoxes(),
            v2.SanitizeBoundingBoxes(min_size=2, labels_getter=lambda inputs: inputs[2]),
        ]
    )
    return transform(image, boxes, labels)


def to_input(seed: int, batch: Batch, epoch: int = 0) -> Batch:
    """Images in [0, 1], which the model normalises, and keys of their regions' random numbers."""
    dtype = torch.get_default_dtype()
    images, boxes = batch["image"].to(dtype) / 255, batch["boxes"].to(dtype)
    keys = region_keys(batch["id"], seed, epoch)
    return {**batch, "image": images, "boxes": boxes, "key": keys}


# ---- Model -----------------------------------------------------------------------------------


def build_model(name: str, *arguments) -> torch.nn.Module:
    """A torchvision detector with fresh weights; `arguments` are those of build_detector."""
    model = build_detector(name, *arguments)
    for layer in model.modules():  # MobileNetV3 has 0.01, for runs of 100,000s of updates
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 0.1
    return model


# ---- Loss and evaluation ---------------------------------------------------------------------


def count_valid(batch: Batch) -> torch.Tensor:
    """Images of a micro-batch, those without boxes too: int64, 0-d."""
    return torch.ones_like(batch["id"]).sum()


def compute_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict]:
    """The SUM of the losses over the images (0-d), and its parts by torchvision's names."""
    targets = []
    for boxes, label, key in zip(batch["boxes"], batch["label"], batch["key"], strict=True):
        real = label != NO_BOX
        targets.append({"boxes": boxes[real], "labels": label[real] + 1, "key": key})
    losses = model(batch["image"], targets)
    return torch.stack(list(losses.values())).sum(), losses


def detections_of(model: torch.nn.Module, batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Boxes, labels (from 0 on) and scores in each image, in its own pixels; on the CPU."""
    return fitted_back(model(batch["image"]), batch["size"], batch["image"].shape[-1])


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader, transform, device, split, classes) -> dict[str, float]:
    """Loss and average precision over the whole split: this rank's share, reductions at the end.

    `model` is the unwrapped one: in evaluation nothing needs to be synchronised, and ranks may
    have different numbers of batches.
    """
    model.eval()
    sums = Sums(device, floats=("loss",), counts=("images",))
    found = {}
    for batch in loader:
        batch = transform(to_device(batch, device))
        loss_sum, _ = compute_loss(model, batch)
        found.update(zip(batch["id"].tolist(), detections_of(model, batch), strict=True))
        sums.add(loss=loss_sum, images=count_valid(batch))
    model.train()
    total = sums.reduce()
    return {
        "val/loss": total["loss"] / max(1, total["images"]),
        "val/num_examples": total["images"],
        **average_precision(split, found, classes),  # of all processes
    }


def main(cfg: Config) -> int:
    # ---- Setup -------------------------------------------------------------------------------
    check_export(cfg.export)
    cfg = cfg.as_in_run()  # --export and --predict: the run's own flags
    check_flags(
        asdict(cfg),
        positive="epochs lr image_size regions",
        from_one="max_scale",
        not_negative="subset max_steps lr_reference_batch momentum weight_decay max_grad_norm",
        below_one="warmup_fraction",
        from_minus_one="num_workers",
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
    directory = choose_directory(cfg.output_dir, cfg.resume, "detection")
    if stopped_before_restart(directory):
        return PREEMPTED
    guard = Guard(directory, nonfinite=cfg.nonfinite, hang_timeout=cfg.hang_timeout)
    resume_from = checkpoint.resume_path(cfg.resume, directory)
    say(f"world     {world_line(accelerator)}")
    if cfg.predict:
        return detect(cfg.predict, cfg.resume, directory, build_model, device)

    # ---- Data --------------------------------------------------------------------------------
    check_coco_evaluator()
    find = partial(find_boxes, cfg.dataset, cfg.train_json, cfg.val_json, cfg.subset)
    data = on_main_process(find)
    classes = data.classes
    train_set = data.train.with_transform(partial(scale_crop_flip, cfg), cfg.seed)
    test_set = data.test.with_transform(partial(fit, cfg.image_size))
    num_workers = default_workers() if cfg.num_workers == -1 else cfg.num_workers
    if cfg.verify_data:
        verify_samples("images", BOX_REMEDY, train_set, test_set)
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
        bad_images=BadImages(directory, "stop", remedy=BOX_REMEDY),
        workers=num_workers,
        pin=device.type == "cuda",
    )
    micro_batches = make_loader(train_set, batch_sampler=sampler)
    transform = partial(to_input, cfg.seed)
    train_loader = WindowLoader(micro_batches, device, count_valid, transform)
    windows = Profiled(train_loader, cfg.profile, accelerator, directory)
    test_loader = make_loader(test_set, batch_sampler=BatchSampler(shard, 1, False))

    # ---- Model -------------------------------------------------------------------------------
    frozen_bn = cfg.weights != "none" and not cfg.trainable_bn
    build = partial(build_model, cfg.model, len(classes), cfg.image_size, frozen_bn, cfg.regions)
    torch.manual_seed(cfg.seed)  # the same weights on every process
    model = build()
    if cfg.export == "none":  # else the checkpoint has them all
        load_initial_weights(model, cfg.weights, cfg.model)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Before the optimizer and `prepare`: groups of examples share statistics, on any layout.
    bn_plan = convert_batchnorm(model, bn_group, plan.micro_batch_size)
    example = test_set[0]["image"][None] / 255
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

    def update(window: Window) -> Totals:
        """One update: the window's micro-steps, then clip, step, statistics."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(window.step)
        losses = []
        for batch in window.batches:
            with accelerator.accumulate(model):  # gradients travel in the last micro-step only
                loss, _ = compute_loss(model, batch)
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
        "classes": classes,  # the model's outputs from 1 on; 0 is the background
        "category_ids": data.category_ids,
        **describe_square(cfg.image_size),
    }
    about = {"flags": asdict(cfg), "model": description, "build": build.args}
    export = partial(export_model, directory, plain_model, description, build)
    if cfg.export != "none":
        options = {"device": torch.device("cpu"), "split": test_set, "classes": classes}
        on_cpu = partial(evaluate, transform=transform, **options)
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
    job.set_data(train_loader, test_loader, num_classes=len(classes), ignore_index=NO_BOX)
    of_split = (transform, device, test_set, classes)
    evaluate_all = partial(evaluate, plain_model, test_loader, *of_split)
    job.set_functions(update, compute_loss, learning_rate, evaluate_all)
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

    def found_in(batch: Batch) -> list[dict[str, torch.Tensor]]:
        return detections_of(plain_model, transform(to_device(batch, device)))

    def evaluate_now() -> float | None:
        """Evaluate, log and draw; the score, or None when a signal came in its middle."""
        metrics = evaluate(plain_model, guard.batches(test_loader), *of_split)
        if guard.agree_to_stop():
            return None
        peak = max(gather_objects(peak_memory_bytes(device)))
        run.log(step, {**metrics, "perf/peak_memory_bytes": peak})
        loss, ap = metrics["val/loss"], metrics["val/ap"]
        table.row(step, step / epoch_steps, loss=loss, AP=ap, AP50=metrics["val/ap50"])
        run.draw(step, partial(draw_boxes, plain_model, found_in, test_set, classes))
        return ap  # higher is better: the best checkpoint stays

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
