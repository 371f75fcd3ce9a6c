"""language_model.py beside a plain loop of nanoGPT's architecture, in turn in one process:

    REAL_DATA_DIR=FOLDER python tests/benchmarks/language_model.py [--cpu-time]

The well-known setting for a CPU: 4 layers, 4 heads, width 128, context 64, 12 windows an update, by
characters, no dropout, one thread. Exit status 0 when the median ratio of the times of an update
(ours / plain) is at most 1; the last line has the figures. Without REAL_DATA_DIR (its
tinyshakespeare/input.txt) the text is made up.

The plain loop is nanoGPT's (github.com/karpathy/nanoGPT, train.py and model.py), written anew: the
same model (LayerNorm, learnt positions, GELU of four times the width, tied embedding, no biases),
random windows from a memory-mapped file, cosine schedule, clipping at 1, AdamW, the loss read after
each update. In one thing it is faster than nanoGPT's on a CPU: its AdamW is fused, as ours is.

--cpu-time compares the processor time of the process instead of the wall's clock: what an update
takes on a machine that does nothing else, for machines that do.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root, so utils/ imports

from tests.benchmarks import common
from train import language_model
from utils.window import Window, WindowLoader

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
UPDATES = 2000  # of the schedule
BOUND = 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        size = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (y.view(*size[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(size))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim > 1:
                last = name.endswith(("c_proj.weight", "c_out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if last else 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Plain:
    """The plain training loop, all of it."""

    def __init__(self, tokens: Path, vocabulary: int):
        self.tokens = tokens
        self.model = NanoGPT(vocabulary)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
        self.step = 0

    def update(self) -> float:
        self.step += 1
        progress = min(self.step / UPDATES, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = (
                min(self.step / 100, 0.1 + 0.45 * (1 + math.cos(math.pi * progress))) / 1e3
            )
        data = np.memmap(self.tokens, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        x, y = (
            torch.stack(
                [
                    torch.from_numpy(data[i + off : i + off + CONTEXT].astype(np.int64))
                    for i in starts
                ]
            )
            for off in (0, 1)
        )
        loss = self.model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def measure(
    text: Path, directory: Path, pairs: int, updates: int, clock: Callable[[], float]
) -> list[tuple[float, float]]:
    """Seconds of (ours, plain), for `pairs` pairs of adjacent blocks of `updates`."""
    seconds = []
    windows_of = WindowLoader.__iter__

    def drive(loader: WindowLoader) -> Iterator[Window]:
        windows = windows_of(loader)
        plain = Plain(directory / "run" / "tokens" / "train.bin", 66)

        def plain_seconds() -> float:
            start_time = clock()
            for _ in range(updates):
                plain.update()
            return clock() - start_time

        yield from islice(windows, 5)
        plain_seconds()
        for pair in range(pairs):
            theirs = plain_seconds() if pair % 2 else 0.0
            start_time = clock()
            yield from islice(windows, updates)
            ours = clock() - start_time
            seconds.append((ours, theirs or plain_seconds()))

    config = language_model.Config(
        dataset=str(text),
        tokenizer="characters",
        context=CONTEXT,
        layers=LAYERS,
        heads=HEADS,
        width=WIDTH,
        global_batch_size=BATCH,
        epochs=common.NEVER,
        eval_every=common.NEVER,
        save_every=common.NEVER,
        tracker="none",
        output_dir=str(directory / "run"),
    )
    with (
        patch.object(WindowLoader, "__iter__", drive),
        (directory / "console.txt").open("w") as file,
        redirect_stdout(file),
    ):
        language_model.main(config)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks")
    parser.add_argument("--updates", type=int, default=10, help="updates a block")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, not the wall's")
    args = parser.parse_args(arguments)
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        text = Path(os.environ.get("REAL_DATA_DIR", ""), "tinyshakespeare", "input.txt").absolute()
        if "REAL_DATA_DIR" not in os.environ:
            print("WARNING: MADE-UP text: REAL_DATA_DIR is not set", flush=True)
            text = Path(directory, "text.txt")
            letters = np.random.default_rng(0).integers(32, 97, 1_000_000).astype(np.uint8)
            text.write_bytes(letters.tobytes())
        print(f"{common.machine()}, {args.pairs} pairs of {args.updates} updates", flush=True)
        seconds = measure(text, Path(directory), args.pairs, args.updates, clock)
    ours, plain = (
        1000 * common.quartiles(column)[1] / args.updates for column in zip(*seconds, strict=True)
    )
    ratio, low, high = common.median_interval([ours / theirs for ours, theirs in seconds])
    verdict = "holds" if ratio <= BOUND else "FAILS"
    figure = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    print(f"{verdict}, at most {BOUND}: {figure}; {ours:.1f} ms against {plain:.1f} ms an update")
    return 0 if ratio <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
