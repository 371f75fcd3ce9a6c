"""What a script hands over to be checked, and what a check answers."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from utils.batchnorm import BatchNormPlan
from utils.window import Batch, Totals, Window, WindowLoader

PASS, WARN, FAIL = "pass", "warn", "fail"
NOT_CHECKED, NOT_RUN = "not checked", "not run"


class Finding(NamedTuple):
    """The answer of a check: a result, what was seen, what to do."""

    result: str
    seen: str
    remedy: str = ""


# A check is a generator: `everyone = yield mine` gathers a value from all processes, and it
# returns a Finding. So one that raises on one rank, at any point, does not leave others waiting.
Steps = Generator[Any, list[Any], Finding]


@dataclass
class Job:
    """A script's own objects.

    Args:
        model: as `accelerator.prepare` returned it.
        optimizer: as `accelerator.prepare` returned it.
        directory: the run directory; the report goes there.
        flags: as given, compared between the processes.
        built: `fingerprint(model)` before `prepare`, which makes rank 0's weights everybody's.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: Any
    bn_plan: BatchNormPlan
    directory: Path
    flags: Mapping[str, Any]
    built: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.plain_model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.device: torch.device = self.accelerator.device
        self.rates_used: dict[int, list[float]] = {}  # step -> the optimizer's, seen in `update`

    def set_data(
        self,
        train_loader: WindowLoader,
        test_loader: DataLoader,
        *,
        num_classes: int = 0,
        label: str = "label",
        ignore_index: int = -100,
    ) -> None:
        """The two loaders.

        Args:
            test_loader: of this process's share, unpadded.
            num_classes: labels are 0 to num_classes - 1; 0: not class labels.
            label: the batch's key that holds them; entries of `ignore_index` do not count.
        """
        self.train_loader, self.test_loader = train_loader, test_loader
        self.num_classes, self.label, self.ignore_index = num_classes, label, ignore_index
        self.sampler = train_loader.sampler
        self.plan = self.sampler.plan
        self.total_steps = self.sampler.total_steps
        self.count_valid = train_loader.count_valid

    def set_functions(
        self,
        update: Callable[[Window], Totals],
        compute_loss: Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, Any]],
        learning_rate: Callable[[int], float],
        evaluate: Callable[[], Mapping[str, float]],
        *,
        count_key: str = "val/num_examples",
        final_rate: float | None = 0.0,
    ) -> None:
        """The script's functions.

        Args:
            compute_loss: the very one that `update` calls, with its label smoothing say.
            evaluate: metrics of the test set, the same on all processes.
            count_key: its key of the number of labelled elements.
            final_rate: what the learning rate ends at; None: not said.
        """
        self.update, self.compute_loss, self.learning_rate = update, compute_loss, learning_rate
        self.evaluate, self.count_key, self.final_rate = evaluate, count_key, final_rate

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole model."""
        return self.accelerator.distributed_type.value in (
            "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"
        )  # fmt: skip

    @property
    def find_unused_parameters(self) -> bool:
        return bool(getattr(self.accelerator.ddp_handler, "find_unused_parameters", False))

    @property
    def comm_hook(self) -> str:
        hook = getattr(self.accelerator.ddp_handler, "comm_hook", None)
        name = getattr(hook, "value", "no").replace("power_sgd", "powersgd")
        return name if self.plan.num_processes > 1 else "no"


def read_samples(loader: DataLoader, ids: list[int]) -> Batch:
    """These samples as the loader would hand them out, read in this process."""
    data: Any = loader.dataset
    many = getattr(data, "__getitems__", None)
    collate: Any = loader.collate_fn
    return collate(many(ids) if many else [data[i] for i in ids])
