"""What the wall time of profiled updates went into, from the events of torch's profiler.

Each moment of the main process's host belongs to one category, so the shares add up to 100%. The
host's phases are ranges that utils/profile.py has put into the profile, from the marks of
utils/marks.py. Where kernels of a GPU were recorded, a moment belongs to what the GPU computes,
whenever it was launched; only while the GPU has nothing to do, to what the host does meanwhile.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

CATEGORIES = ("data", "forward", "backward", "communication", "optimizer", "logging", "other")
PHASE = "phase: "  # begins the names of the ranges
COLLECTIVES = ("gloo:", "nccl:", "c10d::")
# Of a phase, "category/part"; phases that are not named here are "other".
LABELS = {
    "data": "data/transform",
    "forward": "forward/",
    "step": "logging/metrics",
    "evaluate": "logging/evaluation",
    "evaluate reduce": "logging/evaluation",
    "save": "logging/saving",
}


class Span(NamedTuple):
    """A stretch of time in microseconds.

    layer: "host" (a phase, disjoint), "work" (a host computes in this phase, or, with a label of
        its own, a GPU), "link" (a collective is under way).
    label: "category/part", or "".
    """

    start: float
    end: float
    layer: str
    label: str = ""


class Shares(NamedTuple):
    seconds: dict[str, float]  # of each "category/part"
    hidden: float  # seconds of collectives behind which something was computed
    idle: float | None  # seconds in which the GPU had nothing to do; None without a GPU's kernels

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def parts(self, category: str) -> dict[str, float]:
        """Shares of the whole by the parts of a category, the largest first."""
        named = {
            label.partition("/")[2]: seconds / self.total
            for label, seconds in self.seconds.items()
            if label.startswith(f"{category}/") and seconds > 0
        }
        return dict(sorted(named.items(), key=lambda item: -item[1]))

    def of(self, category: str) -> float:
        return sum(self.parts(category).values())


def shares_of(events: Iterable[Any]) -> Shares:
    """From `profile.events()` (FunctionEvent) of the main process."""
    spans, on_gpu = spans_of(events)
    return divide(spans, on_gpu)


def divide(spans: Sequence[Span], on_gpu: bool = False) -> Shares:
    """Each moment's owner, by layers.

    Where something is computed, that; else the collective that is waited for; else the phase.
    """
    active: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    hidden = idle = 0.0
    edges = [(span.start, 1, span.layer, span.label) for span in spans]
    edges += [(span.end, -1, span.layer, span.label) for span in spans]
    for (time, change, layer, label), (following, *_) in pairwise(sorted(edges)):
        active[layer][label] += change
        phase, work, link = (_one(active[name]) for name in ("host", "work", "link"))
        elapsed = (following - time) / 1e6
        if phase is None or not elapsed:  # before the first phase, or after the last
            continue
        if work is not None:
            seconds[work or phase] += elapsed
            hidden += elapsed if link is not None else 0
        elif link is not None:
            category = phase.partition("/")[0]
            # Autograd's last event is over when backward waits for the gradients' sum.
            category = "backward" if category == "optimizer" else category
            seconds[f"communication/{category}"] += elapsed
        else:
            seconds[phase] += elapsed
            idle += elapsed
    return Shares(dict(seconds), hidden, idle if on_gpu else None)


def spans_of(events: Iterable[Any]) -> tuple[list[Span], bool]:
    """The spans of a profile, and whether there were kernels of a GPU among its events."""
    host, kernels = [], []
    for event in events:
        on_host = event.device_type.name == "CPU"
        if on_host or not event.is_user_annotation:  # a GPU's copy of a range is no kernel
            (host if on_host else kernels).append(event)
    host.sort(key=lambda event: event.time_range.start)
    phases = [event for event in host if event.name.startswith(PHASE)]
    spans = _phases(host, phases)
    starts, launched = [span.start for span in spans], {}
    if kernels:
        launched = {event.id: event.time_range.start for event in host}
    for kernel in kernels:
        time = kernel.time_range
        if "nccl" in kernel.name.lower():
            spans.append(Span(time.start, time.end, "link"))
            continue
        # By the operator that launched it; where torch does not tell, by when it ran.
        at = launched.get(getattr(kernel, "linked_correlation_id", 0), time.start)
        index = max(0, bisect_right(starts, at) - 1)
        spans.append(Span(time.start, time.end, "work", spans[index].label))
    threads = {event.thread for event in phases}
    for event in host:
        time = event.time_range
        if event.name.startswith(COLLECTIVES) and not kernels:
            spans.append(Span(time.start, time.end, "link"))
        if event.name.startswith("aten::") and event.thread in threads and not kernels:
            spans.append(Span(time.start, time.end, "work"))
    return spans, bool(kernels)


def _phases(host: Sequence[Any], phases: Sequence[Any]) -> list[Span]:
    """The host's time without gaps, phases split where another event tells a part apart."""
    autograd = _Events(host, "autograd::engine::evaluate_function")
    optimizer, reading = _Events(host, "Optimizer."), _Events(host, "enumerate(DataLoader)")
    spans = []
    for phase in phases:
        name, start, end = phase.name[len(PHASE) :], phase.time_range.start, phase.time_range.end
        label = LABELS.get(name, f"other/{name}")
        cuts: list[tuple[float, str]] = []  # until when, which part
        if name == "data":
            cuts = [(reading.last(start, end), "data/reading")]
        elif name == "forward" and autograd.first(start, end) < end:
            # After autograd's last event comes the gradient's norm (and, told by the collective
            # itself, the wait for the gradients' sum).
            cuts = [
                (autograd.first(start, end), "forward/"),
                (autograd.last(start, end), "backward/"),
            ]
            label = "optimizer/gradient norm"
        elif name == "step":
            cuts = [(optimizer.last(start, end), "optimizer/step")]
        for until, part in (*cuts, (end, label)):
            spans.append(Span(start, until, "host", part))
            start = until
    return spans


class _Events:
    """Events whose name begins so, on any thread, sorted by their start."""

    def __init__(self, host: Sequence[Any], prefix: str):
        times = [event.time_range for event in host if event.name.startswith(prefix)]
        self.starts = [time.start for time in times]
        self.ends = [time.end for time in times]

    def first(self, start: float, end: float) -> float:
        """When the first one between `start` and `end` begins; `end` without any."""
        index = bisect_left(self.starts, start)
        return min(self.starts[index], end) if index < len(self.starts) else end

    def last(self, start: float, end: float) -> float:
        """When the last one between `start` and `end` is over; `start` without any."""
        inside = slice(bisect_left(self.starts, start), bisect_left(self.starts, end))
        return min(max(self.ends[inside], default=start), end)


def _one(active: Counter[str]) -> str | None:
    """A label of which there is one now; None when there is none."""
    return next((label for label, count in active.items() if count > 0), None)
