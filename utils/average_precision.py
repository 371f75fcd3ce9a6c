"""Average precision as COCO defines it, by the package faster-coco-eval, over all processes."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from utils.boxes import BoxSplit
from utils.distributed import gather_objects, on_main_process
from utils.errors import UsageError

PACKAGE = "faster-coco-eval"
Detections = dict[str, torch.Tensor]  # "boxes" (N, 4) x1 y1 x2 y2, "labels" from 0 on, "scores"


def check_coco_evaluator() -> None:
    """UsageError, with the line that installs it, where the package is missing."""
    if importlib.util.find_spec("faster_coco_eval") is None:
        raise UsageError(f"average precision needs the package {PACKAGE}: pip install {PACKAGE}")


def average_precision(
    split: BoxSplit, found: Mapping[int, Detections], classes: Sequence[str]
) -> dict[str, float]:
    """Average precision over the images that the processes have looked at; all of them call it.

    Args:
        found: this process's detections by index of the image, in pixels of the image.

    Returns, on all processes alike: "val/ap" (mean over IoU of 0.50 to 0.95), "val/ap50" and
    "val/ap75", means over the classes that have boxes in these images (0 where none has);
    "val/ap/CLASS" of these classes, and their number, "val/classes_present"; "val/num_boxes" of
    the truth, crowds left out.
    """
    arrays = {index: {k: v.numpy() for k, v in one.items()} for index, one in found.items()}
    gathered = gather_objects(arrays)

    def evaluate() -> dict[str, float]:
        merged = {index: one for part in gathered for index, one in part.items()}
        assert len(merged) == sum(map(len, gathered)), "an image was looked at twice"
        return _evaluate(split, dict(sorted(merged.items())), classes)

    return on_main_process(evaluate)


def coco_truth(split: BoxSplit, indices: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """COCO's annotations of these images; ids are indices, categories labels."""
    of_images = [{**a, "image_id": i} for i in indices for a in split.truth[i]]
    return {
        "images": [{"id": i} for i in indices],
        "categories": [{"id": label, "name": name} for label, name in enumerate(classes)],
        "annotations": [{**a, "id": number} for number, a in enumerate(of_images, start=1)],
    }


def coco_results(found: Mapping[int, Mapping[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Detections as COCO's list of results."""
    results = []
    for index, one in found.items():
        for (x1, y1, x2, y2), label, score in zip(
            one["boxes"].tolist(), one["labels"].tolist(), one["scores"].tolist(), strict=True
        ):
            box = [x1, y1, x2 - x1, y2 - y1]
            results.append({"image_id": index, "category_id": label, "bbox": box, "score": score})
    return results


def _evaluate(split, found, classes) -> dict[str, float]:
    from faster_coco_eval import COCO, COCOeval_faster  # type: ignore  # an optional package

    def silent(*args: Any) -> None: ...

    truth = COCO(coco_truth(split, list(found), classes), print_function=silent)
    results = truth.loadRes(coco_results(found))
    scorer = COCOeval_faster(truth, results, iouType="bbox", print_function=silent)
    scorer.evaluate()
    scorer.accumulate()
    # (IoU 0.50 to 0.95, recall, class, area, most detections); -1: the class has no box here.
    precision = scorer.eval["precision"][:, :, :, 0, -1]
    by_class = {
        name: precision[:, :, label].mean(axis=1)
        for label, name in enumerate(classes)
        if precision[0, 0, label] >= 0
    }
    curve = np.mean(list(by_class.values()), axis=0) if by_class else np.zeros(len(precision))
    boxes = [a for index in found for a in split.truth[index] if not a["iscrowd"]]
    return {
        "val/ap": float(curve.mean()),
        "val/ap50": float(curve[0]),
        "val/ap75": float(curve[5]),
        **{f"val/ap/{name}": float(curve.mean()) for name, curve in by_class.items()},
        "val/classes_present": len(by_class),
        "val/num_boxes": len(boxes),
    }
