"""Augmentation of whole batches of uint8 images, by random numbers that belong to the samples."""

from functools import partial

import torch

from utils.order import random_integers

# Per channel, of photographs in [0, 1], as torchvision's weights expect them to be normalised.
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def random_crop_flip(
    images: torch.Tensor, ids: torch.Tensor, *, seed: int, epoch: int, padding: int, flip: bool
) -> torch.Tensor:
    """Crop at random after reflecting `padding` pixels at the borders; mirror half of the images.

    One gather for the whole batch, on its device. The numbers are hashes of (seed, epoch, id), so
    a sample looks the same in any layout of processes, with any workers, after a resume.

    Args:
        images: (B, C, H, W), any dtype; `padding` must be less than H and W.
        ids: (B,) int64 sample indices.

    Returns the cropped images (B, C, H, W), channels_last in memory.
    """
    height, width = images.shape[-2:]
    draw = partial(random_integers, ids, seed=seed, epoch=epoch)
    top = draw(2 * padding + 1, stream=0)[:, None] - padding  # (B, 1)
    left = draw(2 * padding + 1, stream=1)[:, None] - padding
    columns = torch.arange(width, device=images.device).expand(len(ids), -1)  # (B, W)
    if flip:
        columns = torch.where(draw(2, stream=2)[:, None] == 1, width - 1 - columns, columns)
    rows = _reflect(top + torch.arange(height, device=images.device), height)  # (B, H)
    columns = _reflect(left + columns, width)
    sample = torch.arange(len(ids), device=images.device)[:, None, None]
    cropped = images.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


def normalise(images: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
    """uint8 images (B, C, H, W) as channels_last floats of the default dtype.

    `mean` and `std` are per channel, of images in [0, 1].
    """
    images = images.to(torch.get_default_dtype(), memory_format=torch.channels_last)
    scale = images.new_tensor(std).mul(255).reshape(-1, 1, 1)
    shift = images.new_tensor(mean).mul(255).reshape(-1, 1, 1)
    return (images - shift) / scale


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    """Indices outside [0, size) mirrored back at the border."""
    index = index.abs()
    return size - 1 - (size - 1 - index).abs()
