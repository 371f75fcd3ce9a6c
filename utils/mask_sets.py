"""Sets of images with masks: found in folders, or in what `datasets` reads.

    images/<split>/NAME.jpg    masks/<split>/NAME.png    meta.json

meta.json: {"classes": [names], "ignore_index": value of pixels without a label (or null),
"palette": [[R, G, B] of each class] (optional)}. The ignored value may be one of the classes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from utils import hub
from utils.errors import UsageError
from utils.image_sets import natural_key
from utils.masks import IGNORED, MaskClasses, MaskedSplit

if TYPE_CHECKING:
    import datasets

TRAIN, EVALUATION = "train", ("val", "validation", "test")  # splits; of the latter, the first found
IMAGE_COLUMNS = ("image", "images", "img", "pixel_values")
MASK_COLUMNS = ("mask", "masks", "annotation", "segmentation", "semantic_mask", "label", "labels")


@dataclass(frozen=True)
class MaskedImages:
    """A data set of images with masks."""

    name: str
    train: MaskedSplit
    test: MaskedSplit  # what the training is evaluated on: val, validation or test
    classes: MaskClasses
    fingerprint: str  # of names and sizes of the files, equal on all machines

    def describe(self) -> str:
        """One line for the console."""
        sizes = ", ".join(f"{len(split)} {split.name}" for split in (self.train, self.test))
        return f"{self.name}: {sizes}; {self.classes.describe()}"


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
    for path in sorted(folder.rglob("*"), key=lambda path: natural_key(path.as_posix())):
        if path.is_file() and not path.name.startswith("."):
            stem = path.relative_to(folder).with_suffix("").as_posix()
            if stem in found:
                raise UsageError(f"{found[stem]} and {path} have the same name; remove one")
            found[stem] = path
    return found


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
            files = [path for pair in split.items for path in pair]
            for path in files:
                content.update(f"{path.name} {path.stat().st_size}\n".encode())
    return content.hexdigest()[:16]
