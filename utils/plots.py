"""Curves of a run as a PNG, from its metrics.jsonl alone."""

from pathlib import Path

from utils.console import warn
from utils.distributed import rank
from utils.files import read_json_lines

# (file's keys, title, unit on the axis); the first colours of Okabe and Ito's colour-blind set.
PANELS = (
    (("train/loss", "val/loss"), "loss", "nats per example"),
    (("val/accuracy", "val/miou", "val/pixel_accuracy"), "validation metric", "share"),
    (("train/lr",), "learning rate", "step size"),
    (("perf/examples_per_second",), "throughput", "examples per second"),
)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def read_metrics(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Series by key: steps and values, from a metrics.jsonl; null values are left out."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for entry in read_json_lines(path):
        for key, value in entry.items():
            if key != "step" and isinstance(value, int | float):
                steps, values = series.setdefault(key, ([], []))
                steps.append(entry["step"])
                values.append(value)
    return series


def plot_curves(run_directory: Path) -> None:
    """Write RUN/curves.png: loss, metric, learning rate, throughput over the updates.

    The main process does, every one may call it; a full disk costs the picture, not the run.
    """
    if rank() != 0:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: imported where used
    from matplotlib.figure import Figure

    series = read_metrics(run_directory / "metrics.jsonl")
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (keys, title, unit) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for key, color in zip(keys, COLORS, strict=False):
            if key in series:
                marker = "o" if len(series[key][0]) < 60 else None
                axes.plot(*series[key], color=color, label=key, marker=marker, markersize=3)
        axes.set(title=title, xlabel="update", ylabel=unit)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    temporary = run_directory / ".curves.tmp.png"
    try:
        figure.savefig(temporary, dpi=110)
        temporary.replace(run_directory / "curves.png")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        warn(f"curves.png not written: {error}")
