"""Augmentation of whole batches, against plain numpy, one image at a time."""

import numpy as np
import pytest
import torch

from utils.augment import normalise, random_crop_flip, whitening_filters
from utils.order import random_integers

SIZE, PADDING = 9, 2


def batch(count=40):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    return images, torch.arange(1000, 1000 + count)


def mirrored(ids, epoch, seed=5, alternate=False):
    first = random_integers(ids, 2, seed=seed, epoch=0 if alternate else epoch, stream=2)
    return ((first + epoch) % 2 == 1) if alternate else first == 1


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("epoch", [0, 3])
def test_crop_and_flip(epoch, flip, alternate):
    images, ids = batch()
    how = dict(seed=5, epoch=epoch)
    cropped = random_crop_flip(images, ids, **how, padding=PADDING, flip=flip, alternate=alternate)
    assert cropped.shape == images.shape and cropped.dtype == torch.uint8
    assert cropped.is_contiguous(memory_format=torch.channels_last)
    tops, lefts = (random_integers(ids, 2 * PADDING + 1, **how, stream=stream) for stream in (0, 1))
    assert len(set(tops.tolist())) == len(set(lefts.tolist())) == 2 * PADDING + 1
    flips = mirrored(ids, epoch, alternate=alternate) & flip
    for i, image in enumerate(images.numpy()):
        padded = np.pad(image, [(0, 0), (PADDING, PADDING), (PADDING, PADDING)], mode="reflect")
        top, left = int(tops[i]), int(lefts[i])
        expected = padded[:, top : top + SIZE, left : left + SIZE]
        expected = expected[:, :, ::-1] if flips[i] else expected
        assert np.array_equal(cropped[i].numpy(), expected), i


def test_alternating_flips_show_both_views_equally_often():
    images, ids = batch()

    def views(epoch: int, alternate: bool) -> torch.Tensor:
        how = dict(seed=5, epoch=epoch, padding=0, flip=True)
        return random_crop_flip(images, ids, **how, alternate=alternate)

    for epoch in range(4):
        assert torch.equal(views(epoch, True).flip(3), views(epoch + 1, True))
    first = views(0, True)
    is_mirrored = (first != images).flatten(1).any(dim=1)
    assert 0 < is_mirrored.sum() < len(ids)  # not the same view of all in an epoch
    assert torch.equal(first, views(0, False))
    assert not torch.equal(views(0, False).flip(3), views(1, False))


def test_normalised_images_have_mean_0_and_deviation_1():
    images, _ = batch()
    mean = (images.double() / 255).mean(dim=(0, 2, 3))
    std = (images.double() / 255).std(dim=(0, 2, 3), correction=0)
    out = normalise(images, mean.tolist(), std.tolist()).double()
    torch.testing.assert_close(out.mean(dim=(0, 2, 3)), torch.zeros(3).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.var(dim=(0, 2, 3), correction=0), torch.ones(3).double())


def test_whitened_patches_are_not_correlated():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(50, 3, 16, 16, generator=generator, dtype=torch.float64)
    images[:, 1] = 0.9 * images[:, 0] + 0.1 * images[:, 1]
    images[:, :, 1:] += 0.5 * images[:, :, :-1]
    filters = whitening_filters(images, size=2, epsilon=0.0)
    assert filters.shape == (24, 3, 2, 2) and torch.equal(filters[:12], -filters[12:])
    out = torch.nn.functional.conv2d(images, filters[:12])  # (50, 12, 15, 15)
    out = out.transpose(0, 1).flatten(1)
    torch.testing.assert_close(out @ out.T / out.shape[1], torch.eye(12, dtype=torch.float64))
    norms = filters[:12].flatten(1).norm(dim=1)  # 1 / deviation: strongest direction first
    assert torch.equal(norms, norms.sort().values)
    constant = whitening_filters(torch.zeros(2, 3, 8, 8), size=2)
    assert constant.isfinite().all() and constant.dtype == torch.float32
