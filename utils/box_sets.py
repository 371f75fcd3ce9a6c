"""Sets of images with boxes: found in folders with annotations in COCO's JSON.

    annotations/instances_train.json    annotations/instances_val.json    images/NAME.jpg

The names of COCO itself (instances_train2017.json, images in train2017/) are found too.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from utils.boxes import BoxSplit
from utils.console import say
from utils.errors import UsageError

PARTS = (("train", ("train", "train2017")), ("val", ("val", "val2017", "test")))  # first found
MIN_SIDE = 0.01  # pixels; torchvision's detectors refuse a box without height or width
NAMED = 3  # annotations of a kind that the console names
LISTS = ("images", "annotations", "categories")


@dataclass(frozen=True)
class BoxedImages:
    """A data set of images with boxes."""

    name: str
    train: BoxSplit
    test: BoxSplit  # what the training is evaluated on
    classes: list[str]
    category_ids: list[int]  # of the classes, in the annotations
    fingerprint: str  # of annotations, names and sizes of the files, equal on all machines

    def describe(self) -> str:
        """One line for the console."""
        splits = (self.train, self.test)
        sizes = ", ".join(f"{len(s)} {s.name} ({len(s.labels)} boxes)" for s in splits)
        return f"{self.name}: {sizes}; {len(self.classes)} classes"


def find_boxes(dataset: str, train_json: str, val_json: str, subset: int) -> BoxedImages:
    """The images and boxes of a data set; for the main process.

    Args:
        dataset: a folder with annotations/ and images.
        train_json, val_json: names in annotations/, or paths; "": by COCO's custom.
        subset: only the first N images of each split; 0 = all.

    Boxes are clipped to their images. What then has no area (less than MIN_SIDE of height or
    width) is left out of training and evaluation, counted and named; crowds are left out of
    training. An image without boxes stays, as background. UsageError when something is missing or
    makes no sense, with the file, what is wrong in it, and what to do.
    """
    folder = Path(dataset).expanduser()
    if not folder.is_dir():
        raise UsageError(f"--dataset {dataset}: no such folder; it needs annotations/ and images/")
    found: list[tuple[str, Path, dict[str, Any]]] = []
    for (part, customary), given in zip(PARTS, (train_json, val_json), strict=True):
        path = _annotation_file(folder, part, customary, given)
        found.append((part, path, _read(path)))
    (_, train_path, train), (_, val_path, val) = found
    categories = _categories(train_path, train)
    if _categories(val_path, val) != categories:
        other = sorted(set(categories.items()) ^ set(_categories(val_path, val).items()))[:3]
        raise UsageError(
            f"{val_path} has other categories than {train_path}: {other}; list the same in both"
        )
    splits = [_split(*each, folder, categories, subset) for each in found]  # type: ignore
    for split, (_, path, _) in zip(splits, found, strict=True):
        if not len(split.labels):
            first = f"the first {subset} (--subset)" if subset else f"{len(split)}"
            raise UsageError(f"{path}: none of {first} images has a box to learn from")
    ids = sorted(categories)
    content = hashlib.sha256(repr(sorted(categories.items())).encode())
    for split in splits:
        sizes = [(split.folder / name).stat().st_size for name in split.files]
        parts = (split.files, sizes, split.boxes.tolist(), split.labels.tolist())
        content.update(repr((*parts, split.starts.tolist(), split.truth)).encode())
    names = [categories[id_] for id_ in ids]
    to_train = replace(splits[0], truth=[])  # large, for each process and worker, and not needed
    return BoxedImages(dataset, to_train, splits[1], names, ids, content.hexdigest()[:16])


def _annotation_file(folder: Path, part: str, customary: tuple[str, ...], given: str) -> Path:
    names = [given] if given else [f"instances_{name}.json" for name in customary]
    for name in names:
        for path in (folder / "annotations" / name, folder / name, Path(name).expanduser()):
            if path.is_file():
                return path
    raise UsageError(
        f"--dataset {folder}: no {' or '.join(names)} in {folder / 'annotations'}; "
        f"name it with --{part}-json"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))  # with Windows' mark, or without
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for key in LISTS:
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UsageError(f"{path}: no list {key!r}: not COCO's annotations of objects")
    return content


def _field(path: Path, entry: dict[str, Any], key: str, kind: type) -> Any:
    value = entry.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        article = "an" if kind is int else "a"
        raise UsageError(f"{path}: {key}={value!r} must be {article} {kind.__name__}, in {entry}")
    return value


def _categories(path: Path, content: dict[str, Any]) -> dict[int, str]:
    """Names by category id."""
    entries = content["categories"]
    found = {_field(path, e, "id", int): _field(path, e, "name", str) for e in entries}
    if not found or not all(found.values()):
        raise UsageError(f"{path}: categories={entries} need a name each, and one at least")
    _check_once(path, "category id", [e["id"] for e in entries])
    _check_once(path, "category name", [e["name"] for e in entries])
    return found


def _check_once(path: Path, what: str, values: Sequence[Any]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise UsageError(f"{path}: {what} {twice[0]!r} stands there twice; leave one out")


def _split(
    part: str,
    path: Path,
    content: dict[str, Any],
    folder: Path,
    categories: dict[int, str],
    subset: int,
) -> BoxSplit:
    everything = content["images"]
    if not everything:
        raise UsageError(f"{path}: no images")
    numbers = {_field(path, e, "id", int): number for number, e in enumerate(everything)}
    _check_once(path, "image id", [e["id"] for e in everything])
    names = [_field(path, image, "file_name", str) for image in everything]
    _check_once(path, "file_name", names)
    images, files = everything[: subset or None], names[: subset or None]
    sizes = [[_field(path, image, key, int) for key in ("height", "width")] for image in images]
    for name, size in zip(files, sizes, strict=True):
        if not all(0 < side < 2**20 for side in size):
            raise UsageError(f"{path}: {name}: height and width {size} are no image's")
    labels_of = {id_: label for label, id_ in enumerate(sorted(categories))}
    boxes: list[list[list[float]]] = [[] for _ in images]
    labels: list[list[int]] = [[] for _ in images]
    truth: list[list[dict[str, Any]]] = [[] for _ in images]
    left_out, clipped, crowds, counted = [], 0, 0, 0
    for annotation in content["annotations"]:
        name = f"annotation {annotation.get('id')}"
        number = numbers.get(_field(path, annotation, "image_id", int))
        label = labels_of.get(_field(path, annotation, "category_id", int))
        if number is None or label is None:
            key = "image_id" if number is None else "category_id"
            raise UsageError(f"{path}: {name}: {key}={annotation.get(key)!r} is not in the file")
        if number >= len(images):
            continue
        x, y, width, height = _box(path, name, annotation)
        counted += 1
        rows, columns = sizes[number]
        clip = [max(0.0, x), max(0.0, y), min(columns, x + width), min(rows, y + height)]
        if min(clip[2] - clip[0], clip[3] - clip[1]) < MIN_SIDE:
            left_out.append(f"{files[number]} ({name}: {annotation['bbox']})")
            continue
        crowd = annotation.get("iscrowd") or 0
        if crowd not in (0, 1):
            raise UsageError(f"{path}: {name}: iscrowd={crowd!r} must be 0 or 1")
        area = annotation.get("area")  # of its mask; evaluation leaves out what has none
        usable = isinstance(area, (int, float)) and 0 < area <= width * height
        own = {"category_id": label, "bbox": [x, y, width, height], "iscrowd": int(crowd)}
        truth[number].append({**own, "area": float(area) if usable else width * height})
        crowds += crowd
        if not crowd:
            clipped += clip != [x, y, x + width, y + height]
            boxes[number].append(clip)
            labels[number].append(label)
    if left_out:
        more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
        say(
            f"data      {part}: {len(left_out)} of {counted} boxes left out, without area in the "
            f"image: {', '.join(left_out[:NAMED])}{more}"
        )
    empty = sum(not own for own in labels)
    kinds = [(clipped, "boxes clipped to the image"), (crowds, "crowds, in evaluation only")]
    kinds += [(empty, "images without boxes, background")]
    if any(count for count, _ in kinds):
        say(f"data      {part}: " + "; ".join(f"{n} {what}" for n, what in kinds if n))
    counts = torch.tensor([0, *map(len, labels)])
    return BoxSplit(
        name=part,
        folder=_image_folder(folder, path, part, files),
        files=files,
        sizes=torch.tensor(sizes),
        boxes=torch.tensor(list(chain.from_iterable(boxes)), dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor(list(chain.from_iterable(labels)), dtype=torch.int64),
        starts=counts.cumsum(0),
        truth=truth,
    )


def _box(path: Path, name: str, annotation: dict[str, Any]) -> list[float]:
    box: Any = annotation.get("bbox")
    good = isinstance(box, list) and len(box) == 4
    if not good or not all(isinstance(x, (int, float)) and abs(x) < 2**30 for x in box):
        raise UsageError(f"{path}: {name}: bbox={box!r} must be four numbers: x, y, width, height")
    return [float(x) for x in box]


def _image_folder(folder: Path, path: Path, part: str, files: list[str]) -> Path:
    """The folder in which the images are; UsageError that names the first one missing."""
    own = path.stem.removeprefix("instances_")  # train2017
    places = [folder / "images", folder / "images" / own, folder / own, folder / part, folder]
    places = list(dict.fromkeys([*places, path.parent]))
    place = next((place for place in places if (place / files[0]).is_file()), None)
    if place is None:
        tried = ", ".join(map(str, places))
        raise UsageError(
            f"{path}: {files[0]} is in none of {tried}; move the images into the first"
        )
    missing = [name for name in files if not (place / name).is_file()]
    if missing:
        raise UsageError(f"{path}: {missing[0]} is not in {place} ({len(missing)} such files)")
    return place
