"""train/detection.py: layouts, average precision, preflight, resume, boxes that make no sense."""

import importlib.util
import json
import os
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torchvision import tv_tensors
from torchvision.models import get_model
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from tests.scripts import read_run
from train import detection
from utils import detectors
from utils.average_precision import average_precision, coco_results
from utils.batchnorm import convert_batchnorm
from utils.box_pictures import draw_boxes
from utils.box_sets import find_boxes
from utils.boxes import NO_BOX, fit, fitted_back, fitted_size
from utils.errors import ExplainedError, UsageError
from utils.image_loading import collate
from utils.order import SampleIndex

slow = pytest.mark.slow
evaluator = pytest.mark.skipif(
    importlib.util.find_spec("faster_coco_eval") is None, reason="needs faster-coco-eval"
)
CLASSES = {3: "disc", 7: "bar"}  # by category id
COLOURS = {3: (220, 40, 40), 7: (40, 60, 220)}
SIZES = [(80, 60), (64, 96), (64, 64)]  # width and height
SIDE, SEED = 64, 3


def make_folder(folder: Path, num_train: int = 8, num_val: int = 7) -> Path:
    """Coloured rectangles, some over the edge; each third image of a split has none."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    for part, count in (("train", num_train), ("val", num_val)):
        images, annotations = [], []
        for index in range(count):
            width, height = SIZES[index % len(SIZES)]
            pixels = generator.integers(90, 130, (height, width, 3)).astype(np.uint8)
            name = f"{part}{index}.png"
            images.append({"id": 50 + index, "file_name": name, "width": width, "height": height})
            for _ in range(0 if index % 3 == 1 else 3):
                id_ = int(generator.choice(list(CLASSES)))
                w, h = (30, 24) if id_ == 3 else (12, 36)
                x, y = (int(generator.integers(-4, size - 10)) for size in (width, height))
                pixels[max(0, y) : y + h, max(0, x) : x + w] = COLOURS[id_]
                number = len(annotations) + 1
                box = {"id": number, "image_id": 50 + index, "category_id": id_, "iscrowd": 0}
                annotations.append({**box, "bbox": [x, y, w, h], "area": w * h})
            Image.fromarray(pixels).save(folder / "images" / name)
        categories = [{"id": id_, "name": name} for id_, name in CLASSES.items()]
        write(
            folder, part, {"images": images, "annotations": annotations, "categories": categories}
        )
    return folder


def write(folder: Path, part: str, content) -> None:
    (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))


def read(folder: Path, part: str) -> dict:
    return json.loads((folder / "annotations" / f"instances_{part}.json").read_text())


def tiny_detector(name: str, num_classes: int, kind: str = "", **options) -> torch.nn.Module:
    """A Faster R-CNN in place of torchvision's: three convolutions and few channels."""
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 16)):
        layers += [torch.nn.Conv2d(before, after, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(after)]
        layers += [torch.nn.ReLU()]
    backbone = torch.nn.Sequential(*layers)
    backbone.out_channels = 16  # type: ignore
    options = {k: v for k, v in options.items() if k != "weights_backbone"}
    return FasterRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
        box_head=TwoMLPHead(16 * 9, 32),
        box_predictor=FastRCNNPredictor(32, num_classes),
        **options,
    )


def config(dataset: Path, directory: Path, **changes) -> dict:
    given = dict(
        dataset=str(dataset),
        output_dir=str(directory),
        model="fasterrcnn_mobilenet_v3_large_320_fpn",
        global_batch_size=4,
        bn_group=4,
        image_size=SIDE,
        regions=16,
        epochs=2,
        lr=0.02,
        lr_reference_batch=0,
        num_workers=0,
        eval_every=1000,  # at the end alone
        seed=SEED,
        tracker="none",
    )
    return given | changes


def run(given: dict, tiny: bool = True) -> dict:
    """The script's main in this process; rank 0 returns what the run left behind."""
    torch.set_default_dtype(torch.float64)
    build = tiny_detector if tiny else detectors.torchvision_model
    with mock.patch.object(detectors, "torchvision_model", build):
        code = detection.main(detection.Config(**given))
    if dist.get_rank() if dist.is_initialized() else 0:
        return {}
    return {"code": code, **read_run(Path(given["output_dir"]))}


def train(pool, processes: int, dataset: Path, directory: Path, tiny=True, **changes) -> dict:
    given = config(dataset, directory, **changes)
    result = pool.run(processes, run, given, tiny, init=False, timeout=600)[0]
    assert result["config"]["world_size"] == processes
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("boxes") / "data")


# ---- One recipe, any layout ------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(pool, folder, tmp_path_factory):
    """The run in one process, without accumulation, for each BatchNorm group."""
    runs: dict[int, dict] = {}

    def get(group: int) -> dict:
        if group not in runs:
            runs[group] = train(pool, 1, folder, tmp_path_factory.mktemp("one"), bn_group=group)
        return runs[group]

    return get


def assert_same(expected: dict, actual: dict, tolerance: float) -> None:
    """Tensor by tensor; those that are rounding alone (a bias in front of BatchNorm has no
    gradient) are compared with the largest of all."""
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        size = max(float(value.abs().max()), 1e-5 * largest)
        assert float((value - actual[name]).abs().max()) < tolerance * size, name


LAYOUTS = [
    pytest.param(2, 2, 1, 4),
    pytest.param(4, 1, 1, 4, marks=slow),
    pytest.param(2, 1, 2, 2, marks=slow),
    pytest.param(1, 2, 2, 2, marks=slow),
    pytest.param(4, 1, 1, 2, marks=slow),
]


@evaluator
@pytest.mark.parametrize(("processes", "micro", "accumulation", "group"), LAYOUTS)
def test_layouts_give_the_same_run(
    pool, folder, references, tmp_path, processes, micro, accumulation, group
):
    changes = dict(micro_batch_size=micro, bn_group=group)
    actual, expected = train(pool, processes, folder, tmp_path, **changes), references(group)
    assert actual["config"]["accumulation"] == accumulation
    for kind in ("momentum", "model"):
        assert_same(expected[kind], actual[kind], 1e-10)
    for step, values in expected["metrics"].items():
        for key, value in values.items():
            if not key.startswith("perf/"):
                same = pytest.approx(value, rel=1e-10) if key[0] in "tv" else value
                assert actual["metrics"][step][key] == same, (step, key)


@slow
@evaluator
@pytest.mark.parametrize(
    "name",
    [
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        "ssdlite320_mobilenet_v3_large",
        "retinanet_resnet50_fpn",
        "fcos_resnet50_fpn",
    ],
)
def test_torchvisions_detectors_train_alike_on_two_processes(pool, folder, tmp_path, name):
    side = 320 if name.startswith("ssd") else SIDE
    changes = dict(model=name, image_size=side, max_steps=2, lr=1e-3, tiny=False)
    one, two = (train(pool, n, folder, tmp_path / str(n), **changes) for n in (1, 2))
    for step in (1, 2):
        for key in ("train/loss", "train/grad_norm"):
            same = pytest.approx(one["metrics"][step][key], rel=1e-8)
            assert two["metrics"][step][key] == same
    assert_same(one["model"], two["model"], 1e-8)


def batch_of(folder: Path, count: int, epoch: int = 0) -> dict:
    data = find_boxes(str(folder), "", "", 0)
    samples = data.train.with_transform(partial(fit, SIDE))
    batch = collate([samples[index] for index in range(count)])
    return detection.to_input(SEED, dict(batch), epoch)


def test_the_loss_is_a_sum_over_images(folder):
    """In training (but for BatchNorm) and in evaluation; the random regions are the sample's."""
    torch.manual_seed(0)
    with mock.patch.object(detectors, "torchvision_model", tiny_detector):
        # More regions than there are: how many are found is another number in each image.
        model = detection.build_model("fasterrcnn_x", 2, SIDE, False, 2000).double()
    model.eval()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch_of(folder, 4).items()}
    assert int(detection.count_valid(batch)) == 4
    before = torch.get_rng_state()
    whole, parts = detection.compute_loss(model, batch)
    whole = whole.detach()
    assert not model.training and not model.rpn.training
    assert set(parts) == {
        "loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"
    }  # fmt: skip
    alone = []
    for i in (2, 0, 3, 1):
        one = {key: value[i : i + 1] for key, value in batch.items()}
        alone.append(float(detection.compute_loss(model, one)[0].detach()))
    assert float(whole) == pytest.approx(sum(alone), rel=1e-12)
    assert torch.equal(before, torch.get_rng_state())
    later = {**batch, "key": batch_of(folder, 4, epoch=1)["key"]}
    assert float(detection.compute_loss(model, later)[0].detach()) != float(whole)


@slow
@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssd300_vgg16"])
def test_the_loss_of_one_image_is_torchvisions(folder, name):
    """SSD's and FCOS's own loss of a batch is none of its images' (they divide by its matches)."""
    side = 300 if name.startswith("ssd") else SIDE
    torch.manual_seed(0)
    model = detection.build_model(name, 2, side, False, 16)
    plain = get_model(name, weights=None, weights_backbone=None, num_classes=3)
    plain.load_state_dict(model.state_dict())
    plain.transform._skip_resize = True
    data = find_boxes(str(folder), "", "", 0).train.with_transform(partial(fit, side))
    batch = detection.to_input(SEED, dict(collate([data[i] for i in range(3)])))
    model.eval(), plain.train()
    for layer in plain.modules():
        layer.training = layer.training and not isinstance(layer, torch.nn.BatchNorm2d)
    total = 0.0
    for i in range(3):
        real = batch["label"][i] != NO_BOX
        target = {"boxes": batch["boxes"][i][real], "labels": batch["label"][i][real] + 1}
        with torch.no_grad():
            total += float(sum(plain([batch["image"][i]], [target]).values()))
    loss = detection.compute_loss(model, batch)[0].detach()
    assert float(loss) == pytest.approx(total, rel=1e-4)


def test_regions_are_drawn_evenly_and_by_key_alone():
    plain = detectors.BalancedPositiveNegativeSampler(16, 0.25)
    sampler = detectors.KeyedSampler(plain, stream=0)
    matched = torch.tensor([1] * 10 + [0] * 30 + [-1] * 5)
    few = torch.tensor([2, 0, 0, -1])
    counts = torch.zeros(45)
    for epoch in range(400):
        keys = detectors.region_keys(torch.tensor([5, 9]), 0, epoch)
        sampler.keys = keys
        positive, negative = sampler([matched, few])
        assert (int(positive[0].sum()), int(negative[0].sum())) == (4, 12)
        assert (positive[1].tolist(), negative[1].tolist()) == ([1, 0, 0, 0], [0, 1, 1, 0])
        assert sampler.filled == (16 + 3) / 32
        sampler.keys = keys[:1]
        assert torch.equal(sampler([matched])[0][0], positive[0])  # the other image is no matter
        counts += positive[0] + negative[0]
    assert counts[40:].sum() == 0
    assert ((counts[:40] - 160).abs() < 50).all()  # 5 deviations


def test_another_order_of_the_regions_means_no_others():
    """Which of two boxes with nearly the same score comes first is a matter of rounding."""
    with mock.patch.object(detectors, "torchvision_model", tiny_detector):
        model = detection.build_model("fasterrcnn_x", 2, SIDE, False, 16)
    torch.manual_seed(0)
    corners = torch.rand(2, 300, 2) * 60
    proposals = torch.cat([corners, corners + 1 + torch.rand(2, 300, 2) * 30], dim=2)
    shapes, levels = [(64, 64), (50, 64)], [100, 200]
    kept, _ = model.rpn.filter_proposals(proposals, torch.randn(2, 300), shapes, levels)
    sampler = model.roi_heads.fg_bg_sampler
    for i, (height, width) in enumerate(shapes):
        clipped = proposals[i].minimum(torch.tensor([width, height] * 2))
        assert torch.equal(clipped[sampler.places[i]], kept[i]) and len(kept[i]) > 50
    sampler.keys = detectors.region_keys(torch.tensor([5]), 0, 0)
    places, matched = sampler.places[0], (kept[0][:, 0] > 45).long()
    chosen = []
    for order in (torch.arange(len(places)), torch.randperm(len(places))):
        sampler.places = [places[order]]
        masks = sampler([torch.cat([matched[order], torch.tensor([1, 0])])])  # and two true boxes
        both = masks[0][0] | masks[1][0]
        chosen.append(set(places[order][both[:-2] > 0].tolist()) | set(both[-2:].tolist()))
    assert chosen[0] == chosen[1] and len(chosen[0]) >= 15


# ---- BatchNorm -------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
def test_batchnorm_is_frozen_or_grouped(frozen):
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    model = detection.build_model(name, 2, SIDE, frozen, 16)
    plan = convert_batchnorm(model, 2, 4)
    layers = [m for m in model.modules() if isinstance(m, FrozenBatchNorm2d)]
    assert len(layers) == plan.num_frozen == (46 if frozen else 0)
    assert plan.num_layers == (0 if frozen else 46)
    expected = "46 layers, all frozen" if frozen else "46 layers, group 2: ghost split of 4 into 2"
    assert plan.describe() == expected
    plain = get_model(name, weights=None, weights_backbone=None, num_classes=3)
    own = plain.state_dict().keys() - model.state_dict().keys()
    assert all(key.endswith("num_batches_tracked") for key in own) and bool(own) == frozen
    # Weights of either kind are taken: what they differ in is a count of steps.
    from utils.models import load_weights

    assert load_weights(model, plain.state_dict(), "a file") == ()


def test_weights_of_a_classifier_and_of_other_classes():
    from utils.models import load_weights

    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    model = detection.build_model(name, 2, SIDE, True, 16)
    classifier = get_model("mobilenet_v3_large", weights=None)
    load_weights(model, classifier.state_dict(), "a file")
    loaded = model.backbone.body["0"][0].weight  # type: ignore
    assert torch.equal(loaded, classifier.features[0][0].weight)
    other = detection.build_model(name, 5, SIDE, False, 16)
    fresh = load_weights(model, other.state_dict(), "a file")
    assert len(fresh) == 4 and all("box_predictor" in key for key in fresh)
    ssd, other_ssd = (
        detection.build_model("ssdlite320_mobilenet_v3_large", classes, 320, False, 16)
        for classes in (2, 5)
    )
    fresh = load_weights(ssd, other_ssd.state_dict(), "a file")
    assert len(fresh) == 12 and all("classification_head" in key for key in fresh)
    assert torch.equal(loaded, other.backbone.body["0"][0].weight)  # type: ignore


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model="maskrcnn_resnet50_fpn"), "needs masks or keypoints"),
        (dict(model="fasterrcnn_resnet50_fpn_v2"), "has BatchNorm over regions"),
        (dict(model="resnet18"), "is not in torchvision's detection models"),
        (dict(model="ssdlite320_mobilenet_v3_large"), "--image-size 64: .* takes --image-size 320"),
        (dict(image_size=70), "--image-size 70 is not a multiple of 32; use 64"),
    ],
)
def test_models_that_cannot_be_used(changes, words):
    given = {"model": "fasterrcnn_mobilenet_v3_large_320_fpn", "image_size": 64} | changes
    with pytest.raises(UsageError, match=words):
        detection.build_model(given["model"], 2, given["image_size"], False, 16)


# ---- Evaluation ------------------------------------------------------------------------------


def test_squares_and_back():
    for height, width in ((60, 80), (96, 64), (333, 17)):
        image = torch.zeros(3, height, width, dtype=torch.uint8)
        image[:, height // 2 :] = 255
        boxes = torch.tensor([[0.0, height / 2, width, height], [1.0, 2.0, 3.0, 9.0]])
        wrapped = partial(fit, 64)
        from torchvision import tv_tensors

        tagged = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width))
        square, fitted, _ = wrapped(tv_tensors.Image(image), tagged, None)
        rows, columns = fitted_size(height, width, 64)
        assert square.shape == (3, 64, 64) and max(rows, columns) == 64
        x1, y1, x2, y2 = fitted[0].tolist()
        assert (x1, round(x2), round(y2)) == (0, columns, rows)
        padding = torch.cat([square[:, rows:].flatten(), square[:, :, columns:].flatten()])
        assert len(padding) and ((padding.float() - 115).abs() < 12).all()  # the mean colour
        assert square[0, min(63, int(y1) + 2), 0] == 255 and square[0, max(0, int(y1) - 2), 0] == 0
        found = {"boxes": fitted, "labels": torch.tensor([1, 2]), "scores": torch.ones(2)}
        back = fitted_back([found], torch.tensor([[height, width]]), 64)[0]
        assert torch.allclose(back["boxes"], boxes.double(), atol=1e-4)
        assert back["labels"].tolist() == [0, 1]
    outside = {**found, "boxes": torch.tensor([[30.0, 1, 40, 5], [0, 0, 64, 64]])}
    back = fitted_back([outside], torch.tensor([[333, 17]]), 64)[0]  # 3 columns are the image
    assert back["boxes"].tolist() == [[0, 0, 17, 333]] and back["labels"].tolist() == [1]


def perfect(split, indices) -> dict:
    found = {}
    for index in indices:
        boxes = np.array([a["bbox"] for a in split.truth[index]], float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [a["category_id"] for a in split.truth[index]]
        found[index] = {
            "boxes": torch.from_numpy(boxes),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "scores": torch.full((len(labels),), 0.9),
        }
    return found


@evaluator
def test_average_precision_of_known_detections(folder):
    split = find_boxes(str(folder), "", "", 0).test
    names = list(CLASSES.values())
    everything = range(len(split))
    found = perfect(split, everything)
    metrics = average_precision(split, found, names)
    boxes = sum(len(own) for own in split.truth)
    assert metrics == {
        "val/ap": 1.0, "val/ap50": 1.0, "val/ap75": 1.0, "val/ap/disc": 1.0, "val/ap/bar": 1.0,
        "val/classes_present": 2, "val/num_boxes": boxes,
    }  # fmt: skip
    for one in found.values():  # a tenth to the side: IoU 0.81 or so
        one["boxes"][:, [0, 2]] += 0.1 * (one["boxes"][:, 2] - one["boxes"][:, 0])[:, None]
    metrics = average_precision(split, found, names)
    assert metrics["val/ap50"] == metrics["val/ap75"] == 1.0 and metrics["val/ap"] == 0.7
    nothing = {
        "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64),
        "scores": torch.zeros(0),
    }  # fmt: skip
    metrics = average_precision(split, dict.fromkeys(everything, nothing), names)
    assert metrics["val/ap"] == metrics["val/ap50"] == 0.0 and metrics["val/classes_present"] == 2
    metrics = average_precision(split, {1: nothing}, names)  # an image without boxes, alone
    assert metrics == {
        "val/ap": 0.0, "val/ap50": 0.0, "val/ap75": 0.0, "val/classes_present": 0,
        "val/num_boxes": 0,
    }  # fmt: skip


def dump_evaluation(given: dict, dump: str, tiny: bool) -> None:
    """--eval-only, with the detections written to a file."""
    evaluate = detection.average_precision

    def dumping(split, found, classes):
        path = Path(dump) / f"{os.environ['RANK']}.json"
        results = coco_results({i: {k: v.numpy() for k, v in f.items()} for i, f in found.items()})
        path.write_text(json.dumps({"ids": list(found), "results": results}))
        return evaluate(split, found, classes)

    torch.set_default_dtype(torch.float64)
    build = tiny_detector if tiny else detectors.torchvision_model
    with (
        mock.patch.object(detectors, "torchvision_model", build),
        mock.patch.object(detection, "average_precision", dumping),
    ):
        assert detection.main(detection.Config(**given)) == 0


def own_average_precision(truth: dict, results: list[dict], ids: list[int]) -> list[float]:
    """AP, AP50 and AP75 by pycocotools, on the annotations' own file."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    coco = COCO()
    coco.dataset = truth
    coco.createIndex()
    scorer = COCOeval(coco, coco.loadRes(results), "bbox")
    scorer.params.imgIds = ids
    scorer.evaluate()
    scorer.accumulate()
    scorer.summarize()
    return scorer.stats[:3].tolist()


def check_against_pycocotools(pool, given: dict, truth: dict, tmp_path, tiny: bool) -> None:
    ids = [image["id"] for image in truth["images"]]
    category_ids = sorted(category["id"] for category in truth["categories"])
    seen = []
    for processes in (1, 2, 3):
        dump, directory = tmp_path / f"dump{processes}", tmp_path / f"eval{processes}"
        dump.mkdir()
        changed = {**given, "output_dir": str(directory), "eval_only": True}
        pool.run(processes, dump_evaluation, changed, str(dump), tiny, init=False, timeout=600)
        parts = [json.loads(path.read_text()) for path in sorted(dump.iterdir())]
        assert len(parts) == processes
        assert sorted(i for part in parts for i in part["ids"]) == list(range(len(ids)))
        results = [
            {**r, "image_id": ids[r["image_id"]], "category_id": category_ids[r["category_id"]]}
            for part in parts
            for r in part["results"]
        ]
        assert results
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        metrics = {k: v for line in lines for k, v in json.loads(line).items()}
        seen.append([metrics[f"val/{key}"] for key in ("ap", "ap50", "ap75")])
        expected = own_average_precision(truth, results, ids)
        assert seen[-1] == pytest.approx(expected, abs=1e-6) and metrics["val/ap50"] > 0
        assert metrics["val/num_examples"] == len(ids)
    assert seen[1] == pytest.approx(seen[0], abs=1e-6)
    assert seen[2] == pytest.approx(seen[0], abs=1e-6)


@slow
@evaluator
def test_average_precision_is_pycocotools_on_any_number_of_processes(pool, tmp_path):
    pytest.importorskip("pycocotools")
    data = make_folder(tmp_path / "data", 24, 13)
    changes = dict(global_batch_size=6, bn_group=6, epochs=30, lr=0.05)
    train(pool, 2, data, tmp_path / "run", **changes)
    given = config(data, tmp_path, resume=str(tmp_path / "run"), **changes)
    check_against_pycocotools(pool, given, read(data, "val"), tmp_path, tiny=True)


def test_the_picture_shows_truth_and_detections(folder):
    split = find_boxes(str(folder), "", "", 0).test.with_transform(partial(fit, SIDE))
    asked = []

    class Model(torch.nn.Module):
        def forward(self, batch):
            assert not self.training
            asked.append(int(batch["id"][0]))
            return [perfect(split, asked[-1:])[asked[-1]]]

    model = Model().train()
    picture = draw_boxes(model, model, split, list(CLASSES.values()))
    assert model.training and asked == list(range(7))
    assert picture.rows == [[i, len(split.of(i)[1]), len(split.of(i)[1])] for i in asked]
    assert picture.png[:4] == b"\x89PNG"


# ---- Preflight, resume -----------------------------------------------------------------------


def run_preflight(given: dict, mean_loss: bool, tiny: bool) -> dict:
    compute_loss = detection.compute_loss

    def mean(model, batch):
        loss, parts = compute_loss(model, batch)
        return loss / detection.count_valid(batch), parts

    build = tiny_detector if tiny else detectors.torchvision_model
    with (
        mock.patch.object(detectors, "torchvision_model", build),
        mock.patch.object(detection, "compute_loss", mean if mean_loss else compute_loss),
    ):
        code = detection.main(detection.Config(**given, preflight=True))
    if os.environ["RANK"] != "0":  # the main process writes the report, maybe later
        return {}
    report = json.loads((Path(given["output_dir"]) / "preflight.json").read_text())
    return {"code": code, "checks": {e["check"]: e for e in report["checks"]}}


@slow
@evaluator
@pytest.mark.parametrize("mean_loss", [False, True])
@pytest.mark.parametrize("tiny", [True, False])
def test_preflight(pool, folder, tmp_path, mean_loss, tiny):
    given = config(folder, tmp_path)
    answer = pool.run(2, run_preflight, given, mean_loss, tiny, init=False, timeout=600)[0]
    failed = [name for name, entry in answer["checks"].items() if entry["result"] == "fail"]
    assert failed == (["gradient"] if mean_loss else []), answer["checks"]
    assert answer["code"] == int(mean_loss)
    if tiny and not mean_loss:  # the large one's gradient is a matter of rounding in float32
        assert answer["checks"]["gradient"]["result"] in ("pass", "warn"), answer["checks"]


@slow
@evaluator
@pytest.mark.parametrize("processes", [1, 2])
def test_stopped_and_continued_is_bitwise_the_same(pool, tmp_path, processes):
    folder = make_folder(tmp_path / "data", num_train=13, num_val=2)  # 3 updates an epoch
    whole = train(pool, processes, folder, tmp_path / "whole")
    parts = tmp_path / "parts"
    stopped = train(pool, processes, folder, parts, stop_after=4)
    assert stopped["code"] == 75 and stopped["status"]["state"] == "preempted"
    continued = train(pool, processes, folder, parts)
    assert continued["code"] == 0 and continued["status"]["state"] == "finished"
    for kind in ("model", "momentum"):
        for name, value in whole[kind].items():
            assert torch.equal(value, continued[kind][name]), name
    assert whole["metrics"].keys() == continued["metrics"].keys() == set(range(1, 7))
    for step, values in whole["metrics"].items():
        for key in (key for key in values if not key.startswith("perf/")):
            assert continued["metrics"][step][key] == values[key], (step, key)


# ---- Data ------------------------------------------------------------------------------------


def test_boxes_as_in_the_annotations(folder, capsys):
    data = find_boxes(str(folder), "", "", 0)
    assert data.classes == ["disc", "bar"] and data.category_ids == [3, 7]
    for split, part in ((data.train, "train"), (data.test, "val")):
        content = read(folder, part)
        assert split.files == [image["file_name"] for image in content["images"]]
        seen = 0
        for index, image in enumerate(content["images"]):
            own = [a for a in content["annotations"] if a["image_id"] == image["id"]]
            boxes, labels = split.of(index)
            assert labels.tolist() == [data.category_ids.index(a["category_id"]) for a in own]
            for box, a in zip(boxes.tolist(), own, strict=True):
                x, y, w, h = a["bbox"]
                inside = [max(0, x), max(0, y), min(x + w, image["width"])]
                assert box == [*inside, min(y + h, image["height"])]
                seen += box != [x, y, x + w, y + h]
            if part == "val":  # as they are, not clipped
                assert [a["bbox"] for a in split.truth[index]] == [a["bbox"] for a in own]
        empty = sum(index % 3 == 1 for index in range(len(split)))
        expected = f"{part}: {seen} boxes clipped to the image; {empty} images without boxes"
        assert expected in capsys.readouterr().out or part == "val"
        assert seen > 0


@pytest.mark.parametrize(
    "box", [[10, 10, 0, 0], [10, 10, 5, 0], [10, 10, -3, 5], [200, 5, 9, 9], [-20, 5, 15, 9]]
)
def test_boxes_without_area_are_left_out_and_named(tmp_path, capsys, box):
    make_folder(tmp_path / "data")
    whole = find_boxes(str(tmp_path / "data"), "", "", 0)
    content = read(tmp_path / "data", "train")
    content["annotations"].append(
        {"id": 901, "image_id": 52, "category_id": 3, "bbox": box, "area": 0, "iscrowd": 0}
    )
    write(tmp_path / "data", "train_more", content)
    capsys.readouterr()
    data = find_boxes(str(tmp_path / "data"), "instances_train_more.json", "", 0)
    total = len(content["annotations"])
    line = f"train: 1 of {total} boxes left out, without area in the image: train2.png (annot"
    assert line + f"ation 901: {box})" in capsys.readouterr().out
    assert torch.equal(data.train.boxes, whole.train.boxes)
    assert data.fingerprint == whole.fingerprint


def test_crowds_are_evaluated_and_not_learnt(tmp_path):
    make_folder(tmp_path)
    content = read(tmp_path, "val")
    content["annotations"][0]["iscrowd"] = 1
    write(tmp_path, "val", content)
    data = find_boxes(str(tmp_path), "", "", 0)
    assert len(data.test.labels) == len(content["annotations"]) - 1
    assert data.test.truth[0][0]["iscrowd"] == 1 and len(data.test.truth[0]) == 3


def replaced(content: dict, key: str, **changes) -> dict:
    first = {**content[key][0], **changes}
    return {**content, key: [first, *content[key][1:]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: [], "no list 'images': not COCO's"),
        (lambda c: {**c, "annotations": None}, "no list 'annotations'"),
        (lambda c: {**c, "images": []}, "no images"),
        (lambda c: replaced(c, "images", id="a"), "id='a' must be an int"),
        (lambda c: replaced(c, "images", id=51), "image id 51 stands there twice"),
        (lambda c: replaced(c, "images", file_name="val1.png"), "'val1.png' stands there twice"),
        (lambda c: replaced(c, "images", width=None), "width=None must be an int"),
        (lambda c: replaced(c, "images", width=0), r"val0.png: height and width \[60, 0\]"),
        (lambda c: replaced(c, "images", file_name="no.png"), "no.png is in none of"),
        (lambda c: replaced(c, "categories", name="bar"), "category name 'bar' stands there twice"),
        (lambda c: replaced(c, "categories", name=""), "need a name each"),
        (
            lambda c: replaced(c, "categories", name="ball"),
            r"other categories than .*\(3, 'ball'\)",
        ),
        (lambda c: replaced(c, "annotations", image_id=9), "annotation 1: image_id=9 is not in"),
        (lambda c: replaced(c, "annotations", category_id=1), "annotation 1: category_id=1 is not"),
        (lambda c: replaced(c, "annotations", bbox=[1, 2, 3]), r"bbox=\[1, 2, 3\] must be four"),
        (lambda c: replaced(c, "annotations", bbox=[1, 2, 3, float("nan")]), "must be four"),
        (lambda c: replaced(c, "annotations", bbox=[1, 2, 3, 10**400]), "must be four"),
        (lambda c: replaced(c, "annotations", image_id=[1]), r"image_id=\[1\] must be an int"),
        (lambda c: replaced(c, "annotations", iscrowd="0"), "iscrowd='0' must be 0 or 1"),
        (lambda c: {**c, "annotations": []}, "none of 7 images has a box to learn"),
    ],
)
def test_annotations_that_cannot_be_used(tmp_path, change, words):
    make_folder(tmp_path)
    write(tmp_path, "val", change(read(tmp_path, "val")))
    with pytest.raises(UsageError, match=rf"instances_val.json.*{words}"):
        find_boxes(str(tmp_path), "", "", 0)


@pytest.mark.parametrize("area", [-1, 0, None, "x", 10**400, 1e12])
def test_an_area_that_is_none_of_the_box_is_the_boxs_own(tmp_path, area):
    make_folder(tmp_path)
    content = read(tmp_path, "val")
    content["annotations"][0]["area"] = area
    width, height = content["annotations"][0]["bbox"][2:]
    write(tmp_path, "val", content)
    data = find_boxes(str(tmp_path), "", "", 0)
    assert data.test.truth[0][0]["area"] == width * height


def test_images_beside_their_annotations_and_a_byte_order_mark(tmp_path):
    make_folder(tmp_path)
    names = []
    for part, place in (("train", "train"), ("val", "valid")):
        (tmp_path / place).mkdir()
        for path in (tmp_path / "images").glob(f"{part}*.png"):
            path.rename(tmp_path / place / path.name)
        text = (tmp_path / "annotations" / f"instances_{part}.json").read_text()
        names.append(f"{place}/_annotations.coco.json")
        (tmp_path / names[-1]).write_text(text, encoding="utf-8-sig")
    data = find_boxes(str(tmp_path), *names, 0)
    assert data.test.folder == tmp_path / "valid" and data.test.read(0).shape == (3, 60, 80)


def test_thin_images_are_scaled_too():
    image = tv_tensors.Image(torch.zeros(3, 3, 900, dtype=torch.uint8))
    boxes = tv_tensors.BoundingBoxes(
        torch.tensor([[0.0, 0, 900, 3]]),
        format="XYXY",  # type: ignore
        canvas_size=(3, 900),
    )
    cfg = detection.Config(dataset="", image_size=SIDE, max_scale=8.0)
    for _ in range(5):
        scaled, _, _ = detection.scale_crop_flip(cfg, image, boxes, torch.tensor([0]))
        assert scaled.shape == (3, SIDE, SIDE)


def test_too_few_regions_are_refused():
    with pytest.raises(UsageError, match="--regions 3: .* use 4 or more"):
        detectors.build_detector("fasterrcnn_mobilenet_v3_large_320_fpn", 2, 64, False, 3)


def test_files_that_are_missing(tmp_path):
    with pytest.raises(UsageError, match="--dataset .*nowhere: no such folder"):
        find_boxes(str(tmp_path / "nowhere"), "", "", 0)
    make_folder(tmp_path / "data")
    with pytest.raises(UsageError, match="no other.json in .*annotations; name it with --val-json"):
        find_boxes(str(tmp_path / "data"), "", "other.json", 0)
    (tmp_path / "data" / "images" / "train3.png").unlink()
    with pytest.raises(UsageError, match="train3.png is not in .*images .1 such"):
        find_boxes(str(tmp_path / "data"), "", "", 0)


def refusal(given: dict) -> str:
    try:
        run(given)
    except (UsageError, ExplainedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it has run")


@evaluator
def test_an_image_of_another_size_ends_the_run(pool, tmp_path):
    """As one would be whose annotations do not know that it is turned (EXIF)."""
    make_folder(tmp_path / "data")
    path = tmp_path / "data" / "images" / "val3.png"
    with Image.open(path) as image:
        image.transpose(Image.Transpose.ROTATE_90).save(path)
    replies = pool.run(2, refusal, config(tmp_path / "data", tmp_path / "run"), init=False)
    for reply in replies:
        words = "^UsageError: val3.png: the image, upright, is 60x80, in the annotations 80x60"
        assert re.search(words, reply), reply
    assert not (tmp_path / "run").exists()


def test_boxes_follow_the_image(folder):
    """Colours tell the class: in the middle of a box is its object, or one drawn over it."""
    data = find_boxes(str(folder), "", "", 0).train
    cfg = detection.Config(dataset="", image_size=SIDE, max_scale=1.5, vertical_flip=True)
    samples = data.with_transform(partial(detection.scale_crop_flip, cfg), SEED)
    right = seen = 0
    for epoch in range(12):
        for index in range(len(samples)):
            sample = samples[SampleIndex(index, epoch)]
            assert sample["image"].shape == (3, SIDE, SIDE)
            real = sample["label"] != NO_BOX
            assert not sample["boxes"][~real].any()
            for box, label in zip(sample["boxes"][real], sample["label"][real], strict=True):
                x1, y1, x2, y2 = box.tolist()
                assert 0 <= x1 < x2 <= SIDE and 0 <= y1 < y2 <= SIDE
                pixel = sample["image"][:, int((y1 + y2) / 2), int((x1 + x2) / 2)].tolist()
                seen += 1
                right += pixel[2 if label == 1 else 0] > 180
    assert seen > 50 and right / seen > 0.7
    again = samples[SampleIndex(0, 3)]
    assert torch.equal(again["image"], samples[SampleIndex(0, 3)]["image"])
    assert not torch.equal(again["image"], samples[SampleIndex(0, 4)]["image"])


# ---- BCCD ------------------------------------------------------------------------------------


def test_bccd_and_its_two_boxes_without_area(real_data, capsys):
    names = ("instances_train_with_degenerate.json", "instances_val_with_degenerate.json")
    data = find_boxes(str(real_data / "bccd"), *names, 0)
    printed = capsys.readouterr().out
    assert "train: 1 of 2805 boxes left out, without area in the image: BloodImage_00343" in printed
    assert "val: 1 of 1138 boxes left out, without area in the image: BloodImage_00338" in printed
    clean = find_boxes(str(real_data / "bccd"), "", "", 0)
    assert (len(clean.train), len(clean.test)) == (205, 87)
    assert len(clean.train.labels) == 2804 and clean.classes == ["RBC", "WBC", "Platelets"]
    assert torch.equal(data.train.boxes, clean.train.boxes)
    assert torch.equal(data.test.labels, clean.test.labels)


def first_images(source: Path, target: Path, count: int, first: Collection = ()) -> dict:
    """COCO's JSON with `count` images of another one, those `first`; written, and returned."""
    content = json.loads(source.read_text())
    images = sorted(content["images"], key=lambda image: image["id"] not in first)[:count]
    ids = {image["id"] for image in images}
    boxes = [box for box in content["annotations"] if box["image_id"] in ids]
    content |= {"images": images, "annotations": boxes}
    target.write_text(json.dumps(content))
    return content


@slow
@evaluator
def test_bccd_with_degenerate_boxes_trains_without_nan(pool, real_data, tmp_path):
    """With the image whose boxes have no area; then AP on 1, 2 and 3 processes."""
    pytest.importorskip("pycocotools")
    source = real_data / "bccd" / "annotations"
    train_json, val_json = tmp_path / "train.json", tmp_path / "val.json"
    boxes = json.loads((source / "instances_train_with_degenerate.json").read_text())["annotations"]
    degenerate = {box["image_id"] for box in boxes if min(box["bbox"][2:]) <= 0}
    assert degenerate
    first_images(source / "instances_train_with_degenerate.json", train_json, 72, degenerate)
    truth = first_images(source / "instances_val.json", val_json, 10)
    changes = dict(
        train_json=str(train_json),
        val_json=str(val_json),
        image_size=160,
        global_batch_size=36,  # two windows hold all images
        micro_batch_size=6,
        bn_group=6,
        epochs=1,
        regions=32,
        lr=0.01,
        verify_data=False,
    )
    result = train(pool, 1, real_data / "bccd", tmp_path / "run", False, **changes)
    values = [v for line in result["metrics"].values() for v in line.values()]
    assert all(np.isfinite(v) for v in values if isinstance(v, float))
    assert result["status"]["state"] == "finished"
    given = config(real_data / "bccd", tmp_path, resume=str(tmp_path / "run"), **changes)
    check_against_pycocotools(pool, given, truth, tmp_path, tiny=False)
