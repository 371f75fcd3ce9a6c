"""Cost of the BatchNorm implementations: python tests/benchmarks/batchnorm.py (under two minutes).

Forward + backward of one layer in float32 against torch.nn.BatchNorm2d, as the ratio of two runs
that directly follow each other (interleaved, so that a slow moment of the machine hits both). The
bold rows weigh the shapes by the number of such layers in a ResNet-18.

One thread a process by default: torch's BatchNorm has four parallel regions, and waiting at the end
of each for a core that others use says nothing about the arithmetic. For the same reason one
process on a CPU is measured in seconds of CPU time; two processes, and CUDA, by the clock.
"""

import argparse
import copy
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root, so utils/ imports

from tests.pool import free_port
from utils.batchnorm import convert_batchnorm

# (channels, height = width): number of BatchNorm layers of a ResNet-18
RESNET18 = {
    "3x3 stem, 32 pixels": {(64, 32): 5, (128, 16): 5, (256, 8): 5, (512, 4): 5},
    "7x7 stem, 32 pixels": {(64, 16): 1, (64, 8): 4, (128, 4): 5, (256, 2): 5, (512, 1): 5},
}
CLASSIC = {
    "7x7 stem, 224 pixels": {(64, 112): 1, (64, 56): 4, (128, 28): 5, (256, 14): 5, (512, 7): 5}
}


def seconds(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, clock) -> float:
    x.grad = None
    layer.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    layer(x).backward(dy)
    if x.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def compare(
    layer: nn.Module,
    reference: nn.Module,
    shape: tuple[int, ...],
    repeats: int,
    memory_format: torch.memory_format,
    clock=time.perf_counter,
) -> list[tuple[float, float]]:
    """Seconds of (layer, reference), `repeats` times, in turn."""
    device = next(layer.parameters()).device
    x = torch.randn(shape, device=device).to(memory_format=memory_format).requires_grad_()
    dy = torch.randn(shape, device=device).to(memory_format=memory_format)
    for module in (layer, reference):
        seconds(module, x, dy, clock)
    return [
        (seconds(layer, x, dy, clock), seconds(reference, x, dy, clock)) for _ in range(repeats)
    ]


def row(name: str, pairs: list[tuple[float, float]]) -> str:
    low, median, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    plain = statistics.median(b for _, b in pairs) * 1e3
    return f"| {name} | {plain:.2f} | {median:.2f} | {low:.2f} to {high:.2f} |"


def ghost(device: str, batch: int, group: int, repeats: int, shapes: dict) -> None:
    clock = time.process_time if device == "cpu" else time.perf_counter
    for memory_format in (torch.contiguous_format, torch.channels_last):
        kind = f"{device}, {str(memory_format).removeprefix('torch.')}"
        for network, layers in shapes.items():
            updates = [(0.0, 0.0)] * repeats
            for (channels, size), number in layers.items():
                reference = nn.BatchNorm2d(channels).to(device)
                layer = copy.deepcopy(reference)
                convert_batchnorm(layer, group, batch)
                shape = batch, channels, size, size
                pairs = compare(layer, reference, shape, repeats, memory_format, clock)
                print(row(f"ghost {group} of {batch}, {channels}x{size}x{size}, {kind}", pairs))
                updates = [
                    (a + number * c, b + number * d)
                    for (a, b), (c, d) in zip(updates, pairs, strict=True)
                ]
            print(row(f"**ghost {group} of {batch}, ResNet-18 {network}, {kind}**", updates))


def synchronised(rank: int, port: int, device: str, threads: int, repeats: int) -> None:
    """Two processes that share statistics, against two that do not; rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(threads)
    for batch in (8, 32, 256):
        for channels, size in ((64, 32), (512, 4)):
            reference = nn.BatchNorm2d(channels).to(device)
            layer = copy.deepcopy(reference)
            convert_batchnorm(layer, 2 * batch, batch)
            shape = batch, channels, size, size
            pairs = compare(layer, reference, shape, repeats, torch.contiguous_format)
            if rank == 0:
                name = f"synchronised 2 x {batch}, {channels}x{size}x{size}, {device}"
                print(row(name, pairs), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument(
        "--classic", action="store_true", help="224 pixels too: needs 6 GB and minutes"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s) a process, {args.repeats} repeats\n"
    )
    print("| implementation, shape | plain ms | median ratio | quartiles |")
    print("| --- | --- | --- | --- |")
    shapes = RESNET18 | (CLASSIC if args.classic else {})
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        ghost(device, args.batch, args.group, args.repeats, shapes)
        context, port = multiprocessing.get_context("spawn"), free_port()
        processes = [
            context.Process(target=synchronised, args=(r, port, device, args.threads, args.repeats))
            for r in range(2)
        ]
        sys.stdout.flush()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes)


if __name__ == "__main__":
    main()
