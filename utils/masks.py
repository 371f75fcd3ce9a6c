"""Images with masks of class indices: decoded, checked, read as the samples of a data set.

A mask's values are class indices, read as they are stored: a mask that went through RGB would hold
its palette's colours. In shape comments: H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from utils.images import BadImage, decode_rgb, open_checked
from utils.order import seeded_for_sample

IGNORED = 255  # in a decoded mask: no label
BLANK = ((3, 8, 8), (8, 8))  # shapes in the place of what cannot be read
MASK_REMEDY = "correct it, or remove image and mask (--verify-data finds all at once)"
INDEX_MODES = ("1", "L", "P")  # of Pillow: one value a pixel, in 8 bits at most


@dataclass(frozen=True)
class MaskClasses:
    """What the values of a mask mean.

    Attributes:
        names: of the classes a model learns, without the one that is ignored.
        palette: a colour (R, G, B) for each of them; [] where the data has none.
        values: a mask's stored value for each of them.
        ignore_index: the stored value of pixels without a label; -1: none.
    """

    names: list[str]
    palette: list[list[int]]
    values: list[int]
    ignore_index: int

    def table(self) -> np.ndarray:
        """Stored value -> index of the class, IGNORED, or -1: not allowed; int16 (256,)."""
        table = np.full(256, -1, np.int16)
        table[self.values] = np.arange(len(self.values))
        if self.ignore_index >= 0:
            table[self.ignore_index] = IGNORED
        return table

    def describe(self) -> str:
        ignored = f" and {self.ignore_index} for no label" if self.ignore_index >= 0 else ""
        return f"{len(self.names)} classes, {self.values[0]} to {self.values[-1]}{ignored}"


@dataclass(frozen=True)
class MaskedSplit(Dataset):
    """The images and masks of a split, read one by one: by index, from files or from rows.

    Attributes:
        transform: called as transform(image, mask) on tv_tensors where a sample is read, with
            `random`, numpy and torch seeded by (seed, epoch, index), whatever process reads it.
    """

    name: str
    classes: MaskClasses
    items: Any = field(repr=False)  # (image file, mask file) each, or rows of a data set
    columns: tuple[str, str] | None = None  # of image and mask, in rows
    transform: Callable | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample for ImageLoader, which stops at a "bad" one; no label is in its place."""
        bad = []
        try:
            image, mask = self.read(index)
        except BadImage as error:
            bad = [str(error)]
            image, mask = (torch.full(shape, IGNORED, dtype=torch.uint8) for shape in BLANK)
        if self.transform is not None:
            with seeded_for_sample(index, self.seed):
                image, mask = self.transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
        image, mask = (x.as_subclass(torch.Tensor).contiguous() for x in (image, mask))
        return {"image": image, "label": mask, "id": torch.tensor(int(index)), "bad": bad}

    def augmented(self, transform: Callable, seed: int) -> MaskedSplit:
        return replace(self, transform=transform, seed=seed)

    def first(self, count: int) -> MaskedSplit:
        """Only the first `count`; 0: all."""
        if not count or count >= len(self):
            return self
        return replace(
            self,
            items=self.items[:count] if self.columns is None else self.items.select(range(count)),
        )

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Image, uint8 (3, H, W), and mask, uint8 (H, W): indices of classes, or IGNORED.

        Raises BadImage, naming the file, for one that cannot be read, for two sizes and for a
        value that is no class.
        """
        names, image_source, mask_source = self._sources(index)
        image = decode_rgb(image_source, names[0])
        mask = decode_mask(mask_source, names[1], self.classes)
        if image.shape[1:] != mask.shape:
            sizes = [f"{shape[1]}x{shape[0]}" for shape in (image.shape[1:], mask.shape)]
            raise BadImage(f"{names[1]}: the mask is {sizes[1]}, its image {names[0]} {sizes[0]}")
        return image, mask

    def _sources(self, index: int) -> tuple[tuple[str, str], Path | bytes, Path | bytes]:
        if self.columns is None:
            image, mask = self.items[index]
            return (str(image), str(mask)), image, mask
        row = self.items[index]
        names, sources = [], []
        for column in self.columns:
            cell = row[column]
            if cell is None or not (cell["bytes"] or cell["path"]):
                raise BadImage(f"split {self.name}, row {index}: column {column} is empty")
            path = f" ({cell['path']})" if cell["path"] else ""
            names.append(f"split {self.name}, row {index}, column {column}{path}")
            sources.append(cell["bytes"] or Path(cell["path"]))
        return (names[0], names[1]), sources[0], sources[1]


def decode_mask(source: Path | bytes, name: str, classes: MaskClasses) -> torch.Tensor:
    """A mask as uint8 (H, W): indices of classes, or IGNORED; never through RGB.

    BadImage for a file that holds colours, and for a value that is no class.
    """
    image = open_checked(source, name)
    if image.mode not in INDEX_MODES or image.format == "JPEG":
        kind = f"{image.format} in mode {image.mode}"
        raise BadImage(
            f"{name}: a mask is a PNG in mode L or P whose values are class indices, not a {kind}"
        )
    stored = np.asarray(image).astype(np.uint8)
    values = classes.table()[stored]
    if values.min(initial=0) < 0:
        wrong = stored[values < 0]
        raise BadImage(
            f"{name}: value {wrong.min()} ({len(wrong)} pixels) is none of {classes.describe()}; "
            "correct the mask, or what says the classes and ignore_index"
        )
    return torch.from_numpy(values.astype(np.uint8))
