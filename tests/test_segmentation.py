"""train/segmentation.py: layouts, mean IoU, preflight, resume, and masks that cannot be used."""

import importlib
import json
import os
import re
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

from tests.scripts import read_run
from train import segmentation
from utils.errors import ExplainedError, UsageError
from utils.image_loading import collate
from utils.images import BadImage
from utils.mask_sets import find_masked_images
from utils.masks import IGNORED
from utils.metrics import ConfusionMatrix
from utils.order import SampleIndex, SampleOrder

CLASSES, VOID = ["grass", "wall", "sky", "void", "road"], 3  # what is ignored, in the middle
COLOURS = [[0, 160, 0], [120, 60, 0], [90, 150, 250], [0, 0, 0], [90, 90, 90]]
SIZES = [(72, 60), (66, 80), (90, 64), (64, 64)]  # width and height
CROP, SEED = 64, 3


def write_pair(folder: Path, split: str, index: int, mask: np.ndarray, palette: bool) -> None:
    """A mask of class indices and a noisy image in the colours of its classes."""
    noise = np.random.default_rng(index).integers(0, 40, (*mask.shape, 3))
    colours = np.array(COLOURS)[np.minimum(mask, 4)] + noise
    for kind in ("images", "masks"):
        (folder / kind / split).mkdir(parents=True, exist_ok=True)
    Image.fromarray(colours.clip(0, 255).astype(np.uint8)).save(
        folder / "images" / split / f"scene{index}.png"
    )
    image = Image.fromarray(mask.astype(np.uint8))
    if palette:  # the same indices, shown in any colours
        image.putpalette(sum(COLOURS, []))
    image.save(folder / "masks" / split / f"scene{index}.png")


def make_folder(folder: Path, num_train: int = 6, num_val: int = 7, all_void: tuple = ()) -> Path:
    """Scenes of blocks, a third of them void; the masks of some are void throughout."""
    generator = np.random.default_rng(0)
    for split, count in (("train", num_train), ("val", num_val)):
        for index in range(count):
            width, height = SIZES[index % len(SIZES)]
            blocks = generator.choice(5, (5, 5), p=[0.3, 0.2, 0.15, 0.3, 0.05])
            mask = np.kron(blocks, np.ones((20, 20), int))[:height, :width]
            if split == "train" and index in all_void:
                mask = np.full_like(mask, VOID)
            write_pair(folder, split, index, mask, palette=index % 2 == 1)
    meta = {"classes": CLASSES, "palette": COLOURS, "ignore_index": VOID}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def config(dataset: Path, directory: Path, **changes) -> dict:
    given = dict(
        dataset=str(dataset),
        output_dir=str(directory),
        global_batch_size=4,
        bn_group=4,
        crop_size=CROP,
        epochs=3,
        lr=0.05,
        lr_reference_batch=0,
        num_workers=0,
        eval_every=1000,  # at the end alone
        seed=SEED,
        tracker="none",
    )
    return given | changes


def run(given: dict) -> dict:
    """The script's main in this process; rank 0 returns what the run left behind."""
    torch.set_default_dtype(torch.float64)
    code = segmentation.main(segmentation.Config(**given))
    if dist.get_rank() if dist.is_initialized() else 0:
        return {}
    return {"code": code, **read_run(Path(given["output_dir"]))}


def train(pool, processes: int, dataset: Path, directory: Path, **changes) -> dict:
    result = pool.run(processes, run, config(dataset, directory, **changes), init=False)[0]
    assert result["config"]["world_size"] == processes
    return result


# ---- One recipe, any layout ------------------------------------------------------------------


@pytest.fixture(scope="module")
def void_folder(tmp_path_factory):
    """The masks of the first half of the first window are void throughout: with 2 processes all
    that rank 0 has, with 4 all that ranks 0 and 1 have."""
    first = SampleOrder(6, SEED).ids(0, 0, 2).tolist()
    return make_folder(tmp_path_factory.mktemp("void"), all_void=tuple(first))


@pytest.fixture(scope="module")
def references(pool, void_folder, tmp_path_factory):
    """The run in one process, without accumulation, for each BatchNorm group."""
    runs: dict[int, dict] = {}

    def get(group: int) -> dict:
        if group not in runs:
            directory = tmp_path_factory.mktemp("reference")
            runs[group] = train(pool, 1, void_folder, directory, bn_group=group, max_steps=2)
        return runs[group]

    return get


def assert_same(expected: dict, actual: dict) -> None:
    """Tensor by tensor; those that are rounding alone (a bias in front of BatchNorm has no
    gradient) are compared with the largest of all."""
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        size = max(float(value.abs().max()), 1e-5 * largest)
        assert float((value - actual[name]).abs().max()) < 1e-10 * size, name


slow = pytest.mark.slow
LAYOUTS = [
    pytest.param(2, 2, 1, 4),
    pytest.param(4, 1, 1, 4),
    pytest.param(1, 1, 4, 1, marks=slow),
    pytest.param(2, 2, 1, 1, marks=slow),
    pytest.param(4, 1, 1, 1, marks=slow),
    pytest.param(1, 2, 2, 2, marks=slow),
    pytest.param(2, 1, 2, 2, marks=slow),
]


@pytest.mark.parametrize(("processes", "micro", "accumulation", "group"), LAYOUTS)
def test_layouts_give_the_same_run(
    pool, void_folder, references, tmp_path, processes, micro, accumulation, group
):
    changes = dict(micro_batch_size=micro, bn_group=group, max_steps=2)
    actual, expected = train(pool, processes, void_folder, tmp_path, **changes), references(group)
    assert actual["config"]["accumulation"] == accumulation
    for kind in ("momentum", "model"):  # the momentum is made of the gradients alone
        assert_same(expected[kind], actual[kind])
    for step, values in expected["metrics"].items():
        for key, value in values.items():
            if not key.startswith("perf/"):
                same = pytest.approx(value, rel=1e-10) if key[0] in "tv" else value
                assert actual["metrics"][step][key] == same, (step, key)


def test_reference_has_void_pixels(void_folder, references):
    data = find_masked_images(str(void_folder), 0, 0, -1)
    first = SampleOrder(6, SEED).ids(0, 0, 4).tolist()
    void = [bool((data.train.read(index)[1] == IGNORED).all()) for index in first]
    assert void == [True, True, False, False]
    with pytest.raises(AssertionError):  # the comparison can fail
        assert_same(references(4)["model"], references(1)["model"])


# ---- Evaluation ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A finished run on a folder, with a prime number of images to evaluate."""
    folder = make_folder(tmp_path_factory.mktemp("folder"))
    directory = tmp_path_factory.mktemp("run")
    changes = dict(global_batch_size=6, bn_group=6, max_steps=6, epochs=6)
    return folder, directory, train(pool, 1, folder, directory, **changes)


def dump_evaluation(given: dict, dump: str) -> list:
    """--eval-only, with the predictions written to files; returns the matrix it came to."""
    rank, matrices = os.environ["RANK"], []
    compute_loss, reduce = segmentation.compute_loss, ConfusionMatrix.reduce

    def dumping(model, batch, *args, **kwargs):
        loss, logits = compute_loss(model, batch, *args, **kwargs)
        for row, sample in enumerate(batch["id"].tolist()):
            np.savez(
                Path(dump) / f"{sample}_{rank}.npz",
                label=batch["label"][row].numpy(),
                prediction=logits[row].argmax(0).numpy(),
            )
        return loss, logits

    def kept(self):
        matrices.append(reduce(self))
        return matrices[-1]

    segmentation.compute_loss, ConfusionMatrix.reduce = dumping, kept
    try:
        torch.set_default_dtype(torch.float64)
        with mock.patch.object(segmentation.Run, "draw"):  # it looks at some images once more
            assert segmentation.main(segmentation.Config(**given)) == 0
    finally:
        segmentation.compute_loss, ConfusionMatrix.reduce = compute_loss, reduce
    return [matrix.tolist() for matrix in matrices]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_mean_iou_is_numpys_from_the_predictions(pool, trained, tmp_path, processes):
    folder, directory, reference = trained
    changes = dict(global_batch_size=6, bn_group=6, max_steps=6, epochs=6)
    changes |= dict(resume=str(directory), eval_only=True)
    given = config(folder, tmp_path / "evaluation", **changes)
    dump = tmp_path / "dump"
    dump.mkdir()
    replies = pool.run(processes, dump_evaluation, given, str(dump), init=False)
    files = sorted(dump.glob("*.npz"))  # the start checks, in a part of the model, write none
    assert sorted(int(file.stem.split("_")[0]) for file in files) == list(range(7))
    assert len({file.stem.split("_")[1] for file in files}) == processes
    expected = np.zeros((4, 4), np.int64)
    for file in files:
        content = np.load(file)
        valid = content["label"] != IGNORED
        np.add.at(expected, (content["label"][valid], content["prediction"][valid]), 1)
    assert replies == [[expected.tolist()]] * processes
    hits = expected.diagonal()
    union = expected.sum(0) + expected.sum(1) - hits
    metrics = json.loads((tmp_path / "evaluation" / "metrics.jsonl").read_text())
    assert metrics["val/miou"] == pytest.approx((hits / union)[union > 0].mean(), rel=1e-12)
    assert metrics["val/pixel_accuracy"] == pytest.approx(hits.sum() / expected.sum(), rel=1e-12)
    assert metrics["val/classes_present"] == (union > 0).sum()
    assert metrics["val/num_examples"] == 7 and metrics["val/num_pixels"] == expected.sum()
    for key in ("val/loss", "val/miou", "val/pixel_accuracy"):
        assert metrics[key] == pytest.approx(reference["metrics"][6][key], rel=1e-12)


def test_export_loads_into_the_torchvision_model(trained):
    folder, directory, reference = trained
    from safetensors.torch import load_file

    about = json.loads((directory / "model" / "model.json").read_text())
    assert about["classes"] == ["grass", "wall", "sky", "road"]
    assert about["palette"] == [COLOURS[i] for i in (0, 1, 2, 4)]
    options = dict(num_classes=len(about["classes"]), weights_backbone=None)
    model = get_model(about["architecture"], **options).double().eval()
    model.load_state_dict(load_file(directory / "model" / "model.safetensors"), strict=True)
    data, hits, pixels = find_masked_images(str(folder), 0, 0, -1), 0, 0
    mean, std = (torch.tensor(about[k]).double().view(3, 1, 1) for k in ("mean", "std"))
    for index in range(len(data.test)):
        image, mask = data.test.read(index)
        with torch.no_grad():
            prediction = model((image[None] / 255 - mean) / std)["out"][0].argmax(0)
        hits += int((prediction == mask).sum())
        pixels += int((mask != IGNORED).sum())
    accuracy = reference["metrics"][6]["val/pixel_accuracy"]
    assert hits / pixels == pytest.approx(accuracy, abs=1e-4)


# ---- Preflight, resume -----------------------------------------------------------------------


def run_preflight(given: dict, mean_loss: bool) -> dict:
    compute_loss = segmentation.compute_loss

    def mean(model, batch, auxiliary_weight=0.0):
        loss, logits = compute_loss(model, batch, auxiliary_weight)
        return loss / segmentation.count_valid(batch).clamp(min=1), logits

    segmentation.compute_loss = mean if mean_loss else compute_loss
    try:
        code = segmentation.main(segmentation.Config(**given, preflight=True))
    finally:
        segmentation.compute_loss = compute_loss
    if os.environ["RANK"] != "0":  # the main process writes the report, maybe later
        return {}
    report = json.loads((Path(given["output_dir"]) / "preflight.json").read_text())
    return {"code": code, "checks": {e["check"]: e for e in report["checks"]}}


@pytest.mark.parametrize("mean_loss", [False, True])
def test_preflight(pool, trained, tmp_path, mean_loss):
    given = config(trained[0], tmp_path)
    answer = pool.run(2, run_preflight, given, mean_loss, init=False)[0]
    failed = [name for name, entry in answer["checks"].items() if entry["result"] == "fail"]
    assert failed == (["gradient"] if mean_loss else []), answer["checks"]
    assert answer["code"] == int(mean_loss)
    assert "differs between epochs" in answer["checks"]["random"]["seen"]


@pytest.mark.parametrize(
    ("processes", "workers"), [(2, 0), *(pytest.param(n, 2, marks=slow) for n in (1, 2))]
)
def test_stopped_and_continued_is_bitwise_the_same(pool, tmp_path, processes, workers):
    folder = make_folder(tmp_path / "data", num_train=13, num_val=2)  # 3 updates an epoch
    changes = dict(num_workers=workers, epochs=2)
    whole = train(pool, processes, folder, tmp_path / "whole", **changes)
    parts = tmp_path / "parts"
    stopped = train(pool, processes, folder, parts, stop_after=4, **changes)
    assert stopped["code"] == 75 and stopped["status"]["state"] == "preempted"
    continued = train(pool, processes, folder, parts, **changes)
    assert continued["code"] == 0 and continued["status"]["state"] == "finished"
    for kind in ("model", "momentum"):
        for name, value in whole[kind].items():
            assert torch.equal(value, continued[kind][name]), name
    assert whole["metrics"].keys() == continued["metrics"].keys() == set(range(1, 7))
    for step, values in whole["metrics"].items():
        for key in (key for key in values if not key.startswith("perf/")):
            assert continued["metrics"][step][key] == values[key], (step, key)


# ---- Data ------------------------------------------------------------------------------------


def test_masks_are_read_as_stored(tmp_path):
    data = find_masked_images(str(make_folder(tmp_path)), 0, 0, -1)
    assert data.classes.names == ["grass", "wall", "sky", "road"] and data.test.name == "val"
    table = np.array([0, 1, 2, IGNORED, 3])
    modes = set()
    for index in range(len(data.train)):
        image, mask = data.train.read(index)
        with Image.open(tmp_path / "masks" / "train" / f"scene{index}.png") as stored:
            modes.add(stored.mode)
            assert np.array_equal(mask.numpy(), table[np.asarray(stored)])
        assert image.dtype == mask.dtype == torch.uint8
    assert modes == {"L", "P"}


def test_rows_of_a_data_set_are_read_as_the_folder(tmp_path):
    datasets = importlib.import_module("datasets")
    folder, rows = make_folder(tmp_path / "folder"), tmp_path / "rows"
    features = datasets.Features({"image": datasets.Image(), "mask": datasets.Image()})
    for split, part in (("train", "train"), ("val", "validation")):
        files = sorted((folder / "images" / split).iterdir())
        masks = [folder / "masks" / split / file.name for file in files]
        content = {
            key: [{"bytes": path.read_bytes(), "path": None} for path in paths]
            for key, paths in (("image", files), ("mask", masks))
        }
        rows.mkdir(exist_ok=True)
        table = datasets.Dataset.from_dict(content, features=features)
        table.to_parquet(rows / f"{part}-00000-of-00001.parquet")
    one = find_masked_images(str(folder), 4, 0, -1)
    other = find_masked_images(str(rows), 4, len(CLASSES), VOID)
    for ours, theirs in ((one.train, other.train), (one.test, other.test)):
        assert len(ours) == len(theirs) == 4
        for index in range(4):
            for a, b in zip(ours.read(index), theirs.read(index), strict=True):
                assert torch.equal(a, b)
    with pytest.raises(UsageError, match="no meta.json .* or give --num-classes"):
        find_masked_images(str(rows), 0, 0, -1)


def replace_mask(folder: Path, change) -> None:
    path = folder / "masks" / "train" / "scene2.png"
    with Image.open(path) as image:
        change(np.array(image), path)


def wrong_value(mask, path):
    mask[0, :3] = 17
    Image.fromarray(mask).save(path)


def other_size(mask, path):
    Image.fromarray(mask[:-1, :-2]).save(path)


def colours(mask, path):
    Image.fromarray(np.array(COLOURS, np.uint8)[mask]).save(path)


def lossy(mask, path):
    Image.fromarray(mask).save(path, format="JPEG")


def broken(mask, path):
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_value, r"scene2.png: value 17 \(3 pixels\) is none of 4 classes.*3 for no label"),
        (other_size, "masks/train/scene2.png: the mask is 88x63, its image .*scene2.png 90x64"),
        (colours, "scene2.png: a mask is .*not a PNG in mode RGB"),
        (lossy, "scene2.png: a mask is .*not a JPEG in mode L"),
        (broken, "masks/train/scene2.png: "),
    ],
)
def test_masks_that_cannot_be_used(tmp_path, change, words):
    replace_mask(make_folder(tmp_path), change)
    data = find_masked_images(str(tmp_path), 0, 0, -1)
    for index in range(len(data.train)):
        if index == 2:
            with pytest.raises(BadImage, match=words):
                data.train.read(index)
        else:
            data.train.read(index)


def refusal(given: dict) -> str:
    """What the script says when it ends with an error that it explains."""
    try:
        run(given)
    except (UsageError, ExplainedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it has run")


@pytest.mark.parametrize(
    ("processes", "verify", "words"),
    [(2, True, "^UsageError: .*"), (1, False, "^ExplainedError: rank 0: unreadable image: .*")],
)
def test_a_bad_mask_ends_the_run(pool, tmp_path, processes, verify, words):
    """Before it begins, on all processes, or with --no-verify-data where the mask is read."""
    replace_mask(make_folder(tmp_path / "data"), wrong_value)
    given = config(tmp_path / "data", tmp_path / "run", verify_data=verify)
    replies = pool.run(processes, refusal, given, init=False)
    assert len(replies) == processes
    for reply in replies:
        assert re.search(words + r"scene2.png: value 17 \(3 pixels\) is none", reply), reply
    assert (tmp_path / "run").exists() != verify


META = {"classes": CLASSES, "ignore_index": VOID}


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ("{", "meta.json cannot be read"),
        ("[]", "meta.json: classes=None must be a list of names"),
        ({**META, "classes": ["a", "b", "a"]}, "meta.json: the class 'a' stands there twice"),
        ({**META, "ignore_index": 256}, "meta.json: ignore_index=256 must be a number from 0"),
        ({**META, "ignore_index": True}, "meta.json: ignore_index=True must"),
        ({**META, "palette": COLOURS[:2]}, "meta.json: palette must have one colour for each of 5"),
        ({**META, "classes": ["a"]}, "1 classes; 2 to 255 work"),
        (None, "no meta.json there names the classes"),
    ],
)
def test_meta_that_cannot_be_used(tmp_path, meta, words):
    make_folder(tmp_path)
    path = tmp_path / "meta.json"
    path.unlink()
    if meta is not None:
        path.write_text(meta if isinstance(meta, str) else json.dumps(meta))
    with pytest.raises(UsageError, match=words):
        find_masked_images(str(tmp_path), 0, 0, -1)


def test_pairs_that_are_not_whole(tmp_path):
    find = partial(find_masked_images, str(make_folder(tmp_path)), 0, 0, -1)
    find()
    with pytest.raises(UsageError, match="--ignore-index: .*meta.json says it already"):
        find_masked_images(str(tmp_path), 0, 0, 3)
    extra = tmp_path / "masks" / "val" / "other.png"
    extra.write_bytes(b"")
    with pytest.raises(UsageError, match="other.png has no image of the same name .*1 such"):
        find()
    extra.unlink()
    mask = tmp_path / "masks" / "train" / "scene1.png"
    content = mask.read_bytes()
    mask.unlink()
    with pytest.raises(UsageError, match="images/train/scene1.png has no mask of the same name"):
        find()
    mask.write_bytes(content)
    twin = mask.with_suffix(".tif")
    twin.write_bytes(content)
    with pytest.raises(UsageError, match="scene1.png and .*scene1.tif have the same name"):
        find()
    twin.unlink()
    (tmp_path / "images" / "val").rename(tmp_path / "images" / "later")
    (tmp_path / "masks" / "val").rename(tmp_path / "masks" / "later")
    with pytest.raises(UsageError, match="val or validation or test are needed, found later, tr"):
        find()


def test_image_and_mask_are_cropped_together(tmp_path):
    """Colours tell the class, so the crop of the mask can be read off the crop of the image."""
    mask = torch.from_numpy(np.kron(np.arange(12).reshape(3, 4) % 4, np.ones((30, 30), int)))
    image = (mask * 60 + 40).expand(3, -1, -1).to(torch.uint8)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        segmentation.random.seed(seed)
        size = 100  # more than the image has, at some scales
        cfg = segmentation.Config(dataset="", crop_size=size)
        pair = tv_tensors.Image(image), tv_tensors.Mask(mask.to(torch.uint8))
        pixels, labels = segmentation.scale_crop_flip(cfg, *pair)
        assert pixels.shape == (3, size, size) and labels.shape == (size, size)
        valid = labels != IGNORED
        right = pixels[0].float() - (labels * 60.0 + 40)
        assert (right[valid].abs() < 5).double().mean() > 0.85  # edges are blurred
        assert valid.any()
        seen.add(float(valid.double().mean()))
    assert len(seen) > 5 and 1.0 in seen and min(seen) < 0.9


@pytest.mark.parametrize("workers", [0, 2])
def test_crops_depend_on_seed_epoch_and_index_alone(tmp_path, workers):
    data = find_masked_images(str(make_folder(tmp_path)), 0, 0, -1)
    cfg = segmentation.Config(dataset="", crop_size=CROP)

    def read(epoch: int, **how) -> list[torch.Tensor]:
        order = [[SampleIndex(i, epoch) for i in (4, 1, 5)], [SampleIndex(0, epoch)]]
        crops = data.train.augmented(partial(segmentation.scale_crop_flip, cfg), SEED)
        options = dict(collate_fn=collate, batch_sampler=order)
        batches = torch.utils.data.DataLoader(crops, **options, **how)
        return [batch["image"] for batch in batches]

    first, again, later = read(0), read(0, num_workers=workers), read(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.set_default_dtype(torch.float64)  # as a process may have it that a worker has not
    try:
        assert all(torch.equal(a, b) for a, b in zip(first, read(0), strict=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(first[0], later[0]) and type(first[0]) is torch.Tensor
    plain = data.train[1]
    assert type(plain["image"]) is type(plain["label"]) is torch.Tensor
    assert torch.equal(plain["image"], data.train.read(1)[0])  # whole, at its own size


def test_camvid(real_data):
    """Void is 11 there and one of the classes it lists."""
    data = find_masked_images(str(real_data / "camvid"), 0, 0, -1)
    assert (len(data.train), len(data.test), len(data.classes.names)) == (367, 101, 11)
    meta = json.loads((real_data / "camvid" / "meta.json").read_text())
    counts = torch.zeros(256, dtype=torch.int64)
    for index in range(len(data.test)):
        counts += torch.bincount(data.test.read(index)[1].flatten().long(), minlength=256)
    expected = meta["pixel_counts"]["val"]
    assert counts[:11].tolist() == [expected[name] for name in data.classes.names]
    assert int(counts[IGNORED]) == expected["void"] and int(counts.sum()) == 101 * 240 * 180


# ---- Model and loss --------------------------------------------------------------------------


def test_second_head_counts_in_training_only():
    class TwoHeads(torch.nn.Module):
        def forward(self, x):
            return {"out": x, "aux": 2 * x}

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (2, 5, 6), generator=generator)
    labels[0] = IGNORED
    labels[1, 0] = IGNORED
    batch = {"image": logits, "label": labels}
    assert int(segmentation.count_valid(batch)) == 4 * 6
    log_p = [
        np.log(np.exp(x) / np.exp(x).sum(0)) for x in (logits[1].numpy(), 2 * logits[1].numpy())
    ]
    rows, columns = np.nonzero((labels[1] != IGNORED).numpy())
    main, aux = (-p[labels[1].numpy()[rows, columns], rows, columns].sum() for p in log_p)
    loss, out = segmentation.compute_loss(TwoHeads(), batch)
    assert torch.equal(out, logits) and float(loss) == pytest.approx(main, rel=1e-12)
    loss, _ = segmentation.compute_loss(TwoHeads(), batch, auxiliary_weight=0.5)
    assert float(loss) == pytest.approx(main + 0.5 * aux, rel=1e-12)
    nothing = {"image": logits, "label": torch.full_like(labels, IGNORED)}
    assert float(segmentation.compute_loss(TwoHeads(), nothing)[0]) == 0.0


@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"])
def test_models(name):
    model = segmentation.build_model(name, 4, auxiliary=True)
    outputs = model.eval()(torch.zeros(1, 3, 64, 64))
    assert set(outputs) == ({"out"} if name.startswith("lraspp") else {"out", "aux"})
    assert all(logits.shape == (1, 4, 64, 64) for logits in outputs.values())
    assert set(segmentation.build_model(name, 4, auxiliary=False)(torch.zeros(2, 3, 64, 64))) == {
        "out"
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(dataset="./nowhere"), "--dataset ./nowhere"),
        (
            dict(model="resnet18"),
            "--model resnet18 is not in torchvision's segmentation models",
        ),
        (dict(max_scale=0.0), "--max-scale 0.0 must be greater than 0"),
        (dict(num_workers=-2), "--num-workers -2 must be at least -1"),
        (dict(global_batch_size=8), "6 examples, fewer than .*8"),
        (
            dict(model="deeplabv3_mobilenet_v3_large", bn_group=1),
            "bn_group=1: BatchNorm layer 'classifier.0.convs.4.2' would see one value per channel",
        ),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(pool, trained, tmp_path, changes, words):
    given = config(trained[0], tmp_path / "run") | changes
    assert re.search(f"^UsageError: .*{words}", pool.run(1, refusal, given, init=False)[0])
    assert list(tmp_path.iterdir()) == []


def run_without_dropout(given: dict) -> dict:
    """Its numbers are the one thing that another layout changes."""
    forward, torch.nn.Dropout.forward = torch.nn.Dropout.forward, lambda self, x: x
    try:
        return run(given)
    finally:
        torch.nn.Dropout.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "fcn_resnet50"])
def test_models_with_a_second_head_train_on_two_processes(pool, trained, tmp_path, name):
    changes = dict(model=name, max_steps=2, crop_size=48)
    one, two = (
        pool.run(
            processes,
            run_without_dropout,
            config(trained[0], tmp_path / str(processes), **changes),
            init=False,
        )[0]
        for processes in (1, 2)
    )
    assert [run["config"]["world_size"] for run in (one, two)] == [1, 2]
    assert_same(one["model"], two["model"])
    assert any(key.startswith("aux_classifier.") for key in two["model"])
