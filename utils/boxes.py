"""Images with boxes: read as the samples of a data set, fitted into squares, and back.

In shape comments: H height, W width, S the side of a square, N boxes of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from utils.augment import IMAGENET_MEAN
from utils.images import BadImage, decode_rgb
from utils.order import seeded_for_sample

NO_BOX = -100  # label of the places of a sample that are filled up
BLANK = (3, 8, 8)  # shape in the place of what cannot be read
MEAN_COLOUR = [round(255 * x) for x in IMAGENET_MEAN]  # of padding: nearly 0 once normalised
BOX_REMEDY = "correct the annotations, or remove the image (--verify-data finds all at once)"

# Of an image, uint8 (3, H, W), boxes (N, 4) and labels (N,); to (3, S, S) with its boxes.
Transform = Callable[
    [tv_tensors.Image, tv_tensors.BoundingBoxes, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]


@dataclass(frozen=True)
class BoxSplit(Dataset):
    """The images of a split and their boxes, read one by one.

    Attributes:
        folder: of the images; `files` are relative to it.
        sizes: int64 (images, 2), heights and widths.
        boxes: float32 (boxes, 4), x1, y1, x2, y2 in pixels, inside of their images; those of image
            i are starts[i] to starts[i + 1].
        labels: int64 (boxes,), 0 to classes - 1.
        truth: what an evaluation compares with: COCO's "annotations" of each image, with labels for
            categories; [] of a split that is trained on.
        capacity: places for boxes in a sample.
        transform: see Transform; called where a sample is read, with `random`, numpy and torch
            seeded by (seed, epoch, index), whatever process reads it.
    """

    name: str
    folder: Path
    files: list[str] = field(repr=False)
    sizes: torch.Tensor = field(repr=False)
    boxes: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)
    starts: torch.Tensor = field(repr=False)
    truth: list[list[dict[str, Any]]] = field(repr=False)
    transform: Transform | None = None
    seed: int = 0

    @cached_property
    def capacity(self) -> int:
        return max(1, int(self.starts.diff().max()))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample for ImageLoader, which stops at a "bad" one."""
        bad = []
        try:
            image = self.read(index)
            boxes, labels = self.of(index)
        except BadImage as error:
            bad = [str(error)]
            image, boxes = torch.zeros(BLANK, dtype=torch.uint8), torch.zeros(0, 4)
            labels = torch.zeros(0, dtype=torch.int64)
        assert self.transform is not None
        size = image.shape[1:]
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)  # type: ignore
        with seeded_for_sample(index, self.seed):
            image, boxes, labels = self.transform(tv_tensors.Image(image), boxes, labels)
        places, missing = min(len(labels), self.capacity), self.capacity - len(labels)
        return {
            "image": image.as_subclass(torch.Tensor).contiguous(),
            "boxes": torch.nn.functional.pad(
                boxes.as_subclass(torch.Tensor)[:places], (0, 0, 0, missing)
            ),
            "label": torch.nn.functional.pad(labels[:places], (0, missing), value=NO_BOX),
            "size": torch.tensor(size),
            "id": torch.tensor(int(index)),
            "bad": bad,
        }

    def with_transform(self, transform: Transform, seed: int = 0) -> BoxSplit:
        return replace(self, transform=transform, seed=seed)

    def of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Boxes (N, 4) in pixels of the image, and labels (N,)."""
        own = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.boxes[own], self.labels[own]

    def read(self, index: int) -> torch.Tensor:
        """The image, uint8 (3, H, W); BadImage where it has another size than its boxes are of."""
        image = decode_rgb(self.folder / self.files[index], self.files[index])
        height, width = self.sizes[index].tolist()
        if image.shape[1:] != (height, width):
            seen = f"{image.shape[2]}x{image.shape[1]}"
            raise BadImage(
                f"{self.files[index]}: the image, upright, is {seen}, in the annotations "
                f"{width}x{height}"
            )
        return image


def fitted_size(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width once the longer of them is `side`."""
    longer = max(height, width)
    return max(1, round(height * side / longer)), max(1, round(width * side / longer))


def describe_square(side: int) -> dict[str, Any]:
    """For model.json: what becomes of an image before it is the model's input (B, 3, S, S)."""
    return {
        "image_size": side,
        "resize": {"longer_side": side, "interpolation": "bilinear", "antialias": True},
        "padding": {"where": "right and below", "colour": MEAN_COLOUR},
        "channel_order": "RGB",
        "value_range": [0.0, 1.0],  # the model subtracts the mean itself
    }


def fit_image(side: int, image: torch.Tensor) -> torch.Tensor:
    """The whole image, uint8 (3, H, W), in the upper left of a square: (3, S, S)."""
    height, width = fitted_size(image.shape[-2], image.shape[-1], side)
    resized = F.resize(image, size=[height, width])
    return F.pad(resized, [0, 0, side - width, side - height], fill=MEAN_COLOUR)  # type: ignore


def fit(side: int, image: Any, boxes: Any, labels: Any) -> tuple[Any, Any, Any]:
    """`fit_image`, and the boxes that belong to it: a Transform."""
    height, width = fitted_size(image.shape[-2], image.shape[-1], side)
    resized = F.resize(boxes, size=[height, width])
    return fit_image(side, image), F.pad(resized, [0, 0, side - width, side - height]), labels


def fitted_back(
    detections: list[dict[str, torch.Tensor]], sizes: torch.Tensor, side: int
) -> list[dict[str, torch.Tensor]]:
    """Detections in squares as those in pixels of the images, inside of them; on the CPU.

    Args:
        detections: of each image "boxes" (N, 4), "labels" (N,) from 1 on, "scores" (N,).
        sizes: (images, 2), heights and widths.

    Returns the same with labels from 0 on. A box in the padding alone is left out.
    """
    found = []
    for detection, (height, width) in zip(detections, sizes.tolist(), strict=True):
        rows, columns = fitted_size(height, width, side)
        boxes = detection["boxes"].detach().cpu().double()
        boxes = boxes * torch.tensor([width / columns, height / rows] * 2, dtype=boxes.dtype)
        boxes = boxes.clamp(min=0).minimum(torch.tensor([width, height] * 2, dtype=boxes.dtype))
        kept = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        labels, scores = detection["labels"].cpu() - 1, detection["scores"].detach().cpu().double()
        found.append({"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]})
    return found
