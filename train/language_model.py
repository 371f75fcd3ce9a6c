"""Language modelling: a decoder-only transformer on text, by bytes, characters or a tokenizer.

    python train/language_model.py --dataset input.txt --tokenizer characters
    accelerate launch train/language_model.py --dataset FOLDER --tokenizer tokenizer.json --epochs 1
    accelerate launch train/language_model.py --dataset owner/name --tokenizer tokenizer.json

In shape comments: B windows, T tokens (the context), C channels, H heads, D = C / H, V vocabulary.
"""

import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.data import BatchSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root: utils/ needs no install

from utils import checkpoint, preflight
from utils.batchnorm import convert_batchnorm
from utils.console import Progress, Table, say
from utils.distributed import gather_objects, on_main_process
from utils.errors import FINISHED, PREEMPTED, UsageError, exit_with
from utils.export import export_checkpoint, export_model
from utils.flags import RunFlags, check_flags
from utils.generate import generate
from utils.guard import Guard, stopped_before_restart
from utils.metrics import Speed, Sums, peak_memory_bytes
from utils.models import load_initial_weights
from utils.order import MicroBatchSampler, SampleOrder, ShardSampler, steps_per_epoch
from utils.plan import explain_out_of_memory, plan_batches
from utils.profile import Profiled
from utils.rundir import choose_directory, continue_command
from utils.small_images import TensorLoader
from utils.start import open_accelerator, seed_dropout, world_line
from utils.token_sets import TokenWindows, load_tokens
from utils.trackers import check_tracker
from utils.tracking import Run, is_finished
from utils.window import Batch, Totals, Window, WindowLoader, gradient_norm, to_device


@dataclass(frozen=True)
class Config(RunFlags):
    # Data
    dataset: str = "input.txt"  # text: a file, a folder (train and val in it), parquet, a hub name
    tokenizer: str = "auto"  # bytes (auto), characters, or a tokenizer.json of `tokenizers`
    context: int = 256  # tokens of an example, which the model sees at once
    subset: int = 0  # only the first N examples of each split; 0 = all
    num_workers: int = 0  # loader processes per process; 0 is fast, the tokens are mapped memory
    # Model
    layers: int = 6  # blocks of attention and feed-forward
    heads: int = 6  # of attention, in each block
    width: int = 384  # channels; an even number of them for each head
    dropout: float = 0.0  # share of the outputs of each branch set to 0, in training only
    activation_checkpointing: bool = False  # less memory: blocks are computed again in backward
    weights: str = "none"  # initial weights: none or a file
    # Recipe
    global_batch_size: int = 64  # examples per update, over all processes and micro-steps
    micro_batch_size: int = 0  # examples per process per forward; 0 = global/processes
    epochs: int = 10  # passes over the training set
    max_steps: int = 0  # updates, at most, the schedule cut too; 0 = as epochs says
    lr: float = 1e-3  # peak learning rate at the reference batch
    lr_reference_batch: int = 0  # examples; the rate is lr * global_batch_size / N; 0 = lr as is
    warmup_fraction: float = 0.05  # share of all updates spent in linear warm-up
    beta1: float = 0.9  # decay of AdamW's mean of gradients
    beta2: float = 0.99  # and of their squares; 0.95 for large batches
    weight_decay: float = 0.1  # per update, times the rate; not on norms
    max_grad_norm: float = 1.0  # clip the global gradient norm; 0 = off (it is logged either way)
    sample: int = 0  # tokens to make up and print at each evaluation
    seed: int = 0  # of weights, sample order and made-up text


# ---- Model -----------------------------------------------------------------------------------


def rotary_tables(context: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Cosines and signed sines, float32 (T, 1, D) (Su et al. 2021, arxiv.org/abs/2104.09864)."""
    halves = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    places = torch.arange(context, device=device, dtype=torch.float32)
    angles = torch.outer(places, 10000.0 ** (-halves / size))[:, None]  # (T, 1, D/2)
    return angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], dim=-1)


class Block(nn.Module):
    """Attention, then a gated feed-forward (SwiGLU), each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        hidden = 128 * max(1, width // 48)  # 8/3 of the width or less: three matrices as two of 4
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.queries_and_keys = nn.Linear(width, 2 * width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.feed_in = nn.Linear(width, hidden, bias=False)
        self.feed_out = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        v = self.values(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D)
        y = self.queries_and_keys(y).unflatten(-1, (2 * self.heads, -1))  # (B, T, 2H, D)
        y = torch.addcmul(y * cos, y.roll(y.shape[-1] // 2, -1), sin)  # turned by its position
        q, k = y.type_as(v).transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.attention_out(y.transpose(1, 2).flatten(2)))
        y = self.feed_norm(x)
        return x + self.dropout(self.feed_out(F.silu(self.gate(y)) * self.feed_in(y)))


class Transformer(nn.Module):
    """Decoder-only, pre-norm, without biases; one matrix embeds tokens and scores the next ones."""

    def __init__(
        self, vocabulary: int, layers: int, heads: int, width: int, dropout=0.0, recompute=False
    ):
        super().__init__()
        self.recompute = recompute  # the blocks, in the backward pass
        self.head_size = width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # the branches add up: their sum starts as one layer's
                std = 0.02 / math.sqrt(2 * layers) if name.endswith("out.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of the token after each of `tokens` (B, T)."""
        x = self.dropout(self.embedding(tokens))  # (B, T, C)
        cos, sin = rotary_tables(tokens.shape[1], self.head_size, x.device)
        for block in self.blocks:
            if self.recompute and self.training:
                x = recomputed(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return F.linear(self.norm(x).type_as(self.embedding.weight), self.embedding.weight)


# ---- Loss and evaluation ---------------------------------------------------------------------


def count_valid(batch: Batch) -> torch.Tensor:
    """Labelled tokens of a micro-batch: int64, 0-d."""
    return (batch["label"] != -100).sum()


def compute_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The SUM of the losses over the labelled tokens (0-d), and the logits (B, T, V)."""
    logits = model(batch["tokens"])
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1), batch["label"].flatten(), reduction="sum", ignore_index=-100
    )
    return loss_sum, logits


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader, device, num_bytes: int) -> dict[str, float]:
    """Plain loss over the whole split, `num_bytes` of text: this rank's share, one reduction.

    `model` is the unwrapped one; ranks have equally many batches, as a sharded model needs.
    """
    model.eval()
    sums = Sums(device, floats=("loss",), counts=("num_tokens", "num_examples"))
    for batch in loader:
        batch = to_device(batch, device)
        loss_sum, _ = compute_loss(model, batch)
        num_examples = (batch["label"] != -100).any(dim=1).sum()
        sums.add(loss=loss_sum, num_tokens=count_valid(batch), num_examples=num_examples)
    model.train()
    total = sums.reduce()
    loss = total["loss"] / total["num_tokens"]
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700.0)),  # more is no float
        "val/bits_per_byte": total["loss"] / math.log(2) / num_bytes,
        "val/num_tokens": total["num_tokens"],
        "val/num_examples": total["num_examples"],
    }


def main(cfg: Config) -> int:
    # ---- Setup -------------------------------------------------------------------------------
    cfg = cfg.as_in_run()  # --export: the run's own flags
    check_flags(
        asdict(cfg),
        positive="epochs lr context layers heads width",
        not_negative="subset num_workers max_steps lr_reference_batch weight_decay max_grad_norm "
        "sample",
        below_one="warmup_fraction dropout beta1 beta2",
    )
    if cfg.predict:
        raise UsageError("--predict is for images; of a language model, --sample N prints text")
    pair = 2 * cfg.heads  # rotary positions turn pairs of channels
    if cfg.width % pair:
        fits = cfg.width // pair * pair or pair
        raise UsageError(f"--width {cfg.width} must divide by 2 x --heads {cfg.heads}; use {fits}")
    accelerator = open_accelerator(
        find_unused_parameters=cfg.find_unused_parameters,
        comm_hook=cfg.comm_hook,
        hang_timeout=cfg.hang_timeout,
        can_shard=True,
        max_grad_norm=cfg.max_grad_norm,
    )
    device, num_processes = accelerator.device, accelerator.num_processes
    plan = plan_batches(cfg.global_batch_size, cfg.micro_batch_size, num_processes)
    accelerator.gradient_accumulation_steps = plan.accumulation
    tracker = check_tracker(cfg.tracker)
    directory = choose_directory(cfg.output_dir, cfg.resume, "language_model")
    if stopped_before_restart(directory):
        return PREEMPTED
    guard = Guard(directory, nonfinite=cfg.nonfinite, hang_timeout=cfg.hang_timeout)
    resume_from = checkpoint.resume_path(cfg.resume, directory)
    say(f"world     {world_line(accelerator)}")

    # ---- Data --------------------------------------------------------------------------------
    folder, limit = directory / "tokens", cfg.subset * cfg.context
    data = on_main_process(lambda: load_tokens(cfg.dataset, cfg.tokenizer, folder, limit))
    train_set, test_set = (TokenWindows(split, cfg.context) for split in (data.train, data.val))
    epoch_steps = steps_per_epoch(len(train_set), cfg.global_batch_size)
    total_steps = min(cfg.epochs * epoch_steps, cfg.max_steps or sys.maxsize)
    order = SampleOrder(len(train_set), cfg.seed)
    sampler = MicroBatchSampler(order, plan, accelerator.process_index, total_steps)
    shard = ShardSampler(len(test_set), num_processes, accelerator.process_index, even=True)
    # Both are sharded already: they stay outside `prepare`, which would shard them again.
    make_loader = partial(TensorLoader, num_workers=cfg.num_workers, pin=device.type == "cuda")
    micro_batches = make_loader(train_set, batch_sampler=sampler)
    train_loader = WindowLoader(micro_batches, device, count_valid)
    windows = Profiled(train_loader, cfg.profile, accelerator, directory)
    test_batches = BatchSampler(shard, plan.micro_batch_size, drop_last=False)
    test_loader = make_loader(test_set, batch_sampler=test_batches)

    # ---- Model -------------------------------------------------------------------------------
    size = data.vocabulary.size
    shape = {"vocabulary": size, "layers": cfg.layers, "heads": cfg.heads, "width": cfg.width}
    recompute = cfg.activation_checkpointing
    build = partial(Transformer, **shape, dropout=cfg.dropout, recompute=recompute)
    torch.manual_seed(cfg.seed)  # the same weights on every process
    model = build()
    if cfg.export == "none":  # else the checkpoint has them all
        load_initial_weights(model, cfg.weights, "the transformer")
    # Before the optimizer and `prepare`; there are none, until somebody adds some.
    bn_plan = convert_batchnorm(model, plan.micro_batch_size, plan.micro_batch_size)
    num_parameters = sum(p.numel() for p in model.parameters())
    built = preflight.fingerprint(model)  # `prepare` makes rank 0's weights everybody's

    # ---- Optimizer ---------------------------------------------------------------------------
    lr_used = cfg.lr * (cfg.global_batch_size / (cfg.lr_reference_batch or cfg.global_batch_size))
    warmup_steps = min(round(cfg.warmup_fraction * total_steps), total_steps - 1)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # norms: no decay
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (cfg.beta1, cfg.beta2)
    optimizer = torch.optim.AdamW(groups, lr_used, betas, fused=True)  # one kernel for all

    def learning_rate(step: int) -> float:
        """Linear warm-up, then a cosine that ends at 0 on the last update; `step` from 1."""
        if step <= warmup_steps:
            return lr_used * step / warmup_steps
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return lr_used * 0.5 * (1 + math.cos(math.pi * progress))

    # ---- Prepare -----------------------------------------------------------------------------
    preflight.check_memory(accelerator, model, optimizer)
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
    recipe = checkpoint.recipe_of(asdict(cfg), data_fingerprint=data.fingerprint)
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
    description = {"architecture": {"name": "Transformer", **shape}, "context": cfg.context}
    description |= {"vocabulary": data.vocabulary.as_dict()}
    example, num_bytes = test_set.__getitems__([0])["tokens"], data.val.num_bytes
    export = partial(export_model, directory, plain_model, description, build)
    if cfg.export != "none":
        on_cpu = partial(evaluate, device=torch.device("cpu"), num_bytes=num_bytes)
        return export_checkpoint(cfg.export, export, example, test_loader, on_cpu)

    # ---- Train -------------------------------------------------------------------------------
    say(f"""\
data      {data.describe()}; {len(train_set)} + {len(test_set)} examples of {cfg.context}
batch     {cfg.global_batch_size} = {num_processes} processes x {plan.micro_batch_size} examples \
x {plan.accumulation} micro-steps; {epoch_steps} updates an epoch, {total_steps} in all
model     {cfg.layers} x {cfg.width}, {num_parameters:,} parameters; peak learning rate {lr_used:g}
batchnorm {bn_plan.describe()}
run       {directory}""")
    if step == total_steps and is_finished(directory) and not cfg.eval_only:
        say("finished  already: nothing to do (more --epochs would continue it)")
        return FINISHED
    job = preflight.Job(accelerator, model, optimizer, bn_plan, directory, asdict(cfg), built)
    job.set_data(train_loader, test_loader, num_classes=size)
    evaluate_all = partial(evaluate, plain_model, test_loader, device, num_bytes)
    job.set_functions(update, compute_loss, learning_rate, evaluate_all, count_key="val/num_tokens")
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
        metrics = evaluate(plain_model, guard.batches(test_loader), device, num_bytes)
        if guard.agree_to_stop():
            return None
        peak = max(gather_objects(peak_memory_bytes(device)))
        run.log(step, {**metrics, "perf/peak_memory_bytes": peak})
        loss = metrics["val/loss"]
        table.row(step, step / epoch_steps, loss=loss, bits=metrics["val/bits_per_byte"])
        if cfg.sample:  # on all processes: each may hold a part of the model only
            start = data.vocabulary.boundary  # as a document begins
            tokens = generate(plain_model, start, cfg.sample, cfg.context, cfg.seed)
            say(f"sample    {data.vocabulary.decode(tokens)}")
        run.draw(step)
        return -loss  # higher is better: the best checkpoint stays

    table = Table()
    run = Run(directory, {**asdict(cfg), **derived}, tracker, step, read_only=cfg.eval_only)
    memory = explain_out_of_memory(plan, 0, directory)
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
                    manifest={"recipe": recipe, "flags": asdict(cfg), **derived},
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
