"""The peers of cifar.py that throughput.py measures, each as its documentation has it.

Every function trains without end, in each process of its group, and calls pace() before an update.
"""

import logging
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from tests.benchmarks import common
from utils.small_images import ImageData


class PerSample(Dataset):
    """As torchvision.datasets.CIFAR10: an image at a time, through PIL and `transform`."""

    def __init__(self, data: ImageData, transform):
        self.images = data.train.images.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = data.train.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def per_sample_loader(data: ImageData, workers: int, size: int = 1) -> DataLoader:
    steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(data.mean, data.std)]
    dataset = PerSample(data, transforms.Compose(steps))
    return DataLoader(
        dataset,
        batch_size=common.MICRO_BATCH,
        sampler=DistributedSampler(dataset) if size > 1 else None,
        shuffle=None if size > 1 else True,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )


def build(channels_last: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = common.build_model()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(
        model.parameters(),
        lr=common.LEARNING_RATE,
        momentum=common.MOMENTUM,
        weight_decay=common.WEIGHT_DECAY,
        nesterov=True,
    )


def loss_of(model, images: torch.Tensor, labels: torch.Tensor, channels_last: bool):
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    return F.cross_entropy(model(images), labels, label_smoothing=common.LABEL_SMOOTHING)


def plain_loop(
    pace: common.Pace, loader: Iterable, precision: str, compiled: bool, channels_last: bool
):
    """Torch's own loop, of one process or DDP."""
    model, optimizer = build(channels_last)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    if compiled:
        model = torch.compile(model)
    while True:
        for images, labels in loader:
            pace()
            optimizer.zero_grad()
            with common.autocast(precision):
                loss = loss_of(model, images, labels, channels_last)
            loss.backward()
            optimizer.step()


def bare(pace, data, precision, compiled, workers: int, threads: int, channels_last: bool):
    torch.set_num_threads(threads)
    size = common.world()[1]
    if size > 1:
        dist.init_process_group("gloo")
    loader = per_sample_loader(data, workers, size)
    plain_loop(pace, loader, precision, compiled, channels_last)


def timm(pace, data, precision, compiled, workers: int, threads: int, channels_last: bool):
    """timm's create_loader: uint8 images are collated, and normalised a batch at a time."""
    from timm.data import create_loader
    from timm.data.transforms import ToNumpy

    torch.set_num_threads(threads)
    distributed = common.world()[1] > 1
    if distributed:
        dist.init_process_group("gloo")
    dataset = PerSample(data, None)
    loader = create_loader(
        dataset,
        input_size=(3, 32, 32),
        batch_size=common.MICRO_BATCH,
        is_training=True,
        mean=data.mean,
        std=data.std,
        num_workers=workers,
        persistent_workers=workers > 0,
        distributed=distributed,
        pin_memory=False,
        device=torch.device("cpu"),
    )
    # The same augmentation as the others', instead of the random resizing that it has set.
    crop, flip = transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()
    dataset.transform = transforms.Compose([crop, flip, ToNumpy()])
    plain_loop(pace, loader, precision, compiled, channels_last)


def accelerate(pace, data, precision, compiled, workers: int, threads: int, channels_last: bool):
    """Plain Accelerate; precision and compilation come from its launcher's variables."""
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(threads)
    model, optimizer = build(channels_last)
    loader = per_sample_loader(data, workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for images, labels in loader:
            pace()
            with accelerator.accumulate(model):
                loss = loss_of(model, images, labels, channels_last)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def lightning(pace, data, precision, compiled, workers: int, threads: int, channels_last: bool):
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    model, optimizer = build(channels_last)
    run = torch.compile(model) if compiled else model

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = run

        def training_step(self, batch, batch_index):
            return loss_of(self.model, *batch, channels_last)

        def configure_optimizers(self):
            return optimizer

    class Pacing(L.Callback):
        def on_train_batch_start(self, *args):
            pace()

    size = common.world()[1]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        max_epochs=-1,
        callbacks=[Pacing()],
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Module(), per_sample_loader(data, workers))


PEERS = {"bare": bare, "accelerate": accelerate, "lightning": lightning, "timm": timm}
