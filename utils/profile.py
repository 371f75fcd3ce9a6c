"""--profile FIRST:LAST: what the time of these updates goes into, and what to do about it.

RUN/profile/ gets a trace and what is known of the memory, of each process, and the ten lines.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, ProfileKwargs
from torch.profiler import record_function

from utils import marks
from utils.console import say, warn
from utils.distributed import rank
from utils.errors import UsageError
from utils.files import write_json, write_text
from utils.metrics import peak_memory_bytes
from utils.start import cores_per_process, default_workers
from utils.time_shares import CATEGORIES, PHASE, Shares, shares_of
from utils.window import Window, WindowLoader

MOST_ALLOCATIONS = 100_000  # of a GPU's snapshot, a few kB each
WORTH_IT, MUCH_IDLE, SLOWER = 0.05, 0.2, 0.05  # shares: for a remedy, of a GPU, by the profiler


class Profiled:
    """The windows of a loader, some of them profiled while the caller trains on them.

    Args:
        updates: "FIRST:LAST", from 1, both included (flags.check_flags has seen it); "": none.
        directory: of the run.

    Raises UsageError when there are fewer updates than LAST.
    """

    def __init__(
        self, loader: WindowLoader, updates: str, accelerator: Accelerator, directory: Path
    ):
        self.loader, self.accelerator, self.directory = loader, accelerator, directory / "profile"
        self.first, self.last = map(int, updates.split(":")) if updates else (0, 0)
        total = loader.sampler.total_steps
        if self.last > total:
            raise UsageError(
                f"--profile {updates} goes beyond the last update of this run, which is {total}; "
                f"use --profile {max(1, total - self.last + self.first)}:{total}, or train longer"
            )

    def __iter__(self) -> Iterator[Window]:
        windows, step = iter(self.loader), self.loader.sampler.start_step
        first = max(self.first, step + 1)
        if first <= self.last:
            before: list[float] = []
            yield from _timed(islice(windows, first - step - 1), before)
            yield from self._profile(islice(windows, self.last - first + 1), first, before)
        elif self.last:
            say(f"profile   nothing is traced: update {self.last} was before this start")
        yield from windows

    def _profile(
        self, windows: Iterable[Window], first: int, before: list[float]
    ) -> Iterator[Window]:
        """Hand out `windows`, from update `first` on, under the profiler.

        A loop that ends in their middle closes this generator, and what there is is written.
        """
        on_gpu, seconds = self.accelerator.device.type == "cuda", []
        handler = ProfileKwargs(
            activities=["cpu", "cuda"] if on_gpu else ["cpu"],
            profile_memory=not on_gpu,  # a GPU's snapshot says more
            on_trace_ready=lambda profiler: self._write(profiler, first, before, seconds),
        )
        with ExitStack() as stack:
            if on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
                stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
            stack.enter_context(self.accelerator.profile(handler))
            stack.enter_context(_phases())
            yield from _timed(windows, seconds)

    def _write(self, profiler: Any, first: int, before: list[float], seconds: list[float]) -> None:
        """Write what the profiler has seen; a failure to do so is no reason to lose a run."""
        whole = first + len(seconds) - 1 == self.last
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            events, trace = profiler.events(), self.directory / f"trace_rank{rank()}.json.gz"
            _write_whole(trace, profiler.export_chrome_trace)
            self._write_memory(events)
            if rank() == 0:
                shares = shares_of(events)
                count = len(seconds) + (not whole)  # with the one in which the loop has ended
                where = "" if whole else " (where the run stopped)"
                header = f"profile   updates {first} to {first + count - 1} on rank 0{where}"
                header += f", {1e3 * shares.total / count:.0f} ms each"
                slower = median(seconds or [0]) / median(before[1:] or [1])  # the first one is slow
                if len(before) > 2 and slower > 1 + SLOWER:
                    header += f", {slower:.2f} times those before (the profiler's own work)"
                advice = remedy(shares, self.accelerator, self.loader)
                text = "\n".join([header, *table(shares), advice, f"          {self.directory}/"])
                write_text(self.directory / "summary.txt", text + "\n")
                if whole:  # else the last word is the command that continues the run
                    say(text)
        except (OSError, RuntimeError) as error:
            warn(f"profile not written to {self.directory}: {error}")

    def _write_memory(self, events: Iterable[Any]) -> None:
        """A GPU's snapshot for pytorch.org/memory_viz; of a CPU what is known of it."""
        stem = f"memory_rank{rank()}"
        if self.accelerator.device.type == "cuda":
            _write_whole(self.directory / f"{stem}.pickle", torch.cuda.memory._dump_snapshot)
            return
        allocated = Counter()
        for event in events:  # the outermost operators: what they call is theirs
            inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
            if event.name.startswith("aten::") and not inner:
                allocated[event.name] += max(0, event.cpu_memory_usage)
        memory = {
            "peak_resident_bytes": peak_memory_bytes(self.accelerator.device),  # of the whole run
            "allocated_bytes_by_operator": dict(allocated.most_common(20)),
        }
        write_json(self.directory / f"{stem}.json", memory)


def table(shares: Shares) -> list[str]:
    """A line for each category: its share of the time, and of its parts."""
    lines = []
    for category in CATEGORIES:
        parts = [f"{name} {share:.1%}" for name, share in shares.parts(category).items() if name]
        if category == "communication" and shares.hidden:
            parts.append(f"{shares.hidden / shares.total:.1%} more hidden behind other work")
        if category == "other" and shares.idle is not None:
            parts.append(f"GPU idle {shares.idle / shares.total:.1%} of all the time")
        lines.append(f"{category:<15}{shares.of(category):>6.1%}   {', '.join(parts)}".rstrip())
    return lines


def remedy(shares: Shares, accelerator: Accelerator, loader: WindowLoader) -> str:
    """What to do about the largest share that is neither forward nor backward."""
    worst = max(set(CATEGORIES) - {"forward", "backward"}, key=shares.of)
    if shares.of(worst) < WORTH_IT:
        return f"largest   forward and backward, as it should be: {_faster(shares, accelerator)}"
    part = next(iter(shares.parts(worst)))
    workers, plan = loader.loader.num_workers, loader.sampler.plan
    more = max(1, default_workers()) if workers == 0 else 2 * workers
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    halve = "--comm-hook bf16 halves its bytes; " if hook == DDPCommunicationHookType.NO else ""
    waiting = "; or all wait for a slower process: --preflight names it"
    remedies = {
        "data/reading": f"--num-workers {more} instead of {workers}, if there are cores to spare",
        "data/transform": "the script's own work on whole batches, in the training process: make "
        "it cheaper, or do it where samples are read (--num-workers)",
        "communication/forward": "where BatchNorm spans processes, --bn-group "
        f"{plan.micro_batch_size} needs none (another recipe){waiting}",
        "communication/backward": f"the gradients' sum: {halve}a larger --global-batch-size needs "
        f"it less often{waiting}",
        "communication/other": f"the loss of all{waiting}",
        "optimizer/step": "a larger --global-batch-size needs it less often",
        "logging/metrics": "--log-every 10, or --tracker none",
        "logging/evaluation": "--eval-every N with a larger N",
        "logging/saving": "--save-every N with a larger N",
    }
    otherwise = "no flag makes it smaller; a larger --micro-batch-size makes it matter less"
    return f"largest   {worst}: {remedies.get(f'{worst}/{part}', otherwise)}"


def _faster(shares: Shares, accelerator: Accelerator) -> str:
    """What makes forward and backward themselves faster."""
    compiled = "--dynamo_backend inductor before the script may make them faster"
    if accelerator.device.type == "cpu":
        cores, threads = cores_per_process(), torch.get_num_threads()
        return f"OMP_NUM_THREADS={cores} instead of {threads}" if threads < cores else compiled
    if (shares.idle or 0) > MUCH_IDLE * shares.total:
        return f"the GPU waits for Python: a larger --micro-batch-size; {compiled}"
    precision = "" if accelerator.mixed_precision != "no" else "--mixed_precision bf16 and "
    return precision + compiled


def _timed(windows: Iterable[Window], seconds: list[float]) -> Iterator[Window]:
    """Hand out `windows`, and note how long each took, with the caller's work on it."""
    start = perf_counter()
    for window in windows:
        yield window
        seconds.append(perf_counter() - start)
        start = perf_counter()


@contextmanager
def _phases() -> Iterator[None]:
    """Put a range into the profile for what lies between two marks."""
    with ExitStack() as current:

        def enter(phase: str) -> None:
            current.close()
            current.enter_context(record_function(PHASE + phase))

        enter("data")
        marks.listen(enter)
        try:
            yield
        finally:
            marks.listen(None)


def _write_whole(path: Path, write: Callable[[str], Any]) -> None:
    """A file by a function that takes its name: whole, or not there."""
    temporary = path.with_name(f".{path.name}")  # the same suffix: torch compresses by it
    try:
        write(str(temporary))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
