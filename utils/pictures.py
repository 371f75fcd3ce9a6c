"""Pictures of an evaluation: the most confident errors of a classifier, masks of a segmentation.

What goes into one is the same on any layout, and only its few samples' numbers are gathered; the
main process draws it. Colours are Okabe and Ito's, or cividis: readable for colour-blind eyes.
In shape comments: B examples, C classes, H height, W width.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch

from utils.distributed import gather_objects
from utils.masks import IGNORED
from utils.metrics import ConfusionMatrix, intersection_over_union

MOST_ERRORS = 16
MOST_MATRIX_CLASSES = 100  # for more, a confusion matrix is neither readable nor small
MOST_NAMED_CLASSES = 30  # beside a matrix, or in a legend
TILED_SAMPLES = 8
PROBABILITY_STEPS = 10_000  # so that rounding, another one in each layout, decides no order
ID_BITS = 48
DPI = 100
TRUE_COLOR, PREDICTED_COLOR = "#0072B2", "#D55E00"
OKABE_ITO = "#E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7 #000000".split()
IGNORED_COLOR = (128, 128, 128)


@dataclass(frozen=True)
class Picture:
    """A PNG, and the table of what it shows."""

    png: bytes
    columns: list[Any]  # names
    rows: list[Any]  # lists of a value for each column


@dataclass(frozen=True)
class Errors:
    """The most confident ones over all processes, best first: (id, true, predicted, probability).

    matrix: int64 (C, C), counts by true and predicted class; None for too many classes.
    """

    samples: list[tuple[int, int, int, float]]
    matrix: torch.Tensor | None


class ErrorFinder:
    """Collects a classifier's most confident errors and its confusion matrix, on the device.

    Args:
        ignore_index: of examples without a label.
    """

    def __init__(self, num_classes: int, device: torch.device, ignore_index: int = -100):
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.ignore_index = ignore_index
        # (MOST_ERRORS, 3): key, true class, predicted class. A key orders by probability, then by
        # sample id, and holds both; -1: none.
        self._found = torch.full((MOST_ERRORS, 3), -1, dtype=torch.int64, device=self.device)
        small = num_classes <= MOST_MATRIX_CLASSES
        self._matrix = ConfusionMatrix(num_classes, device) if small else None

    @torch.no_grad()
    def add(self, batch: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
        """Look at a batch ("label" and "id", (B,)) and its logits (B, C), without a host read."""
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probability, predicted = precise.softmax(dim=1).max(dim=1)
        steps = (probability.nan_to_num() * PROBABILITY_STEPS).round().to(self.device).long()
        predicted = predicted.to(self.device)
        label, ids = batch["label"].to(self.device), batch["id"].to(self.device)
        wrong = (predicted != label) & (label != self.ignore_index)
        keys = torch.where(wrong, (steps << ID_BITS) + ((1 << ID_BITS) - 1 - ids), -1)
        found = torch.cat([self._found, torch.stack([keys, label, predicted], dim=1)])
        self._found = found[found[:, 0].topk(MOST_ERRORS).indices]
        if self._matrix is not None:
            self._matrix.add(label, predicted, self.ignore_index)

    def reduce(self) -> Errors:
        """Of all processes; all of them call it."""
        rows = [row for rows in gather_objects(self._found.tolist()) for row in rows if row[0] >= 0]
        samples = []
        for key, true, predicted in sorted(rows, reverse=True)[:MOST_ERRORS]:
            index = (1 << ID_BITS) - 1 - key % (1 << ID_BITS)
            samples.append((index, true, predicted, (key >> ID_BITS) / PROBABILITY_STEPS))
        return Errors(samples, None if self._matrix is None else self._matrix.reduce())


def draw_errors(errors: Errors, classes: Sequence[str], samples: Any) -> Picture:
    """Errors as a grid of images beside the confusion matrix.

    Args:
        samples: by id, an image, uint8 (3, H, W), or a dict with it as "image".
    """
    side, cell, columns = 96, 150, 4  # pixels
    figure = _figure(2 * columns * cell if errors.matrix is not None else columns * cell, 640)
    width = 0.5 if errors.matrix is not None else 1.0
    axes = figure.add_axes((0, 0, width, 600 / 640))
    canvas = np.full((columns * cell, columns * cell, 3), 255, np.uint8)
    for place, (index, true, predicted, probability) in enumerate(errors.samples):
        top, left = place // columns * cell + 16, place % columns * cell + (cell - side) // 2
        sample = samples[index]
        pixels = sample["image"] if isinstance(sample, dict) else sample
        image = PIL.Image.fromarray(pixels.permute(1, 2, 0).numpy())
        factor = side / max(image.size)
        size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
        enlarged = max(image.size) < side  # its pixels are to be seen
        how = PIL.Image.Resampling.NEAREST if enlarged else PIL.Image.Resampling.BILINEAR
        canvas[top : top + size[1], left : left + size[0]] = np.asarray(image.resize(size, how))
        said = f"{_short(classes[predicted])} {probability:.0%}"
        for y, text, color in (
            (top - 4, _short(classes[true]), TRUE_COLOR),
            (top + side + 14, said, PREDICTED_COLOR),
        ):
            axes.text(left + side / 2, y, text, color=color, ha="center", fontsize=8)
    axes.imshow(canvas)
    axes.set_axis_off()
    title = "most confident errors: true class above, predicted one and its probability below"
    axes.set_title(title if errors.samples else "no errors", fontsize=8)
    if errors.matrix is not None:
        _draw_matrix(figure, errors.matrix, classes)
    rows = [[i, classes[true], classes[said], share] for i, true, said, share in errors.samples]
    return Picture(png(figure), ["id", "true", "predicted", "probability"], rows)


@torch.no_grad()
def draw_masks(
    model: torch.nn.Module,
    logits_of: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    samples: Any,
    classes: Sequence[str],
) -> Picture:
    """A few of `samples`, always the same, with their true and their predicted masks.

    Args:
        model: set to evaluation meanwhile, so that no layer waits for other processes.
        logits_of: (1, C, H, W) of a batch of one sample, as `samples` gives it.
        samples: by index, dicts of "image", uint8 (3, H, W), "label", (H, W), and "id".
    """
    tiles, notes, rows = [], [], []
    count = min(TILED_SAMPLES, len(samples))
    was_training = model.training
    for index in (i * len(samples) // count for i in range(count)):
        sample = samples[index]
        batch = {key: sample[key][None] for key in ("image", "label", "id")}
        model.eval()
        try:
            predicted = logits_of(batch).argmax(dim=1)[0].cpu()  # (H, W)
        finally:
            model.train(was_training)
        label = sample["label"].long()
        matrix = ConfusionMatrix(len(classes), predicted.device)
        matrix.add(label, predicted, IGNORED)
        counts = matrix.own()
        iou = intersection_over_union(counts, list(classes))
        right = int(counts.trace()) / max(1, int(counts.sum()))
        tiles += [_overlay(sample["image"], mask) for mask in (label, predicted)]
        notes += [f"id {index}: truth", f"prediction, {right:.0%} of the pixels right"]
        rows.append([index, right, sum(iou.values()) / max(1, len(iou))])
    return Picture(
        png(draw_tiles(tiles, notes, classes, "no label")),
        ["id", "pixel accuracy", "mean IoU"],
        rows,
    )


def draw_tiles(
    tiles: list[np.ndarray], notes: list[str], classes: Sequence[str], grey: str | None = None
):
    """A figure of equal tiles with a note above each, and the legend of the classes.

    Args:
        grey: what is shown in grey, for the legend.
    """
    from matplotlib.patches import Patch

    columns, gap = 4, 20  # pixels
    height, width = (max(tile.shape[i] for tile in tiles) for i in (0, 1))
    lines = -(-len(tiles) // columns)
    canvas = np.full((lines * (height + gap), columns * (width + gap), 3), 255, np.uint8)
    legend = 80
    figure = _figure(canvas.shape[1], canvas.shape[0] + legend)
    share = legend / (canvas.shape[0] + legend)
    axes = figure.add_axes((0, share, 1, 1 - share))
    for place, (tile, note) in enumerate(zip(tiles, notes, strict=True)):
        top, left = place // columns * (height + gap) + gap, place % columns * (width + gap)
        left += gap if place % 2 == 0 else gap // 4  # truth and prediction side by side
        canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
        axes.text(left, top - 5, note, fontsize=8)
    axes.imshow(canvas)
    axes.set_axis_off()
    names = list(classes)[:MOST_NAMED_CLASSES]
    colors = palette(len(classes))
    patches = [
        Patch(color=tuple(c / 255), label=_short(n)) for n, c in zip(names, colors, strict=False)
    ]
    if grey is not None:
        patches.append(Patch(color=tuple(np.array(IGNORED_COLOR) / 255), label=grey))
    figure.legend(handles=patches, loc="lower center", ncols=8, fontsize=7, frameon=False)
    return figure


def _draw_matrix(figure, matrix: torch.Tensor, classes: Sequence[str]) -> None:
    """The confusion matrix in the right half: each row is shared out over the predictions."""
    counts = matrix.numpy()
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    axes = figure.add_axes((0.60, 0.17, 0.32, 0.70))
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    bar = figure.colorbar(image, cax=figure.add_axes((0.93, 0.17, 0.012, 0.70)))
    bar.set_label("share of the true class's examples", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    axes.set_title("confusion matrix", fontsize=9)
    axes.set_xlabel("predicted class", fontsize=8)
    axes.set_ylabel("true class", fontsize=8)
    axes.tick_params(labelsize=7)
    if len(classes) <= MOST_NAMED_CLASSES:
        names = [_short(name) for name in classes]
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    if len(classes) <= 12:
        for (row, column), count in np.ndenumerate(counts):
            color = "black" if shares[row, column] > 0.5 else "white"
            axes.text(column, row, count, ha="center", va="center", fontsize=7, color=color)


def _overlay(image: torch.Tensor, mask: torch.Tensor, side: int = 240) -> np.ndarray:
    """An image, uint8 (3, H, W), under its mask's colours; its longer side has `side` pixels."""
    factor = side / max(image.shape[1:])
    size = max(1, round(image.shape[2] * factor)), max(1, round(image.shape[1] * factor))
    colors = np.full((256, 3), IGNORED_COLOR, np.uint8)
    colors[:IGNORED] = palette(IGNORED)
    painted = PIL.Image.fromarray(colors[mask.numpy().astype(np.uint8)])
    photo = PIL.Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size)
    return np.asarray(PIL.Image.blend(photo, painted.resize(size, 0), 0.6))


def palette(count: int) -> np.ndarray:
    """Colours, uint8 (count, 3): Okabe and Ito's eight, then the same lighter, then darker."""
    base = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in OKABE_ITO])
    table = np.concatenate([base, base + (255 - base) * 0.6, base * 0.55])
    return table[np.arange(count) % len(table)].astype(np.uint8)


def _figure(width: int, height: int):
    """An empty figure of so many pixels, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: imported where used
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DPI, height / DPI))
    FigureCanvasAgg(figure)
    return figure


def png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI, format="png")
    return file.getvalue()


def _short(name: str, letters: int = 16) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"
