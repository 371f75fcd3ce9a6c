"""Images a second of cifar.py and of its peers: python tests/benchmarks/throughput.py

About 90 minutes on two cores, 25 with --compile off --calibration-rounds 1, in interleaved rounds:
every contender is a group of processes that stays up, trains a block of updates when it is its
turn, and sleeps while the others have theirs. Four updates before each block are not timed:
meanwhile loader processes have read ahead. Exit status 0 when ours is not slower than any peer in
any row (lower quartile of the ratios at least 0.98) and reaches the speedups below over the bare
float32 loop.

All train torchvision's ResNet-18, unchanged, on 128 images a process, with the same loss and SGD.
Ours is cifar.py's main as its launcher starts it; only data source and model are handed to it, and
its loader is stopped between two windows. The peers are the loops of peers.py, each with the
workers, threads and memory format that are its fastest in a race of its own: bare torch DDP with
torchvision's transforms for each sample, plain Accelerate, Lightning (`pip install lightning`), and
timm's loader (`pip install timm`), where those are installed.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve other processes
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compilers that stays up

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root, so utils/ imports

from tests.benchmarks import common
from tests.benchmarks.peers import PEERS
from utils.small_images import ImageData

LEAST_RATIO = 0.98  # ours to each peer, the lower quartile
LEAST_SPEEDUP = {  # of ours over the bare float32 loop: (processes, contender, precision)
    (1, "ours", "float32"): 1.15,
    (1, "ours", "bf16"): 1.4,
    (2, "ours", "float32"): 1.02,
    (2, "ours", "bf16"): 1.4,
    (2, "ours, bf16 hook", "bf16"): 1.5,
}
READ_AHEAD = 4  # updates before each timed block
Settings = dict[str, Any]  # workers, threads, channels_last; ours: flags


@dataclass(frozen=True)
class Contender:
    name: str  # ours or one of the peers
    size: int  # processes
    precision: str
    compiled: bool
    settings: Settings

    def label(self) -> str:
        hook = self.settings.get("comm_hook")
        return f"{self.name}{f', {hook} hook' if hook else ''}"


def train(pace: common.Pace, contender: Contender, data: ImageData, directory: Path) -> None:
    """One process of a contender; it trains until it is killed."""
    common.as_launched(contender.precision, contender.compiled)
    if contender.name == "ours":
        common.train_ours_in_blocks(pace, data, directory, **contender.settings)
    else:
        how = contender.precision, contender.compiled
        PEERS[contender.name](pace, data, *how, **contender.settings)


def race(
    contenders: list[Contender], data: ImageData, rounds: int, updates: int
) -> list[list[float]]:
    """Images a second of each contender, round by round."""
    entries = [(contender.size, train, (contender, data)) for contender in contenders]
    seconds = common.race(entries, rounds, updates, untimed=READ_AHEAD)
    return [
        [common.MICRO_BATCH * contender.size * updates / block for block in blocks]
        for contender, blocks in zip(contenders, seconds, strict=True)
    ]


def best_settings(
    name: str, size: int, precision: str, data: ImageData, rounds: int, updates: int
) -> Settings:
    """The fastest workers and threads of a peer, then its fastest memory format."""
    cores = max(1, common.cores() // size)
    choices = {(0, cores), (1, cores), (2, cores), (cores, cores), (cores, max(1, cores - 1))}
    grid = [
        Settings(workers=workers, threads=threads, channels_last=True)
        for workers, threads in sorted(choices)
    ]
    if not rounds:
        return grid[1]

    def fastest(grid: list[Settings]) -> Settings:
        contenders = [Contender(name, size, precision, False, settings) for settings in grid]
        speeds = race(contenders, data, rounds, updates)
        return grid[max(range(len(grid)), key=lambda i: common.quartiles(speeds[i])[1])]

    best = fastest(grid)
    return fastest([best, {**best, "channels_last": False}])


def measure(
    reference: Contender, own: list[Contender], data: ImageData, rounds: int, updates: int
) -> list[dict[str, Any]]:
    """A row for each of `own`; quartiles are of ratios within a round."""
    contenders = [reference, *(contender for contender in own if contender != reference)]
    speeds = race(contenders, data, rounds, updates)
    ours = speeds[[contender.name for contender in contenders].index("ours")]
    rows = []
    for contender, speed in zip(contenders, speeds, strict=True):
        row = {**asdict(contender), "label": contender.label(), "images_per_second": speed}
        row["to_bare"] = common.quartiles([a / b for a, b in zip(speed, speeds[0], strict=True)])
        row["ours_to_it"] = common.quartiles([a / b for a, b in zip(ours, speed, strict=True)])
        rows.append(row)
    return rows if reference in own else rows[1:]


def misses(row: dict[str, Any]) -> list[str]:
    """Which bounds a row does not hold."""
    name = f"{row['size']} processes, {row['precision']}, {row['label']}"
    found = []
    if row["name"] in PEERS and row["ours_to_it"][0] < LEAST_RATIO:
        found.append(f"{name}: ours at {row['ours_to_it'][0]:.2f} of it")
    least = LEAST_SPEEDUP.get((row["size"], row["label"], row["precision"]), 0.0)
    if not row["compiled"] and row["to_bare"][1] < least:
        found.append(f"{name}: {row['to_bare'][1]:.2f} of bare float32, wanted {least}")
    return found


def line(row: dict[str, Any]) -> list[str]:
    def ratio(quartiles: tuple[float, float, float]) -> str:
        low, median, high = quartiles
        return f"{median:.2f} ({low:.2f} to {high:.2f})"

    return [
        str(row["size"]),
        row["precision"] + (", compiled" if row["compiled"] else ""),
        row["label"],
        f"{common.quartiles(row['images_per_second'])[1]:.0f}",
        ratio(row["to_bare"]),
        ratio(row["ours_to_it"]) if row["name"] in PEERS else "",
        ", ".join(f"{key} {value}" for key, value in row["settings"].items()),
    ]


HEADING = [
    "processes",
    "precision",
    "loop",
    "images/s",
    "to bare float32",
    "ours to it",
    "settings",
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=10, help="timed updates a block")
    parser.add_argument("--calibration-rounds", type=int, default=2, help="0 = no race of settings")
    parser.add_argument("--only", nargs="*", default=list(PEERS), help="peers; bare is always in")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--precisions", nargs="*", default=["float32", "bf16"])
    parser.add_argument("--compile", nargs="*", default=["off", "on"])
    parser.add_argument("--images", type=int, default=0, help="random ones, instead of the data")
    parser.add_argument("--output", type=Path, default=Path("runs/throughput"), help="of two files")
    args = parser.parse_args(arguments)
    data = common.random_data(args.images) if args.images else common.load_data()
    notes = [f"{common.machine()}, {data.name}, {args.rounds} rounds of {args.updates} updates"]
    absent = [name for name in args.only if name != "bare" and not find_spec(name)]
    notes += [f"{name}: not installed" for name in absent]
    print("\n".join(notes), flush=True)
    peers = ["bare"] + [name for name in args.only if name not in ("bare", *absent)]
    rows: list[dict[str, Any]] = []
    for size in args.processes:

        def best(name: str, precision: str, size: int = size) -> Settings:
            rounds, updates = args.calibration_rounds, args.updates
            return best_settings(name, size, precision, data, rounds, updates)

        reference = Contender("bare", size, "float32", False, best("bare", "float32"))
        for precision in args.precisions:
            entries: list[tuple[str, Settings]] = [("ours", {})]
            if precision == "bf16" and size > 1:
                entries.append(("ours", {"comm_hook": "bf16"}))
            for name in peers:
                known = name == "bare" and precision == "float32"
                entries.append((name, reference.settings if known else best(name, precision)))
            for compiled in (choice == "on" for choice in args.compile):
                own = [Contender(name, size, precision, compiled, how) for name, how in entries]
                rows += measure(reference, own, data, args.rounds, args.updates)
                print(common.table(HEADING, [line(row) for row in rows[-len(own) :]]), flush=True)
                args.output.parent.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"notes": notes, "rows": rows})
                args.output.with_suffix(".json").write_text(text)
    text = common.table(HEADING, [line(row) for row in rows])
    args.output.with_suffix(".md").write_text("\n".join(notes) + f"\n\n{text}\n")
    missed = [miss for row in rows for miss in misses(row)]
    print("\n" + "\n".join([text, "", *missed, "FAILS" if missed else "holds"]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
