"""--predict: what a trained model says about image files, with the run's own preprocessing.

The checkpoint's manifest tells all that is needed; no data set is read.
"""

import colorsys
import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from utils.augment import normalise
from utils.box_pictures import SHOWN_SCORE, draw_overlay
from utils.boxes import fit_image, fitted_back
from utils.checkpoint import find_checkpoint, load_checkpoint
from utils.console import say, warn
from utils.errors import FINISHED, ExplainedError, UsageError
from utils.files import write_json, write_text
from utils.image_sets import SUFFIXES, natural_key
from utils.images import BadImage, decode_rgb

TOP = 5  # classes of an image that are told
CHUNK = 32  # images of one size that the model is given at once
COLOUR_SHARE = 0.5  # of a mask in its overlay
FOUND = ("boxes", "labels", "scores")


@torch.no_grad()
def classify(
    path: str,
    checkpoint: str,
    directory: Path,
    build: Callable[..., nn.Module],
    transform: Callable[[torch.Tensor, int, float], torch.Tensor],
    device: torch.device,
) -> int:
    """The most probable classes of each image, printed and in RUN/predictions/predictions.csv.

    Args:
        path: an image, or a folder of them.
        checkpoint: its manifest has "build", the arguments of `build`, and "model", what stands
            in model.json.
        directory: of the run.
        build: makes the architecture.
        transform: as in evaluation: of uint8 (3, H, W), "image_size" and "crop_pct".

    Returns the exit code. A file that cannot be read is named and left out; ExplainedError when
    none can be.
    """
    model, about = _restore(checkpoint, build, device)
    top, rows = min(TOP, len(about["classes"])), []
    images = (
        (name, transform(image, about["image_size"], about["crop_pct"]))
        for name, image in _readable(path)
    )
    while chunk := list(islice(images, CHUNK)):
        batch = torch.stack([image for _, image in chunk]).to(device)
        logits = model(normalise(batch, about["mean"], about["std"]))
        shares, indices = (values.tolist() for values in logits.softmax(dim=1).topk(top))
        for i, (name, _) in enumerate(chunk):
            found = [(about["classes"][c], p) for c, p in zip(indices[i], shares[i], strict=True)]
            say(f"{name}  " + ", ".join(f"{label} {share:.1%}" for label, share in found))
            rows.append([name, *(cell for label, p in found for cell in (label, f"{p:.6f}"))])
    head = [f"{kind}_{rank}" for rank in range(1, top + 1) for kind in ("class", "probability")]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([["file", *head], *rows])
    file = directory / "predictions" / "predictions.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())
    say(f"predicted {len(rows)} images: {file}")
    return FINISHED


@torch.no_grad()
def segment(
    path: str,
    checkpoint: str,
    directory: Path,
    build: Callable[..., nn.Module],
    device: torch.device,
) -> int:
    """A mask of each image in RUN/predictions/: NAME_mask.png and NAME_overlay.png.

    The mask is a PNG in mode P whose values are class indices, as the data set's own masks have
    them ("mask_values" in model.json); the overlay is the image under the classes' colours. Each
    image is seen whole, at its own size. Args, return and errors: as `classify`.
    """
    model, about = _restore(checkpoint, build, device)
    values = np.array(about["mask_values"], np.uint8)  # class of the model -> value in the file
    colours = np.zeros((256, 3), np.uint8)
    colours[values] = about["palette"] or _distinct_colours(len(values))
    folder, stems = directory / "predictions", set()
    for name, image in _readable(path):
        inputs = normalise(image[None].to(device), about["mean"], about["std"])
        classes = model(inputs)["out"].argmax(dim=1)[0].cpu().numpy()  # (H, W)
        indices = values[classes]
        mask = Image.fromarray(indices)
        mask.putpalette(colours.tobytes())
        overlay = Image.blend(
            Image.fromarray(image.permute(1, 2, 0).numpy()),
            Image.fromarray(colours[indices]),
            COLOUR_SHARE,
        )
        stem = _new_stem(name, stems)
        (folder / stem).parent.mkdir(parents=True, exist_ok=True)
        mask.save(folder / f"{stem}_mask.png")
        overlay.save(folder / f"{stem}_overlay.png")
        present, sizes = np.unique(classes, return_counts=True)
        parts = sorted(zip(sizes / classes.size, present, strict=True), reverse=True)
        say(f"{name}  " + ", ".join(f"{about['classes'][c]} {p:.1%}" for p, c in parts[:TOP]))
    say(f"predicted {len(stems)} images: *_mask.png (class indices), *_overlay.png in {folder}")
    return FINISHED


@torch.no_grad()
def detect(
    path: str,
    checkpoint: str,
    directory: Path,
    build: Callable[..., nn.Module],
    device: torch.device,
) -> int:
    """The boxes in each image in RUN/predictions/: NAME_boxes.json and NAME_overlay.png.

    The file lists all that the model has found, the surest first: "box" (x1, y1, x2, y2 in pixels
    of the upright image), "class", "category_id" of the data set, "score". The overlay shows those
    with a score of SHOWN_SCORE and more. Args, return and errors: as `classify`.
    """
    model, about = _restore(checkpoint, build, device)
    classes, side = about["classes"], about["image_size"]
    colours = np.array(_distinct_colours(len(classes)), np.uint8)
    folder, stems = directory / "predictions", set()
    for name, image in _readable(path):
        size = torch.tensor([image.shape[1:]])
        inputs = fit_image(side, image)[None].to(device, torch.get_default_dtype()) / 255
        found = fitted_back(model(inputs), size, side)[0]
        boxes = [
            {
                "box": [round(x, 2) for x in box],
                "class": classes[label],
                "category_id": about["category_ids"][label],
                "score": round(score, 4),
            }
            for box, label, score in zip(*(found[k].tolist() for k in FOUND), strict=True)
        ]
        stem = _new_stem(name, stems)
        (folder / stem).parent.mkdir(parents=True, exist_ok=True)
        content = {"file": name, "width": image.shape[2], "height": image.shape[1], "boxes": boxes}
        write_json(folder / f"{stem}_boxes.json", content)
        overlay = draw_overlay(image, found, colours, classes)
        Image.fromarray(overlay.permute(1, 2, 0).numpy()).save(folder / f"{stem}_overlay.png")
        counts = Counter(box["class"] for box in boxes if box["score"] >= SHOWN_SCORE)
        say(f"{name}  " + (", ".join(f"{n} {c}" for c, n in counts.most_common()) or "nothing"))
    say(f"predicted {len(stems)} images: *_boxes.json, *_overlay.png in {folder}")
    return FINISHED


def _new_stem(name: str, stems: set[str]) -> str:
    """The name without suffix, or with it where another has that one: a.jpg and a.png."""
    stem = str(PurePosixPath(name).with_suffix(""))
    stem = name if stem in stems else stem
    stems.add(stem)
    return stem


def _restore(
    checkpoint: str, build: Callable[..., nn.Module], device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The model as saved, for evaluation, without BatchNorm groups; and what is said about it."""
    found = find_checkpoint(Path(checkpoint))
    if found is None or not {"model", "build"} <= found.manifest.keys():
        raise UsageError(f"{checkpoint} is broken, or its manifest.json does not tell the model")
    try:
        model = build(*found.manifest["build"])
    except TypeError as error:
        raise UsageError(f"--resume {checkpoint} is a run of another script: {error}") from error
    load_checkpoint(found, model=model)
    say(f"model     {found.path}, after update {found.step}")
    return model.to(device).eval(), found.manifest["model"]


def _readable(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name, and pixels in RGB, uint8 (3, H, W), of each image that can be read.

    Names are relative to the folder, with /. The others are named on stderr; ExplainedError when
    none is left.
    """
    root = Path(path).expanduser()
    files = [root]
    if root.is_dir():
        found = [file for file in root.rglob("*") if file.is_file() and file.name[0] != "."]
        files = [file for file in found if file.suffix.lower() in SUFFIXES]
        files.sort(key=lambda file: natural_key(file.as_posix()))
        if len(files) < len(found):
            say(f"left out  {len(found) - len(files)} files, no images by name")
    if not files:
        raise UsageError(f"--predict {path}: no file in there ends as an image's name does")
    broken = 0
    for file in files:
        name = file.relative_to(root).as_posix() if root.is_dir() else file.name
        try:
            yield name, decode_rgb(file, name)
        except (BadImage, OSError) as error:
            broken += 1
            warn(f"left out: {error}")
    if broken == len(files):
        raise ExplainedError(f"--predict {path}: none of {broken} images could be read")


def _distinct_colours(count: int) -> list[list[int]]:
    """(R, G, B), hues in even steps."""
    hues = [colorsys.hsv_to_rgb(i / count, 0.8, 0.9) for i in range(count)]
    return [[round(255 * part) for part in hue] for hue in hues]
