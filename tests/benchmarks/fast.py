"""CIFAR-10 in 240 s of training: cifar_fast.py beside a plain ResNet-18 loop of the usual kind.

    REAL_DATA_DIR=FOLDER python tests/benchmarks/fast.py            # FOLDER/cifar10: parquet files

About 10 minutes on two cores. Counted is the time of updates, with reading, transforms and logging;
start-up and evaluation are left out on both sides. The plain loop: ResNet-18 with a 3x3 stem, SGD
0.1 with momentum, weight decay 5e-4, batch 128, torchvision's crop and flip for each sample in two
loader processes, float32, a cosine over the 240 s: it ends where its time does.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root, so utils/ imports

from utils.small_images import load_small_images

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = ["--width", "0.75", "--epochs", "7"]  # what takes 240 s on two cores


class Samples(torch.utils.data.Dataset):
    def __init__(self, split, transform):
        self.split = split
        self.transform = transform

    def __len__(self):
        return len(self.split.labels)

    def __getitem__(self, index):
        return self.transform(self.split.images[index]), self.split.labels[index]


def plain_loop(data, seconds: float) -> tuple[float, int]:
    """Test accuracy after so many seconds of training, and the images seen."""
    torch.manual_seed(0)
    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]
    augment = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    train = torch.utils.data.DataLoader(
        Samples(data.train, v2.Compose(augment + to_float)), 128, shuffle=True, num_workers=2
    )
    test = torch.utils.data.DataLoader(Samples(data.test, v2.Compose(to_float)), 500)
    model = torchvision.models.resnet18(num_classes=len(data.classes))
    model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    images_seen, start_time = 0, time.perf_counter()
    while True:
        for images, labels in train:
            progress = (time.perf_counter() - start_time) / seconds
            if progress >= 1:
                break
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * progress))
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            images_seen += len(images)
        else:
            continue
        break
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    return correct / len(data.test.labels), images_seen


def fast(dataset: str, flags: list[str], seed: int) -> dict:
    """cifar_fast.py in two processes: its last evaluation, and the seconds of its updates."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["accelerate", "launch", "-q", "--config_file", "accelerate_configs/cpu_2.yaml"]
        command += ["--mixed_precision", "bf16", "train/cifar_fast.py", "--dataset", dataset]
        command += ["--tracker", "none", "--seed", str(seed), "--output-dir", folder]
        command += ["--eval-every", "1000000", *flags]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(command, cwd=REPOSITORY, check=True, env=environment)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        batch = json.loads((Path(folder) / "config.json").read_text())["global_batch_size"]
    entries = [json.loads(line) for line in lines]
    rates = [e["perf/examples_per_second"] for e in entries if "perf/examples_per_second" in e]
    last = next(e for e in entries if "val/accuracy" in e)
    return last | {"seconds": sum(batch / rate for rate in rates), "images": batch * len(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="of the plain loop")
    parser.add_argument("--flags", default=" ".join(FLAGS), help="of cifar_fast.py")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of cifar_fast.py")
    parser.add_argument("--no-plain", action="store_true", help="without the plain loop")
    arguments = parser.parse_args()
    dataset = str(Path(os.environ["REAL_DATA_DIR"], "cifar10").absolute())
    for seed in arguments.seeds:
        found = fast(dataset, arguments.flags.split(), seed)
        print(
            f"cifar_fast.py {arguments.flags}, seed {seed}: {found['val/accuracy']:.2%}, with "
            f"flips {found['val/accuracy_flip']:.2%}, {found['images']} images in "
            f"{found['seconds']:.0f} s",
            flush=True,
        )
    if not arguments.no_plain:
        data = load_small_images(dataset, 0, on_accelerator=False)
        accuracy, images = plain_loop(data, arguments.seconds)
        print(f"plain loop: {accuracy:.2%}, {images} images in {arguments.seconds:.0f} s")


if __name__ == "__main__":
    main()
