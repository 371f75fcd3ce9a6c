"""Images with masks of class indices: found in folders or in a data set, decoded and checked.

    images/<split>/NAME.jpg    masks/<split>/NAME.png    meta.json

A mask's values are class indices, read as they are stored: a mask that went through RGB would hold
its palette's colours. In shape comments: H height, W width.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from utils import hub
from utils.errors import UsageError
from utils.images import BadImage, decode_rgb, open_checked

if TYPE_CHECKING:
    import datasets

IGNORED = 255  # in a decoded mask: no label
TRAIN, EVALUATION = "train", ("val", "validation", "test")  # splits; of the latter, the first found
INDEX_MODES = ("1", "L", "P")  # of Pillow: one value a pixel, in 8 bits at most
IMAGE_COLUMNS = ("image", "images", "img", "pixel_values")
MASK_COLUMNS = ("mask", "masks", "annotation", "segmentation", "semantic_mask", "label", "labels")


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

    def allowed(self) -> str:
        last = f"0 to {len(self.values) - 1}" if self.values[-1] < len(self.values) else "numbered"
        ignored = f" and {self.ignore_index} for no label" if self.ignore_index >= 0 else ""
        return f"{len(self.names)} classes, {last}{ignored}"


@dataclass(frozen=True)
class MaskedSplit:
    """The images and masks of a split, read one by one: by index, from files or from rows."""

    name: str
    classes: MaskClasses
    items: Any = field(repr=False)  # (name, image file, mask file) each, or rows of a data set
    columns: tuple[str, str] | None = None  # of image and mask, in rows

    def __len__(self) -> int:
        return len(self.items)

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

    def first(self, count: int) -> MaskedSplit:
        """Only the first `count`; 0: all."""
        if not count or count >= len(self):
            return self
        items = self.items[:count] if self.columns is None else self.items.select(range(count))
        return MaskedSplit(self.name, self.classes, items, self.columns)


@dataclass(frozen=True)
class MaskedImages:
    """A data set of images with masks."""

    name: str
    train: MaskedSplit
    test: MaskedSplit  # what the training is evaluated on: val, validation or test
    classes: MaskClasses
    fingerprint: str  # of names and sizes of the files, equal on all machines


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
            f"{name}: value {wrong.min()} ({len(wrong)} pixels) is none of {classes.allowed()}; "
            "correct the mask, or what says the classes and ignore_index"
        )
    return torch.from_numpy(values.astype(np.uint8))


# ---- Finding them ----------------------------------------------------------------------------


def find_masked_images(
    dataset: str, subset: int, num_classes: int, ignore_index: int
) -> MaskedImages:
    """The pairs of a data set; for the main process (utils.distributed.on_main_process).

    Args:
        dataset: a folder with images/, masks/ and meta.json; or a folder, or a hub name, that
            `datasets` reads, with a column of images and one of masks.
        subset: only the first N of each split; 0 = all.
        num_classes, ignore_index: where no meta.json tells them; 0 and -1 otherwise.

    UsageError when something is missing, with what to do.
    """
    folder = Path(dataset).expanduser()
    meta = folder / "meta.json"
    if meta.is_file():
        if num_classes or ignore_index >= 0:
            flag = "--num-classes" if num_classes else "--ignore-index"
            raise UsageError(f"{flag}: {meta} says it already; leave the flag out")
        classes = read_meta(meta)
    elif not num_classes:
        raise UsageError(
            f"--dataset {dataset}: no meta.json there names the classes; write one "
            '({"classes": [...], "ignore_index": 255}), or give --num-classes and --ignore-index'
        )
    else:
        values = [v for v in range(num_classes) if v != ignore_index]
        classes = MaskClasses([str(value) for value in values], [], values, ignore_index)
    if len(classes.names) < 2 or len(classes.names) > IGNORED or max(classes.values) > 255:
        raise UsageError(f"--dataset {dataset}: {len(classes.names)} classes; 2 to {IGNORED} work")
    splits = _from_folder(folder) if (folder / "images").is_dir() else _from_dataset(dataset)
    part = next((name for name in EVALUATION if name in splits), None)
    if TRAIN not in splits or part is None:
        raise UsageError(
            f"--dataset {dataset}: splits {TRAIN} and {' or '.join(EVALUATION)} are needed, "
            f"found {', '.join(splits) or 'none'}"
        )
    train, test = (MaskedSplit(n, classes, *splits[n]).first(subset) for n in (TRAIN, part))
    for split in (train, test):
        if not len(split):
            raise UsageError(f"--dataset {dataset}: the split {split.name} has no images")
    return MaskedImages(dataset, train, test, classes, _fingerprint(train, test))


def read_meta(path: Path) -> MaskClasses:
    """The classes of a meta.json: "classes" (names), "ignore_index" and "palette", if there are.

    UsageError, naming the file and what is wrong in it.
    """
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    meta = meta if isinstance(meta, dict) else {}
    names, ignored = meta.get("classes"), meta.get("ignore_index")
    palette = meta.get("palette") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: classes={names!r} must be a list of names")
    if len(names) != len(set(names)):
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{path}: the class {double!r} stands there twice")
    is_value = isinstance(ignored, int) and not isinstance(ignored, bool) and 0 <= ignored <= 255
    if ignored is not None and not is_value:
        raise UsageError(f"{path}: ignore_index={ignored!r} must be a number from 0 to 255")
    if palette and (not isinstance(palette, list) or len(palette) != len(names)):
        raise UsageError(f"{path}: palette must have one colour for each of {len(names)} classes")
    kept = [value for value in range(len(names)) if value != ignored]
    colours = [palette[value] for value in kept] if palette else []
    return MaskClasses(
        [names[value] for value in kept], colours, kept, -1 if ignored is None else ignored
    )


def _from_folder(folder: Path) -> dict[str, tuple[list[tuple[Path, Path]], None]]:
    """Split -> pairs of files of the same name (without suffix), in the order of the names."""
    splits = {}
    for part in sorted(path.name for path in (folder / "images").iterdir() if path.is_dir()):
        images, masks = (_by_stem(folder / kind / part) for kind in ("images", "masks"))
        lacking = [("mask", images, masks), ("image", masks, images)]
        for kind, these, others in lacking:
            alone = [stem for stem in these if stem not in others]
            if alone:
                raise UsageError(
                    f"{these[alone[0]]} has no {kind} of the same name in "
                    f"{folder / f'{kind}s' / part} ({len(alone)} such files)"
                )
        splits[part] = ([(images[stem], masks[stem]) for stem in images], None)
    return splits


def _by_stem(folder: Path) -> dict[str, Path]:
    """Files by their path in `folder` without suffix; hidden ones left out."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*"), key=lambda path: _natural(path.as_posix())):
        if path.is_file() and not path.name.startswith("."):
            stem = path.relative_to(folder).with_suffix("").as_posix()
            if stem in found:
                raise UsageError(f"{found[stem]} and {path} have the same name; remove one")
            found[stem] = path
    return found


def _natural(name: str) -> list[str | tuple[int, str]]:
    """A key by which 2 comes before 10, on any machine."""
    return [(int(part), part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _from_dataset(dataset: str) -> dict[str, tuple[datasets.Dataset, tuple[str, str]]]:
    """Split -> rows, not decoded, and the columns of image and mask."""
    from datasets import Image

    try:
        found = hub.open_dataset(dataset)
    except hub.HubUnreachable as error:
        raise UsageError(f"--dataset {dataset}: {error}. {hub.cache_hint(dataset)}") from error
    splits = {}
    for part, rows in found.items():
        image = hub.find_column(rows, IMAGE_COLUMNS, "images")
        mask = hub.find_column(rows, [c for c in MASK_COLUMNS if c != image], "masks")
        rows = rows.select_columns([image, mask]).with_format(None)
        for column in (image, mask):
            rows = rows.cast_column(column, Image(decode=False))
        splits[str(part)] = (rows, (image, mask))
    return splits


def _fingerprint(*splits: MaskedSplit) -> str:
    content = hashlib.sha256()
    for split in splits:
        content.update(f"{split.name} {len(split)} {split.classes}".encode())
        if split.columns is None:
            files: Sequence[Path] = [path for pair in split.items for path in pair]
            for path in files:
                content.update(f"{path.name} {path.stat().st_size}\n".encode())
    return content.hexdigest()[:16]
