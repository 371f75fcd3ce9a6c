"""Curves of a run as a PNG, from its metrics.jsonl; or of several, to compare them:

    python utils/plots.py RUN [RUN ...] -o compare.png

Runs of one recipe that differ in their seed are one line, their mean, in a band from the lowest to
the highest.
"""

import argparse
import io
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python has put utils/ itself here, where names are those of modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from utils.files import read_json, read_json_lines

SCORES = "accuracy accuracy_flip miou pixel_accuracy ap ap50 bits_per_byte".split()
# (file's keys, title, unit on the axis); the first colours of Okabe and Ito's colour-blind set.
PANELS = (
    (("train/loss", "val/loss"), "loss", "nats per example"),
    (tuple(f"val/{s}" for s in SCORES), "validation metric", "share, or bits per byte"),
    (("train/grad_norm",), "gradient norm", "before clipping"),
    (("train/lr",), "learning rate", "step size"),
    (("perf/examples_per_second",), "throughput", "examples per second"),
    (("perf/data_wait_fraction",), "waiting for data", "share of the time"),
)
# In shares of the picture; a layout that is computed takes longer than the drawing.
MARGINS = dict(left=0.07, right=0.98, bottom=0.075, top=0.95, wspace=0.32, hspace=0.28)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")  # of a panel's keys, where the colours tell the recipes apart
# In config.json, but no setting of its own by which a run could be told from others.
DERIVED = set(
    "accumulation lr_used total_steps steps_per_epoch num_parameters num_processes data_fingerprint"
    " output_dir resume tracker wandb_run_id git_commit stop_after save_every keep_checkpoints"
    " log_every hang_timeout num_workers profile preflight eval_only".split()
)
LAYOUT = {"world_size", "micro_batch_size"}  # of one recipe: told apart where nothing else differs
MOST_POINTS = 2000  # of a line that is a few hundred pixels wide
Series = dict[str, tuple[list[int], list[float]]]


def read_metrics(path: Path) -> Series:
    """Series by key: steps and values, from a metrics.jsonl; null values are left out."""
    series: Series = {}
    for entry in read_json_lines(path):
        for key, value in entry.items():
            if key != "step" and isinstance(value, int | float):
                steps, values = series.setdefault(key, ([], []))
                steps.append(entry["step"])
                values.append(value)
    return series


class Curves:
    """A run's PANELS over the updates, kept up to date: to be drawn after every evaluation."""

    def __init__(self) -> None:
        # Steps and values by key: 16 bytes an update, so that no drawing reads the file anew.
        self._series = {key: (array("q"), array("d")) for keys, _, _ in PANELS for key in keys}

    def add(self, entry: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; null values are left out."""
        for key in self._series.keys() & entry.keys():
            if isinstance(entry[key], int | float):
                self._series[key][0].append(entry["step"])
                self._series[key][1].append(entry[key])

    def draw(self) -> bytes:
        """The PNG."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: imported where used
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 7))
        FigureCanvasAgg(figure)
        grid = figure.subplots(2, 3, gridspec_kw=MARGINS)
        for axes, (keys, title, unit) in zip(grid.flat, PANELS, strict=True):
            present = (key for key in keys if self._series[key][0])
            for key, color in zip(present, COLORS, strict=False):
                steps, values = self._series[key]
                every = -(-len(steps) // MOST_POINTS)  # counted from the newest
                marker = "o" if len(steps) < 60 else None
                line = steps[::-every], values[::-every]
                axes.plot(*line, color=color, label=key, marker=marker, markersize=3)
            label = axes.lines[0].get_label() if len(axes.lines) == 1 else ""
            axes.set_title(f"{title}: {label}" if label else title, fontsize=10, y=1.0)
            axes.set(xlabel="update", ylabel=unit)
            axes.grid(alpha=0.3)
            axes.locator_params(nbins=5)  # text is what takes the time
            axes.tick_params(labelsize=8)
            if len(axes.lines) > 1:  # losses fall, metrics rise
                corner = "upper right" if title == "loss" else "lower right"
                axes.legend(loc=corner, fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, dpi=110, format="png")
        return file.getvalue()


def group_runs(runs: Sequence[Path]) -> dict[str, list[Series]]:
    """The runs' series by what their legend says: the settings in which the recipes differ.

    A run without config.json is a recipe of its own, with its directory's name.
    """
    recipes: list[dict[str, Any]] = []
    for run in runs:
        config = read_json(run / "config.json")
        known = config if isinstance(config, dict) else {"run": run.name}
        named = {k: v for k, v in known.items() if k not in DERIVED and not isinstance(v, dict)}
        recipes.append({k: v for k, v in named.items() if k != "seed"})
    keys = sorted({key for recipe in recipes for key in recipe})
    differ = [key for key in keys if len({str(recipe.get(key)) for recipe in recipes}) > 1]
    differ = [key for key in differ if key not in LAYOUT] or differ
    groups: dict[str, list[Series]] = {}
    for run, recipe in zip(runs, recipes, strict=True):
        name = ", ".join(f"{k}={recipe[k]}" for k in differ if k in recipe) or runs[0].name
        groups.setdefault(name, []).append(read_metrics(run / "metrics.jsonl"))
    return groups


def plot_comparison(runs: Sequence[Path], output: Path) -> None:
    """Write a PNG of the runs' curves, a colour for each recipe.

    OSError when it cannot be written, FileNotFoundError for a directory without metrics.jsonl.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: imported where used
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{run} is no run: it has no metrics.jsonl")
    groups = group_runs(runs)
    figure = Figure(figsize=(11, 7 + 0.25 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (keys, title, unit) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        found = [key for key in keys if any(key in run for of in groups.values() for run in of)]
        for key, style in zip(found, STYLES, strict=False):
            for number, members in enumerate(groups.values()):
                lines = [dict(zip(*run[key], strict=True)) for run in members if key in run]
                steps = sorted(set.intersection(*map(set, lines))) if lines else []
                values = [[line[step] for line in lines] for step in steps]
                color = COLORS[number % len(COLORS)]
                means = [sum(at) / len(at) for at in values]
                marker = "o" if len(steps) < 60 else None
                axes.plot(steps, means, style, color=color, marker=marker, markersize=3)
                low, high = [min(at) for at in values], [max(at) for at in values]
                axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set(title=title, xlabel="update", ylabel=unit)
        axes.grid(alpha=0.3)
        styles = [Line2D([], [], color="grey", linestyle=style) for style in STYLES[: len(found)]]
        if styles:
            axes.legend(styles, found)
    names = [f"{name} ({len(of)} runs)" if len(of) > 1 else name for name, of in groups.items()]
    colors = [Line2D([], [], color=COLORS[i % len(COLORS)]) for i in range(len(names))]
    figure.legend(colors, names, loc="outside lower center")
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("-o", "--output", type=Path, default=Path("compare.png"), help="the PNG")
    arguments = parser.parse_args()
    try:
        plot_comparison(arguments.runs, arguments.output)
    except OSError as error:
        parser.error(str(error))  # exit code 2
    print(arguments.output)


if __name__ == "__main__":
    main()
