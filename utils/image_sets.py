"""Labelled images of any size, found and counted but not decoded: class folders, or a data set.

Everything here is for the main process, which shares the result (utils.distributed): all processes
then have the same files in the same order, whatever the order of their directories.
"""

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from utils import hub
from utils.console import say
from utils.errors import UsageError

UNLABELLED = -100  # in neither loss nor count
TEST_PARTS = ("val", "valid", "validation", "test")  # the first that is there
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .gif .tif .tiff .bmp .ppm .pgm .pbm .jp2 .avif".split()
)


class Images(Protocol):
    """The images of a split, numbered."""

    def name(self, index: int) -> str:
        """For messages: where image `index` is."""
        ...

    def source(self, index: int) -> Path | bytes:
        """For `utils.images.decode_rgb`."""
        ...

    def describe(self) -> list[Any]:
        """What tells this content from another without reading the pixels: names, sizes."""
        ...


@dataclass(frozen=True)
class Files:
    root: Path
    paths: np.ndarray  # (N,) bytes, below root; an array, since workers would copy a list

    def name(self, index: int) -> str:
        return os.fsdecode(self.paths[index])

    def source(self, index: int) -> Path:
        return self.root / self.name(index)

    def describe(self) -> list[Any]:
        names = map(os.fsdecode, self.paths)
        return [(Path(name).as_posix(), (self.root / name).stat().st_size) for name in names]


@dataclass(frozen=True)
class Rows:
    rows: Any  # datasets.Dataset with one column of undecoded images
    order: np.ndarray  # (N,) row numbers

    def name(self, index: int) -> str:
        row = int(self.order[index])
        path = self._cell(index)["path"]
        return f"{self.rows.split} row {row}" + (f" ({path})" if path else "")

    def source(self, index: int) -> Path | bytes:
        cell = self._cell(index)
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"] or "")

    def describe(self) -> list[Any]:
        from pyarrow import compute

        sizes = []
        for chunk in self.rows.data.column(0).chunks:  # offsets only, no pixels
            lengths = compute.call_function("binary_length", [chunk.field("bytes")])
            sizes += lengths.to_pylist()
        return [sizes[row] for row in self.order]

    def _cell(self, index: int) -> dict[str, Any]:
        return self.rows[int(self.order[index])][self.rows.column_names[0]]


@dataclass(frozen=True)
class Split:
    images: Images
    labels: torch.Tensor  # int64 (N,), 0..classes-1, or UNLABELLED

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSets:
    name: str
    train: Split
    test: Split
    classes: list[str]
    fingerprint: str  # of names, sizes, labels and classes, equal on all machines

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is continued."""
        return {"classes": self.classes, "data_fingerprint": self.fingerprint}


def natural_key(name: str) -> tuple[list[Any], str]:
    """Sorts 1, 2, 10, not 1, 10, 2."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def open_image_sets(name: str, subset: int) -> ImageSets:
    """Find the images of a data set; for the main process.

    Args:
        name: a folder with train/<class>/ and val/<class>/ (or test/), or what `datasets` reads:
            a folder of parquet, a hub name. The validation part is taken where there are both.
        subset: only the first N images of each split; 0 = all. They come one of each class in
            turn, so that the first ones hold all classes.

    The classes are those of the training part: folders in natural order, or as the data set
    numbers them. Labels of -1 or none are UNLABELLED. UsageError where the other part has a class
    that the training part lacks, or data cannot be had or makes no sense.
    """
    folder = Path(name).expanduser()
    is_folder = any(child.is_dir() for child in _visible(folder / "train"))
    found = _class_folders(name, folder) if is_folder else _data_set(name)
    parts = list(found)
    (images, own, classes), (test_images, test_own, test_classes) = found.values()
    if list(classes) == sorted(classes):  # by folder, as `datasets` sorts them
        ordered = sorted(classes, key=natural_key)
        own, classes = _renumber(own, classes, ordered), ordered
    if len(classes) < 2:
        raise UsageError(f"--dataset {name}: {parts[0]} has the classes {classes}, needs 2 or more")
    counts = Counter(test_own.tolist())
    strange = [c for i, c in enumerate(test_classes) if counts[i] and c not in set(classes)]
    if strange:
        raise UsageError(
            f"--dataset {name}: {parts[1]} has {_some(strange)}, no class of {parts[0]} (which has "
            f"{_some(classes)}); remove it from {parts[1]}, or add images of it to {parts[0]}"
        )
    test_own = _renumber(test_own, test_classes, classes)
    splits = []
    for part, of, labels in ((parts[0], images, own), (parts[1], test_images, test_own)):
        unlabelled = int((labels == UNLABELLED).sum())
        if unlabelled == len(labels):
            raise UsageError(f"--dataset {name}: {part} has no labelled image ({len(labels)} rows)")
        if unlabelled:
            say(f"data      {part}: {unlabelled} of {len(labels)} images have no label and no part")
        missing = [c for i, c in enumerate(classes) if i not in set(labels.tolist())]
        if missing:
            say(f"data      {part} has no image of {_some(missing)}")
        order = _in_turn(labels)[: subset or None]
        splits.append(Split(_reordered(of, order), torch.from_numpy(labels[order])))
    content = hashlib.sha256(repr(classes).encode())
    for split in splits:
        content.update(repr((split.images.describe(), split.labels.tolist())).encode())
    return ImageSets(name, splits[0], splits[1], classes, content.hexdigest()[:16])


# ---- Where images are ------------------------------------------------------------------------

# Of each part: its images, int64 numbers (N,) into its own classes, and these.
Found = dict[str, tuple[Any, np.ndarray, list[str]]]


def _class_folders(name: str, folder: Path) -> Found:
    test = next((part for part in TEST_PARTS if (folder / part).is_dir()), None)
    if test is None:
        raise UsageError(f"--dataset {name}: no folder val or test beside {folder / 'train'}")
    found: Found = {}
    for part in ("train", test):
        paths, labels, others, classes = [], [], [], []
        folders = [child for child in _visible(folder / part) if child.is_dir()]
        for label, child in enumerate(sorted(folders, key=lambda path: natural_key(path.name))):
            files = sorted(_files_below(child), key=lambda path: natural_key(path.as_posix()))
            images = [path for path in files if path.suffix.lower() in SUFFIXES]
            others += [path for path in files if path.suffix.lower() not in SUFFIXES]
            paths += [os.fsencode(path.relative_to(folder)) for path in images]
            labels += [label] * len(images)
            classes.append(child.name)
            if part == "train" and not images:
                raise UsageError(f"--dataset {name}: class folder {child} has no images: remove it")
        if others:
            say(f"data      {part}: {len(others)} files left out, no images by name: {others[0]}")
        if not paths:
            raise UsageError(f"--dataset {name}: no images in the folders of {folder / part}")
        found[part] = Files(folder.absolute(), np.array(paths)), np.array(labels), classes
    return found


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, hidden things left out; [] without folder."""
    return [p for p in folder.iterdir() if p.name[0] != "."] if folder.is_dir() else []


def _files_below(folder: Path) -> list[Path]:
    files = []
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        files += [Path(root, name) for name in names if name[0] != "."]
    return files


def _data_set(name: str) -> Found:
    try:
        splits = hub.open_dataset(name)
    except hub.HubUnreachable as error:
        raise UsageError(f"--dataset {name}: {error}. {hub.cache_hint(name)}") from error
    test = next((part for part in TEST_PARTS if part in splits), None)
    if "train" not in splits or test is None:
        raise UsageError(
            f"--dataset {name}: splits {sorted(splits)}, needs train and validation or test; for "
            "class folders: train/CLASS/ and val/CLASS/"
        )
    from datasets import Image

    found: Found = {}
    for part in ("train", test):
        rows = splits[part]
        column = hub.find_column(rows, ("image", "img", "images"), "images")
        label_column = hub.find_column(rows, ("label", "labels", "fine_label"), "labels")
        labels, classes = _read_labels(name, rows, label_column)
        rows = rows.select_columns([column]).cast_column(column, Image(decode=False))
        found[part] = Rows(rows.with_format(None), np.arange(len(rows))), labels, classes
    return found


def _read_labels(name: str, rows: Any, column: str) -> tuple[np.ndarray, list[str]]:
    """Numbers into the classes, UNLABELLED for -1 and none; and the classes."""
    values = rows.select_columns([column]).with_format(None)[column][:]
    classes = getattr(rows.features[column], "names", None)
    if classes is None and any(isinstance(value, str) for value in values):
        classes = sorted({f"{value}" for value in values if value is not None}, key=natural_key)
        numbers = {class_: number for number, class_ in enumerate(classes)}
        values = [None if value is None else numbers.get(f"{value}") for value in values]
    values = [-1 if value is None else value for value in values]
    stop = len(classes) if classes else 1 << 31
    for row, value in enumerate(values):
        if not isinstance(value, int) or not -1 <= value < stop:
            raise UsageError(
                f"--dataset {name}: split {rows.split}, column {column}: label {row} is {value!r}, "
                f"must be a class number from 0{f' to {stop - 1}' if classes else ''}, or -1 (none)"
            )
    classes = list(classes or map(str, range(max(values, default=-1) + 1)))
    return np.array([UNLABELLED if value < 0 else value for value in values], np.int64), classes


# ---- Order -----------------------------------------------------------------------------------


def _renumber(labels: np.ndarray, classes: list[str], wanted: list[str]) -> np.ndarray:
    """Labels as numbers into `wanted`; a class that is not in it has no images."""
    numbers = {class_: number for number, class_ in enumerate(wanted)}
    table = [*(numbers.get(class_, UNLABELLED) for class_ in classes), UNLABELLED]
    return np.array(table)[np.where(labels < 0, len(classes), labels)]


def _in_turn(labels: np.ndarray) -> np.ndarray:
    """The order of the images that takes one of each class in turn."""
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], labels[by_class])
    turns = np.empty(len(labels), np.int64)
    turns[by_class] = np.arange(len(labels)) - starts
    return np.lexsort((labels, turns))


def _reordered(images: Any, order: np.ndarray) -> Images:
    if isinstance(images, Rows):
        return Rows(images.rows, order)
    return Files(images.root, images.paths[order])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
