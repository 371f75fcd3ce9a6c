"""Pictures of an evaluation: the right samples, the same on any layout, drawn without harm."""

import io

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from utils.masks import IGNORED
from utils.pictures import MOST_ERRORS, ErrorFinder, draw_errors, draw_masks

CLASSES = ["cat", "dog", "a bird with a very long name"]
CPU = torch.device("cpu")


def predictions(count: int = 240) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, 3), many of them equal, and labels, some of them missing."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 4, (count, 3), generator=generator).double()
    labels = torch.randint(0, 3, (count,), generator=generator)
    labels[torch.rand(count, generator=generator) < 0.1] = -100
    return logits, labels


def find(rank: int, processes: int, batch_size: int):
    logits, labels = predictions()
    ids = torch.arange(rank, len(labels), processes)
    finder = ErrorFinder(3, CPU)
    for own in ids.split(batch_size):
        finder.add({"label": labels[own], "id": own}, logits[own])
    errors = finder.reduce()
    assert errors.matrix is not None
    return errors.samples, errors.matrix.tolist()


def find_in_pool(batch_size: int):
    import torch.distributed as dist

    return find(dist.get_rank(), dist.get_world_size(), batch_size)


def test_the_most_confident_errors_against_plain_python():
    logits, labels = predictions()
    share, said = logits.softmax(1).max(1)
    wrong = [i for i in range(len(labels)) if labels[i] not in (-100, said[i])]
    best = sorted(wrong, key=lambda i: (-round(float(share[i]), 4), i))[:MOST_ERRORS]
    assert len(wrong) > MOST_ERRORS and len({round(float(share[i]), 4) for i in best}) < 5  # ties
    samples, matrix = find(0, 1, 240)
    assert [sample[:3] for sample in samples] == [(i, labels[i], said[i]) for i in best]
    assert [sample[3] for sample in samples] == pytest.approx(share[best].tolist(), abs=1e-4)
    pairs = [(int(a), int(b)) for a, b in zip(labels, said, strict=True) if a >= 0]
    assert matrix == [[pairs.count((a, b)) for b in range(3)] for a in range(3)]


@pytest.mark.parametrize("processes, batch_size", [(1, 7), (2, 16), (4, 5)])
def test_every_layout_finds_the_same(pool, processes, batch_size):
    results = pool.run(processes, find_in_pool, batch_size)
    assert results == [find(0, 1, 240)] * processes


def test_few_errors_none_and_values_that_are_not_numbers():
    finder = ErrorFinder(3, CPU)
    assert finder.reduce().samples == []
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [torch.nan, 0, 0]])
    finder.add({"label": torch.tensor([0, 2, 1]), "id": torch.tensor([5, 6, 7])}, logits)
    found = finder.reduce().samples
    assert [sample[0] for sample in found] == [6, 7] and found[1][3] == 0.0
    assert ErrorFinder(101, CPU).reduce().matrix is None  # too many classes to look at


class NoHostRead(TorchDispatchMode):
    """Fails where a tensor's value would be read by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a host read"
        assert func is not torch.ops.aten.bincount.default, "it reads the largest value"
        return func(*args, **(kwargs or {}))


def test_collecting_reads_nothing_on_the_host():
    logits, labels = predictions()
    finder = ErrorFinder(3, CPU)
    with NoHostRead():
        finder.add({"label": labels, "id": torch.arange(len(labels))}, logits)
        with pytest.raises(AssertionError, match="host read"):
            logits.sum().item()


def image_of(png: bytes) -> np.ndarray:
    with PIL.Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def test_errors_are_drawn(tmp_path):
    finder = ErrorFinder(3, CPU)
    logits = torch.tensor([[9.0, 0, 0], [0, 5.0, 0]])
    finder.add({"label": torch.tensor([2, 0]), "id": torch.tensor([1, 0])}, logits)
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    images[:, 1] = 200  # green
    picture = draw_errors(finder.reduce(), CLASSES, images)
    pixels = image_of(picture.png)
    assert pixels.shape == (640, 1200, 3)
    green = (pixels[..., 1] > 150) & (pixels[..., 0] < 50) & (pixels[..., 2] < 50)
    assert abs(green.sum() - 2 * 96 * 96) < 1000  # two of them, enlarged
    assert picture.columns == ["id", "true", "predicted", "probability"]
    assert [row[:3] for row in picture.rows] == [[1, CLASSES[2], "cat"], [0, "cat", "dog"]]
    samples = [{"image": image} for image in images]  # a data set of photographs
    assert draw_errors(finder.reduce(), CLASSES, samples).png == picture.png
    image_of(draw_errors(ErrorFinder(500, CPU).reduce(), ["x"] * 500, images).png)


class MaskModel(torch.nn.Module):
    """Says class 1 where the image is bright."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert not self.training
        bright = (images.float().mean(1) > 100).float()
        return torch.stack([1 - bright, bright], dim=1)


def test_masks_are_drawn_of_the_same_few_samples():
    asked = []

    class Samples(list):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    samples = Samples()
    for index in range(20):
        image = torch.zeros(3, 20 + index, 30, dtype=torch.uint8)
        image[:, :, :15] = 200
        label = torch.zeros(20 + index, 30, dtype=torch.uint8)
        label[:, :15] = 1
        label[:10] = IGNORED
        label[10, 20:] = 1  # wrong
        samples.append({"image": image, "label": label, "id": torch.tensor(index)})
    model = MaskModel().train()
    picture = draw_masks(model, lambda batch: model(batch["image"]), samples, ["road", "sky"])
    assert model.training and asked == [0, 2, 5, 7, 10, 12, 15, 17]
    assert [row[0] for row in picture.rows] == asked
    assert picture.rows[0][1] == pytest.approx(1 - 10 / 300)
    assert image_of(picture.png).shape[1] == 4 * 260
    with pytest.raises(ZeroDivisionError):
        draw_masks(model, lambda batch: 1 / 0, samples, ["road", "sky"])
    assert model.training
