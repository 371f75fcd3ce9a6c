"""What careless adaptations of cifar.py get wrong, as edits of its source: the list that
`--preflight` must catch. Written from the table of faults, before the checks.
"""

import importlib
import importlib.util
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from tests.scripts import NarrowResNet18, small_data

SCRIPT = Path(__file__).resolve().parents[1] / "train" / "cifar.py"
RECIPE = dict(
    global_batch_size=16, bn_group=8, epochs=3, lr=0.02, lr_reference_batch=0, tracker="none"
)
DATA = dict(num_train=5 * 16 + 9, num_test=37, size=16)
WARN = ("warn", "fail")


@dataclass(frozen=True)
class Fault:
    name: str
    check: str  # the one that must not pass
    remedy: str  # words of the cause, in what is seen or in the remedy
    edits: list[tuple[str, str]] = field(default_factory=list)
    processes: int = 2
    config: dict = field(default_factory=dict)
    last_rank: dict = field(default_factory=dict)  # flags of the last process alone
    environment: dict = field(default_factory=dict)
    setup: str = ""  # python, run in each process before the script
    results: tuple[str, ...] = ("fail",)
    data: dict = field(default_factory=dict)


def after(line: str, added: str) -> tuple[str, str]:
    """The edit that adds a line of the same indentation after `line`."""
    return line, line + "\n" + (len(line) - len(line.lstrip())) * " " + added


CONVERTED = "    bn_plan = convert_batchnorm(model, bn_group, plan.micro_batch_size)"
PREPARED = "    plain_model = accelerator.unwrap_model(model, keep_torch_compile=False)"
BUILT = "    model = torchvision_model(name, num_classes)"
OPENED = """accelerator = open_accelerator(
        find_unused_parameters=cfg.find_unused_parameters,
        comm_hook=cfg.comm_hook,
        hang_timeout=cfg.hang_timeout,
    )"""
OWN = "import accelerate\n    accelerator = accelerate.Accelerator({})"
LOGITS = '    logits = model(batch["image"])'
SCALED = "accelerator.backward(loss * window.scale)"
IDS = "(images, ids, seed"
SHARD = "ShardSampler(len(test_set), num_processes, accelerator.process_index)"
EVALUATED = "partial(evaluate, plain_model, test_loader, partial(to_input, data), device)"
EVALUATE = f"    evaluate_all = {EVALUATED}"
DATA_SECTION = "def to_input("
OWN_TENSORS = """class Tensors(Tensors):
    def __getitems__(self, ids):
        {}


def to_input("""
TWO_MICRO_STEPS = {"micro_batch_size": 4}

FAULTS = [
    # world
    Fault(
        "strangers",
        "world",
        "separate models",
        [(OPENED, OWN.format(""))],
        environment={"ACCELERATE_USE_CPU": "false"},  # a launcher without it, and no GPU
    ),
    Fault(
        "FSDP fallen back to DDP",
        "world",
        "FSDP",
        [(OPENED, OWN.format("cpu=True"))],
        environment={"ACCELERATE_USE_FSDP": "true"},
    ),
    Fault(
        "fp16 on a CPU", "world", "fp16", [(OPENED, OWN.format('cpu=True, mixed_precision="fp16"'))]
    ),
    Fault("another flag on one rank", "world", "flag", last_rank={"lr": 0.03}),
    Fault(
        "another version on one rank",
        "world",
        "version",
        setup="if os.environ['RANK'] == '1': patch('torch.__version__', '2.0.0')",
    ),
    Fault("another code on one rank", "world", "code", last_rank={"copy": "other"}),
    # data
    Fault(
        "same shard twice",
        "data",
        "rank",
        [("plan, accelerator.process_index, total_steps", "plan, 0, total_steps")],
    ),
    Fault(
        "epoch not set",
        "data",
        "epoch",
        [
            after(
                "    order = SampleOrder(len(train_set), cfg.seed)",
                "order.permute = lambda positions, epoch: SampleOrder.permute(order, positions, 0)",
            )
        ],
    ),
    Fault(
        "uneven shards",
        "data",
        "same number",
        [
            (
                "accelerator.process_index, total_steps)",
                "accelerator.process_index, total_steps - accelerator.process_index)",
            )
        ],
    ),
    Fault(
        "samples left out",
        "data",
        "complete",
        [after("    order = SampleOrder(len(train_set), cfg.seed)", "order.num_examples = 40")],
    ),
    Fault(
        "other files on one rank",
        "data",
        "content",
        [
            after(
                "    store = storage_device(data, device, cfg.num_workers)"
                "  # on the accelerator, where they fit",
                "data.train.images.bitwise_xor_(accelerator.process_index)",
            )
        ],
    ),
    Fault(
        "label 10 of 10 classes",
        "data",
        "classes",
        [
            after(
                "    test_set = Tensors(store, image=data.test.images, label=data.test.labels)",
                "data.train.labels[3] = len(data.classes)",
            )
        ],
    ),
    Fault("NaN pixels", "data", "finite", [("data.mean, data.std)", "data.mean, [0.0] * 3)")]),
    # random
    Fault(
        "numbers by position in the batch",
        "random",
        "id",
        [(IDS, "(images, torch.arange(len(ids)), seed")],
    ),
    Fault("numbers without the epoch", "random", "epoch", [("epoch=epoch", "epoch=0")]),
    Fault(
        "generator with one seed on all ranks",
        "random",
        "seed",
        [
            (IDS, "(images, torch.randint(10**9, (len(ids),)), seed"),
            ("    seed_dropout(cfg.seed, accelerator.process_index)", "    torch.manual_seed(0)"),
        ],
    ),
    Fault(
        "generator of each rank",
        "random",
        "repeat",
        [(IDS, "(images, torch.randint(10**9, (len(ids),)), seed")],
        results=("warn",),
    ),
    # model
    Fault(
        "seed differs",
        "model",
        "seed",
        [
            (
                "torch.manual_seed(cfg.seed)",
                "torch.manual_seed(cfg.seed + accelerator.process_index)",
            )
        ],
    ),
    Fault(
        "one rank loaded other weights",
        "model",
        "weights",
        [after(PREPARED, "plain_model.fc.weight.data.mul_(1 + accelerator.process_index)")],
    ),
    Fault(
        "one buffer differs",
        "model",
        "weights",
        [after(PREPARED, "plain_model.bn1.running_mean += accelerator.process_index")],
    ),
    # unused
    Fault(
        "unused head",
        "unused",
        "find-unused-parameters",
        [after(BUILT, "model.auxiliary = torch.nn.Linear(64, 4)")],
    ),
    Fault(
        "unused head, one process",
        "unused",
        "find-unused-parameters",
        [after(BUILT, "model.auxiliary = torch.nn.Linear(64, 4)")],
        processes=1,
    ),
    Fault(
        "head used on some ranks only",
        "unused",
        "find-unused-parameters",
        [
            after(BUILT, "model.auxiliary = torch.nn.Linear(num_classes, num_classes)"),
            after(
                "    model.auxiliary = torch.nn.Linear(num_classes, num_classes)",
                "import os\n    if os.environ['RANK'] == '0': "
                "model.register_forward_hook(lambda model, _, out: out + model.auxiliary(out))",
            ),
        ],
    ),
    Fault(
        "detached features",
        "unused",
        "detach",
        [after(BUILT, "model.layer2.register_forward_hook(lambda *a: a[-1].detach())")],
    ),
    # batchnorm
    Fault("group of 2", "batchnorm", "bn-group", config={"bn_group": 2}, results=("warn",)),
    Fault("group of 4", "batchnorm", "bn-group", config={"bn_group": 4}, results=("warn",)),
    Fault(
        "converted after prepare",
        "batchnorm",
        "before",
        [
            (CONVERTED, "    import copy\n" + CONVERTED.replace("model,", "copy.deepcopy(model),")),
            after(
                PREPARED,
                "bn_plan = convert_batchnorm(plain_model, bn_group, plan.micro_batch_size)",
            ),
        ],
    ),
    Fault(
        "a layer added after the conversion",
        "batchnorm",
        "convert_batchnorm",
        [
            after(
                CONVERTED,
                "model.fc = torch.nn.Sequential(torch.nn.BatchNorm1d(64), model.fc)",
            )
        ],
    ),
    Fault(
        "a class of its own",
        "batchnorm",
        "class",
        [
            after(
                CONVERTED,
                "model.avgpool = torch.nn.Sequential(model.avgpool, OwnNorm(64))",
            ),
            (
                "def build_model(",
                """class OwnNorm(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return x - self.running_mean.view(1, -1, 1, 1).detach().clone()


def build_model(""",
            ),
        ],
        results=("warn",),
    ),
    # gradient
    Fault("mean instead of sum", "gradient", "SUM", [('reduction="sum"', 'reduction="mean"')]),
    Fault(
        "mean instead of sum, one process",
        "gradient",
        "SUM",
        [('reduction="sum"', 'reduction="mean"')],
        processes=1,
    ),
    Fault(
        "1% wrong weight on one rank",
        "gradient",
        "window.scale",
        [(SCALED, f"{SCALED[:-1]} * (1 + 0.01 * accelerator.process_index))")],
    ),
    Fault(
        "uneven valid counts",
        "gradient",
        "window.scale",
        [(SCALED, "accelerator.backward(loss / count_valid(batch))")],
    ),
    Fault(
        "uneven valid counts over micro-steps",
        "gradient",
        "window.scale",
        [(SCALED, "accelerator.backward(loss / count_valid(batch))")],
        processes=1,
        config={"micro_batch_size": 8},
    ),
    Fault(
        "BatchNorm not synchronised",
        "gradient",
        "BatchNorm",
        [after(CONVERTED, "for _, layer in bn_plan.layers: layer.bn_ranks = 1")],
        config={"bn_group": 16},
    ),
    Fault(
        "ranks see the same samples",
        "gradient",
        "same samples",
        [
            (
                DATA_SECTION,
                OWN_TENSORS.format(
                    "read = list(range(len(ids))) if len(ids) > 1 else ids\n"
                    '        return super().__getitems__(read) | {"id": torch.tensor(ids)}'
                ),
            )
        ],
    ),
    Fault(
        "accumulation divided twice",
        "gradient",
        "accumulation",
        [(SCALED, f"{SCALED[:-1]} / plan.accumulation)")],
        config=TWO_MICRO_STEPS,
    ),
    Fault(
        "accumulation not set",
        "gradient",
        "gradient_accumulation_steps",
        [("    accelerator.gradient_accumulation_steps = plan.accumulation\n", "")],
        config=TWO_MICRO_STEPS,
    ),
    Fault(
        "no_sync",
        "gradient",
        "no_sync",
        [("accelerator.accumulate(model):", "accelerator.accumulate(model), model.no_sync():")],
    ),
    Fault(
        "a stray detach",
        "gradient",
        "detach",
        [after(LOGITS, "logits = logits / 2 + (logits / 2).detach()")],
        results=("warn",),
    ),
    Fault(
        "gradients of the last micro-step alone",
        "gradient",
        "zero_grad",
        [(SCALED, f"optimizer.optimizer.zero_grad()\n                {SCALED}")],
        processes=1,
        config={"micro_batch_size": 8},
    ),
    # schedule
    Fault(
        "ends early",
        "schedule",
        "early",
        [
            (
                "progress = (step - warmup_steps) / (total_steps - warmup_steps)",
                "progress = min(1, 2 * (step - warmup_steps) / (total_steps - warmup_steps))",
            )
        ],
    ),
    Fault(
        "runs N times too fast",
        "schedule",
        "rises",
        [
            (
                "progress = (step - warmup_steps) / (total_steps - warmup_steps)",
                "progress = num_processes * (step - warmup_steps) / (total_steps - warmup_steps)",
            )
        ],
    ),
    Fault(
        "ends late",
        "schedule",
        "last update",
        [
            (
                "progress = (step - warmup_steps) / (total_steps - warmup_steps)",
                "progress = (step - warmup_steps) / (num_processes * total_steps)",
            )
        ],
    ),
    Fault(
        "another rate than the schedule's is used",
        "schedule",
        "optimizer",
        [("learning_rate(window.step)", "learning_rate(num_processes * window.step)")],
        config={"max_steps": 10},
    ),
    Fault(
        "no warm-up with a large batch",
        "schedule",
        "warmup-fraction",
        config={"warmup_fraction": 0.0, "lr_reference_batch": 2},
        results=("warn",),
    ),
    Fault(
        "scaled beyond the usual ceiling",
        "schedule",
        "ceiling",
        config={"global_batch_size": 64, "lr_reference_batch": 1, "warmup_fraction": 0.5},
        results=("warn",),
    ),
    Fault("rate 0", "schedule", "0", [("lr_used = cfg.lr *", "lr_used = 0.0 * cfg.lr *")]),
    # evaluation
    Fault(
        "padding counted",
        "evaluation",
        "padding",
        [
            (
                SHARD,
                "torch.utils.data.DistributedSampler(\n"
                "        test_set, num_processes, accelerator.process_index, shuffle=False)",
            )
        ],
    ),
    Fault("drop_last", "evaluation", "drop_last", [("drop_last=False", "drop_last=True")]),
    Fault(
        "sums not reduced",
        "evaluation",
        "reduce",
        [
            (
                "    total = sums.reduce()",
                "    total = {k: v.item() for k, v in {**sums.floats, **sums.counts}.items()}",
            )
        ],
    ),
    Fault(
        "on rank 0 only",
        "evaluation",
        "all processes",
        [
            after(EVALUATE, "if accelerator.process_index: evaluate_all = dict"),
            (
                "    total = sums.reduce()",
                "    total = {k: v.item() for k, v in {**sums.floats, **sums.counts}.items()}",
            ),
        ],
    ),
    Fault("in training mode", "evaluation", "eval()", [("    model.eval()", "    model.train()")]),
    Fault("gradients on", "evaluation", "no_grad", [("@torch.no_grad()\n", "")]),
    Fault(
        "training mode not restored",
        "evaluation",
        "train()",
        [("    model.train()\n    total", "    total")],
    ),
]  # fmt: skip

FAULTS += [
    # speed
    Fault(
        "losses kept from step to step",
        "speed",
        "graph",
        [
            ("def count_valid(", "KEPT = []\n\n\ndef count_valid("),
            (f"{SCALED}  #", f"KEPT.append(loss); {SCALED}  #"),
        ],
    ),
    Fault(
        "threads times ranks over the cores",
        "speed",
        "OMP_NUM_THREADS",
        [after(PREPARED, "torch.set_num_threads(3 * torch.get_num_threads() + 1)")],
        setup="patch('os.sched_getaffinity', lambda pid: {0, 1})",
        results=("warn",),
    ),
    Fault(
        "data-bound",
        "speed",
        "num-workers",
        [
            (
                DATA_SECTION,
                OWN_TENSORS.format(
                    "import time\n\n        time.sleep(0.05 * len(ids))\n"
                    "        return super().__getitems__(ids)"
                ),
            )
        ],
        config={"epochs": 1},
        setup="patch('utils.preflight.speed.WAIT_SHARE', 0.1)",  # whatever else the machine does
        results=("warn",),
    ),
    # checkpoint
    Fault(
        "not shared",
        "checkpoint",
        "share",
        setup="import pathlib\nif os.environ['RANK'] == '1': "
        "patch('utils.preflight.disk.Path', lambda path: pathlib.Path(path + '-else'))",
    ),
    Fault(
        "cannot be written",
        "checkpoint",
        "output-dir",
        setup="patch('utils.preflight.disk.FOLDER', 300 * 'x')",
    ),
    Fault(
        "too small",
        "checkpoint",
        "space",
        setup="import types\nfull = lambda path: types.SimpleNamespace(free=1000)\n"
        "patch('utils.preflight.disk.shutil.disk_usage', full)",
    ),
    Fault(
        "comes back changed",
        "checkpoint",
        "saved",
        setup="from utils import checkpoint\nold = checkpoint.load_checkpoint\n"
        "def load(found, *, model):\n    old(found, model=model)\n    model.fc.bias.data += 1\n"
        "patch('utils.checkpoint.load_checkpoint', load)",
    ),
    # tracker
    Fault(
        "key missing",
        "tracker",
        "wandb login",
        config={"tracker": "wandb"},
        environment={"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "/dev/null"},
        results=("warn",),
    ),
]

HANGS = [
    Fault(
        "evaluation with collectives on rank 0 only",
        "evaluation",
        "all processes",
        [after(EVALUATE, "if accelerator.process_index: evaluate_all = dict")],
        setup="from utils.preflight import runner as r; r.HANG_SECONDS, r.GRACE_SECONDS = 15, 3",
    ),
]


def load(path: Path):
    spec = importlib.util.spec_from_file_location("edited_cifar", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["edited_cifar"] = script
    spec.loader.exec_module(script)
    return script


def run_preflight(fault: Fault, directory: str, dtype=torch.float32, narrow: bool = True) -> dict:
    """The edited script's `--preflight` in this process: its exit, and on rank 0 the report."""
    rank = int(os.environ["RANK"])
    source = SCRIPT.read_text()
    for old, new in fault.edits:
        assert source.count(old) >= 1, f"not in cifar.py: {old}"
        source = source.replace(old, new)
    own = fault.last_rank if rank == int(os.environ["WORLD_SIZE"]) - 1 else {}
    if own.get("copy"):
        source += "\nEXTRA = 1\n"
    path = Path(directory) / f"script_{rank}" / "train" / "cifar.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    os.environ.update(fault.environment)
    torch.set_default_dtype(dtype)
    flags = {**RECIPE, **fault.config, **{k: v for k, v in own.items() if k != "copy"}}
    saved_path, stack = list(sys.path), ExitStack()
    try:
        stack.enter_context(mock.patch("utils.preflight.speed.MOST_UPDATES", 5))
        exec(fault.setup, {"os": os, "patch": lambda *a: stack.enter_context(mock.patch(*a))})
        if flags.get("num_workers"):  # a worker imports the data set's module by its name
            script = importlib.import_module("train.cifar")
        else:
            script = load(path)
        saved = script.torchvision_model, script.load_small_images
        if narrow:
            script.torchvision_model = lambda name, num_classes: NarrowResNet18(num_classes)
        data = small_data(**{**DATA, **fault.data})
        script.load_small_images = lambda *args, **kwargs: data
        run = Path(directory) / "run"
        config = script.Config(**{"preflight": True, **flags, "output_dir": str(run)})
        try:
            code, error = script.main(config), ""
        except Exception as failure:
            code, error = None, f"{type(failure).__name__}: {failure}"
        script.torchvision_model, script.load_small_images = saved
    finally:
        sys.path[:] = saved_path
        stack.close()
    report = run / "preflight.json"
    found = json.loads(report.read_text()) if rank == 0 and report.exists() else None
    return {"code": code, "error": error, "report": found}
