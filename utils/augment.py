"""Augmentation of whole batches of uint8 images, by random numbers that belong to the samples."""

from functools import partial
from typing import Any

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from utils.order import random_integers

# Per channel, of photographs in [0, 1], as torchvision's weights expect them to be normalised.
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def random_crop_flip(
    images: torch.Tensor,
    ids: torch.Tensor,
    *,
    seed: int,
    epoch: int,
    padding: int,
    flip: bool,
    alternate: bool = False,
) -> torch.Tensor:
    """Crop at random after reflecting `padding` pixels at the borders; mirror half of the images.

    One gather for the whole batch, on its device. The numbers are hashes of (seed, epoch, id), so
    a sample looks the same in any layout of processes, with any workers, after a resume.

    Args:
        images: (B, C, H, W), any dtype; `padding` must be less than H and W.
        ids: (B,) int64 sample indices.
        alternate: mirror at random in epoch 0 only, then each image in every second epoch (Jordan
            2024, arXiv 2404.00498: both views are seen equally often).

    Returns the cropped images (B, C, H, W), channels_last in memory.
    """
    height, width = images.shape[-2:]
    draw = partial(random_integers, ids, seed=seed, epoch=epoch)
    top = draw(2 * padding + 1, stream=0)[:, None] - padding  # (B, 1)
    left = draw(2 * padding + 1, stream=1)[:, None] - padding
    columns = torch.arange(width, device=images.device).expand(len(ids), -1)  # (B, W)
    if flip:
        mirrored = draw(2, stream=2) == 1
        if alternate:
            first = random_integers(ids, 2, seed=seed, epoch=0, stream=2)
            mirrored = (first + epoch) % 2 == 1
        columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    rows = _reflect(top + torch.arange(height, device=images.device), height)  # (B, H)
    columns = _reflect(left + columns, width)
    rows += torch.arange(len(ids), device=images.device)[:, None] * height  # of all images
    index = torch.int32 if images.numel() < 2**31 else torch.int64  # half the bytes
    place = (rows * width).to(index)[:, :, None] + columns.to(index)[:, None, :]  # (B, H, W)
    # Whole pixels by one index: twice as fast on a CPU as an index for each dimension.
    pixels = images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])  # (B * H * W, C)
    cropped = pixels.index_select(0, place.flatten()).view(*place.shape, -1)
    return cropped.permute(0, 3, 1, 2)


def normalise(images: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
    """uint8 images (B, C, H, W) as channels_last floats of the default dtype.

    `mean` and `std` are per channel, of images in [0, 1].
    """
    pixels = images.permute(0, 2, 3, 1).to(torch.get_default_dtype(), copy=True).contiguous()
    # By whole rows: runs of C numbers are too short for a CPU's vector instructions.
    levels = torch.tensor([mean, std], dtype=pixels.dtype).mul(255).repeat(1, pixels.shape[2])
    shift, scale = levels.to(images.device, non_blocking=True)  # (W * C); the host does not wait
    pixels.flatten(2).sub_(shift).div_(scale)
    return pixels.permute(0, 3, 1, 2)


def centre_square(image: torch.Tensor, image_size: int, crop_pct: float) -> torch.Tensor:
    """The middle square, resized; cropped first, since a thin strip cannot be resized at will.

    Args:
        image: uint8 (3, H, W).
        crop_pct: the square's share of the shorter side.

    Returns uint8 (3, image_size, image_size).
    """
    side = max(1, round(min(image.shape[-2:]) * crop_pct))
    square = functional.center_crop(image, [side, side])
    return functional.resize(square, [image_size, image_size], antialias=True)


def whitening_filters(images: torch.Tensor, size: int, epsilon: float = 5e-4) -> torch.Tensor:
    """Filters that whiten the images' patches, and their negatives, strongest direction first.

    Applied to such images, the first half has outputs without correlation, of variance near 1
    (below `epsilon` it is damped). Computed in float64, so the same on every process.

    Args:
        images: (N, C, H, W), normalised; some thousands are enough.

    Returns (2 * C * size^2, C, size, size), in the images' dtype.
    """
    channels = images.shape[1]
    patches = images.double().unfold(2, size, 1).unfold(3, size, 1)  # (N, C, H', W', size, size)
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * size * size)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))  # ascending
    filters = (vectors / (values + epsilon).sqrt()).T.flip(0).reshape(-1, channels, size, size)
    return torch.cat([filters, -filters]).to(images.dtype)


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    """Indices outside [0, size) mirrored back at the border."""
    index = index.abs()
    return size - 1 - (size - 1 - index).abs()


class ScaleJitter(v2.ScaleJitter):
    """torchvision's, for thin images too, of which it would leave nothing."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"size": [max(1, side) for side in super().make_params(flat_inputs)["size"]]}
