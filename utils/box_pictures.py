"""Pictures of boxes: overlays of an image, and the picture of an evaluation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torchvision.transforms.v2.functional import resize
from torchvision.utils import draw_bounding_boxes

from utils.boxes import BoxSplit, fitted_size
from utils.pictures import TILED_SAMPLES, Picture, draw_tiles, palette, png

Detections = dict[str, torch.Tensor]  # "boxes" (N, 4), "labels" (N,) from 0 on, "scores" (N,)
SHOWN_SCORE = 0.5  # of the boxes that are drawn
TILE = 240  # pixels of a tile's longer side


def draw_overlay(
    image: torch.Tensor, found: Detections, colours: np.ndarray, names: Sequence[str] | None = None
) -> torch.Tensor:
    """The image, uint8 (3, H, W), with its boxes in the colours of their classes.

    Args:
        found: those with "scores" of SHOWN_SCORE and more are drawn, without "scores" all.
        colours: uint8 (classes, 3).
        names: of the classes, for a label with the score at each box.
    """
    scores = found.get("scores", torch.ones(len(found["labels"])))
    shown = scores >= SHOWN_SCORE
    labels, kept = found["labels"][shown].tolist(), scores[shown].tolist()
    if not labels:
        return image
    texts = None
    if names is not None:
        texts = [f"{names[label]} {score:.0%}" for label, score in zip(labels, kept, strict=True)]
    width = max(1, round(max(image.shape[1:]) / 240))
    return draw_bounding_boxes(
        image,
        found["boxes"][shown],
        labels=texts,
        colors=[tuple(colours[label].tolist()) for label in labels],
        width=width,
        label_colors=None if texts is None else "white",
        fill_labels=texts is not None,
    )


@torch.no_grad()
def draw_boxes(
    model: torch.nn.Module,
    detections_of: Callable[[dict[str, torch.Tensor]], list[Detections]],
    split: BoxSplit,
    classes: Sequence[str],
) -> Picture:
    """A few images of a split, always the same, with their true and their detected boxes.

    Args:
        model: set to evaluation meanwhile, so that no layer waits for other processes.
        detections_of: of a batch of one sample, as `split` gives it, in pixels of the image.
    """
    tiles, notes, rows = [], [], []
    count, was_training = min(TILED_SAMPLES, len(split)), model.training
    colours = palette(len(classes))
    for index in (i * len(split) // count for i in range(count)):
        sample = split[index]
        model.eval()
        try:
            found = detections_of({k: v[None] for k, v in sample.items() if k != "bad"})[0]
        finally:
            model.train(was_training)
        boxes, labels = split.of(index)
        image = split.read(index)
        shown = int((found["scores"] >= SHOWN_SCORE).sum())
        for of_kind in ({"boxes": boxes, "labels": labels}, found):
            overlay = draw_overlay(image, of_kind, colours)
            size = fitted_size(image.shape[1], image.shape[2], TILE)
            tiles.append(resize(overlay, size=list(size)).permute(1, 2, 0).numpy())
        notes += [f"id {index}: truth, {len(labels)} boxes", f"{shown} found"]
        rows.append([index, len(labels), shown])
    return Picture(png(draw_tiles(tiles, notes, classes)), ["id", "boxes", "found"], rows)
