"""Time from launch to the end of the first update: python tests/benchmarks/startup.py (2 minutes).

train/cifar.py against the barest torch script with the same model, batch and data, each in a new
process, in turn. What cifar.py does besides: it imports Accelerate, reads both parts of the data,
fingerprints them, opens the run directory, and tries the model before it trains.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

BARE = """
import sys
import torch, torchvision
torch.set_num_threads({threads})
if "{data}" == "digits":
    from sklearn.datasets import load_digits
    pixels = torch.from_numpy(load_digits().images)[:, None].repeat(1, 3, 1, 1).float()
    labels = torch.from_numpy(load_digits().target)
else:
    from datasets import load_dataset
    rows = load_dataset("{data}", split="train").with_format("numpy")[:{batch}]
    pixels = torch.from_numpy(rows["img"]).permute(0, 3, 1, 2).float()
    labels = torch.from_numpy(rows["label"])
model = torchvision.models.resnet18(num_classes=10)
model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.Identity()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.nn.functional.cross_entropy(model(pixels[:{batch}] / 255), labels[:{batch}]).backward()
optimizer.step()
print("step 1/1", flush=True)
"""


def seconds_to_first_update(command: list[str]) -> float:
    start_time = time.perf_counter()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/1"):
                seconds = time.perf_counter() - start_time
                process.wait()
                return seconds
    raise RuntimeError(f"no update: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", help="digits, or a folder of CIFAR parquet")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(
            BARE.format(threads=os.cpu_count(), data=arguments.dataset, batch=arguments.batch)
        )
        commands = {
            "bare": [sys.executable, str(bare)],
            "cifar.py": [sys.executable, "train/cifar.py", "--dataset", arguments.dataset]
            + ["--global-batch-size", str(arguments.batch), "--max-steps", "1"]
            + ["--tracker", "none", "--output-dir"],
        }
        seconds = {name: [] for name in commands}
        for round_ in range(arguments.rounds + 1):  # the first one fills the machine's file cache
            for name, command in commands.items():
                own = [] if name == "bare" else [f"{folder}/run{round_}"]
                taken = seconds_to_first_update(command + own)
                if round_:
                    seconds[name].append(taken)
    ratios = [ours / bare for bare, ours in zip(*seconds.values(), strict=True)]
    for name, values in seconds.items():
        print(f"{name:10} {statistics.median(values):.2f} s")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}, {arguments.rounds} rounds)")


if __name__ == "__main__":
    main()
