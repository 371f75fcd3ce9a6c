"""Labelled sets of small images, whole in memory: CIFAR-10 and -100, digits, a folder of parquet.

Used by cifar.py and cifar_fast.py alike; a script for data of its own replaces it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from utils import hub
from utils.console import say
from utils.errors import UsageError
from utils.loaders import SteadyLoader

SHARE_OF_MEMORY = 0.1  # of an accelerator's, that a data set may take
HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}


@dataclass(frozen=True)
class Split:
    images: torch.Tensor  # uint8 (N, 3, H, W)
    labels: torch.Tensor  # int64 (N,), 0..classes-1


@dataclass(frozen=True)
class ImageData:
    name: str
    train: Split
    test: Split
    classes: list[str]
    flip: bool  # whether a mirrored image keeps its label
    mean: list[float]  # per channel, of the training images in [0, 1]
    std: list[float]
    fingerprint: str  # of the content, equal on all machines


class Tensors(Dataset):
    """A split in memory, by name (N, ...), read a whole micro-batch at a time.

    Args:
        device: where the tensors live: see storage_device.
    """

    def __init__(self, device: torch.device | str = "cpu", **tensors: torch.Tensor):
        # Images pixel by pixel, (N, H, W, C): as crops, and convolutions on a CPU, want them.
        self.tensors = {
            name: (values.movedim(1, -1) if values.dim() == 4 else values).contiguous().to(device)
            for name, values in tensors.items()
        }
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitems__(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """These samples, where the tensors are, and their "id" (int64, on the CPU).

        Images are (B, C, H, W), channels_last in memory.
        """
        index = torch.tensor(ids, dtype=torch.int64)
        place = index.to(self.device, non_blocking=True)
        # Copies whole samples; an index in brackets takes them apart.
        batch = {name: values.index_select(0, place) for name, values in self.tensors.items()}
        images = {
            name: values.movedim(-1, 1) for name, values in batch.items() if values.dim() == 4
        }
        return batch | images | {"id": index}


class TensorLoader(SteadyLoader):
    """A loader of Tensors' micro-batches.

    Args:
        dataset: Tensors, or another one that reads whole micro-batches and has a `device`.
        num_workers: loader processes; 0 is fast, reading from memory takes less than sending.
        pin: copies to the accelerator shall not block; of no use for what lives there.
    """

    def __init__(self, dataset: Any, *, batch_sampler: Sampler, num_workers: int, pin: bool):
        super().__init__(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin and dataset.device.type == "cpu",
        )


def storage_device(data: ImageData, device: torch.device, num_workers: int) -> torch.device:
    """Where to keep the images: on the accelerator, where they take at most a tenth of its memory.

    Then only indices travel. Loader processes read from main memory.
    """
    if device.type != "cuda" or num_workers:
        return torch.device("cpu")
    size = sum(split.images.nbytes + split.labels.nbytes for split in (data.train, data.test))
    room = SHARE_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory
    return device if size <= room else torch.device("cpu")


def load_small_images(name: str, subset: int, *, on_accelerator: bool) -> ImageData:
    """Read a data set; for the main process, which shares it (utils.distributed.on_main_process).

    Args:
        name: auto, cifar10, cifar100, digits, a hub name, or a folder. auto is cifar10; out of
            reach, it is the embedded digits on a machine without accelerator, said loudly.
        subset: only the first N examples of each split; 0 = all.

    Raises UsageError when the data cannot be had, telling how to put it there by hand.
    """
    if name == "digits":
        return _digits(subset)
    hub_name = {"auto": HUB_NAMES["cifar10"], **HUB_NAMES}.get(name, name)
    try:
        splits = hub.open_dataset(hub_name)
    except hub.HubUnreachable as error:
        hint = hub.cache_hint(hub_name)
        if name != "auto" or on_accelerator:
            raise UsageError(f"--dataset {name}: {error}. {hint}") from error
        say(f"WARNING   CIFAR-10 is out of reach ({error})")
        say("WARNING   training on the embedded 8x8 digits instead: these are not CIFAR-10 figures")
        say(f"WARNING   {hint}")
        return _digits(subset)
    test_part = "test" if "test" in splits else "validation"
    for part in ("train", test_part):
        if part not in splits:
            raise UsageError(f"--dataset {name}: no split {part!r}, it has {sorted(splits)}")
    parts, classes = [], None
    for part in ("train", test_part):
        rows = splits[part]
        rows = rows.select(range(min(subset or len(rows), len(rows))))
        label_column = hub.find_column(rows, ("label", "fine_label", "labels"), "labels")
        labels, names = hub.decode_labels(rows, label_column)
        classes = classes or names or [str(label) for label in range(int(labels.max()) + 1)]
        if len(labels) and int(labels.max()) >= len(classes):
            raise UsageError(
                f"--dataset {name}: label {int(labels.max())} of {part} example "
                f"{int(labels.argmax())} is outside the {len(classes)} classes"
            )
        image_column = hub.find_column(rows, ("img", "image", "images"), "images")
        images = hub.decode_images(rows, image_column)
        # As Tensors keeps them, which then copies nothing.
        parts.append(Split(images.contiguous(memory_format=torch.channels_last), labels))
    if parts[0].images.shape[1:] != parts[1].images.shape[1:]:
        raise UsageError(
            f"--dataset {name}: {tuple(parts[0].images.shape[1:])} images in train, "
            f"{tuple(parts[1].images.shape[1:])} in {test_part}"
        )
    return _describe(name, parts[0], parts[1], classes or [], flip=True)


def _digits(subset: int) -> ImageData:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; every fifth one is for the test."""
    from sklearn.datasets import load_digits  # heavy: imported where used

    bunch: Any = load_digits()
    pixels = torch.from_numpy(bunch.images * (255 / 16)).round().to(torch.uint8)  # (N, 8, 8)
    images = pixels[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(bunch.target).long()
    is_test = torch.arange(len(labels)) % 5 == 0
    train, test = (
        Split(images[chosen][: subset or None], labels[chosen][: subset or None])
        for chosen in (~is_test, is_test)
    )
    return _describe("digits", train, test, [str(digit) for digit in range(10)], flip=False)


def _describe(name: str, train: Split, test: Split, classes: list[str], *, flip: bool) -> ImageData:
    pixels = train.images.transpose(0, 1).flatten(1)  # (3, N*H*W), uint8
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in pixels]).double()
    shares = counts / counts.sum(dim=1, keepdim=True)  # exact moments, without a float copy
    mean = shares @ levels
    std = (shares @ levels.square() - mean.square()).clamp(min=1e-6).sqrt()
    content = hashlib.sha256()
    for split in (train, test):
        content.update(split.images.contiguous().numpy().data)
        content.update(split.labels.contiguous().numpy().data)
    return ImageData(
        name, train, test, classes, flip, mean.tolist(), std.tolist(), content.hexdigest()[:16]
    )


def _as_it_is(batch: Any) -> Any:
    """The collate function of a data set that hands out whole batches."""
    return batch
