"""Enter every check with all processes, and survive one that raises, hangs or takes another way."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.console import warn
from utils.distributed import gather_objects, rank, world_size
from utils.errors import UsageError
from utils.preflight.job import FAIL, NOT_CHECKED, NOT_RUN, PASS, WARN, Finding, Job, Steps

HANG_SECONDS = 300.0  # for one check; the slowest reads the whole test set, twice
GRACE_SECONDS = 5.0  # for rank 0 to write the report, before the others end the job
SEVERITY = (PASS, NOT_CHECKED, WARN, NOT_RUN, FAIL)


@dataclass(frozen=True)
class Check:
    name: str
    function: Callable[[Job], Steps]
    needs: tuple[str, ...] = ()  # checks that must not fail: their fault would show here again


@dataclass
class Entry:
    """A line of the report."""

    check: str
    finding: Finding
    seconds: float = 0.0


class Meeting:
    """Where the processes of a preflight meet: a group of its own, so that a collective of the
    script that not all of them entered cannot be mistaken for one of ours."""

    def __init__(self):
        self.group: Any = None
        self.store: Any = None
        if world_size() > 1:
            # All ranks make it; objects need no GPU, and gloo is part of every build.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
            store = dist.distributed_c10d._get_default_store()
            self.store = dist.distributed_c10d.PrefixStore("preflight", store)

    def gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def mark(self, check: str, place: str) -> None:
        """Leave word where this process is, for the report of a hang."""
        if self.store is not None:
            self.store.set(f"{check}/{rank()}", place)

    def places(self, check: str) -> dict[str, list[int]]:
        """Place -> ranks."""
        found: dict[str, list[int]] = {}
        for other in range(world_size()):
            key = f"{check}/{other}"
            if self.store is not None and self.store.check([key]):
                found.setdefault(self.store.get(key).decode(), []).append(other)
            else:
                found.setdefault("not there yet", []).append(other)
        return found

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = self.store = None


def run_checks(
    job: Job, checks: Sequence[Check], report: Callable[[list[Entry]], None] | None = None
) -> list[Entry]:
    """Enter each check with all processes; the entries are the same on all of them.

    With `report` (to call on rank 0 if a check hangs) the checks are watched: after HANG_SECONDS
    the job is ended with the report of what was seen.
    """
    meeting = Meeting() if report else None
    gather = meeting.gather if meeting else gather_objects
    entries: list[Entry] = []
    for index, check in enumerate(checks):
        failed = [e.check for e in entries if e.check in check.needs and e.finding.result == FAIL]
        if failed:
            seen = f"after a fail of {', '.join(failed)}, which would show here again"
            entries.append(Entry(check.name, Finding(NOT_CHECKED, seen)))
            continue
        start = time.perf_counter()
        rest = [Entry(later.name, Finding(NOT_RUN, "")) for later in checks[index + 1 :]]
        with _watched(check, meeting, entries, rest, report):
            finding = _enter(check, job, gather, meeting)
        entries.append(Entry(check.name, finding, time.perf_counter() - start))
    if meeting:
        meeting.close()
    return entries


def _enter(check: Check, job: Job, gather, meeting: Meeting | None) -> Finding:
    steps = check.function(job)
    everyone: Any = None
    while True:
        said: tuple[str, Any]
        if meeting:
            meeting.mark(check.name, "at work")
        try:
            said = "goes on", steps.send(everyone)
        except StopIteration as end:
            said = "ends", end.value
        except Exception as error:
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            said = "raised", kind + _first_lines(error)
        if meeting:
            meeting.mark(check.name, "waiting for the others")
        answers = gather(said)
        kinds = {kind for kind, _ in answers}
        if kinds == {"goes on"}:
            everyone = [value for _, value in answers]
            continue
        steps.close()
        if "raised" in kinds:
            texts: dict[str, list[int]] = {}
            for process, (kind, value) in enumerate(answers):
                if kind == "raised":
                    texts.setdefault(value, []).append(process)
            remedy = "mend the error that is named here, then run it again"
            if len(texts) == 1:  # UsageErrors tell the fix after a semicolon
                text, ranks = next(iter(texts.items()))
                text, _, fix = text.partition("; ")
                return Finding(FAIL, f"{name_ranks(ranks)}: {text}", fix or remedy)
            seen = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in texts.items())
            return Finding(FAIL, seen, remedy)
        findings = [value for kind, value in answers if kind == "ends"]
        if len(findings) < len(answers) and not any(f.result == FAIL for f in findings):
            return Finding(
                FAIL,
                "the processes took different ways through this check",
                "nothing in the script may depend on the rank but the samples",
            )
        return max(findings, key=lambda finding: SEVERITY.index(finding.result))


def name_ranks(ranks: Sequence[int]) -> str:
    """rank 1; ranks 0, 2; all ranks."""
    if len(ranks) == world_size():
        return "all ranks" if len(ranks) > 1 else "rank 0"
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]


@contextmanager
def _watched(check, meeting: Meeting | None, entries, rest, report) -> Iterator[None]:
    """End the job, with the report, if this check does not come to its end."""
    if not meeting:
        yield
        return

    def end_job() -> None:
        if rank() > 0:
            time.sleep(GRACE_SECONDS)
            os._exit(1)
        try:
            places = meeting.places(check.name)
            seen = f"no end after {HANG_SECONDS:.0f} s; " + "; ".join(
                f"{name_ranks(ranks)} {place}" for place, ranks in places.items()
            )
            remedy = (
                "a collective that not all processes enter: call whatever reduces or synchronises "
                "on all processes, never inside `if is_main_process` or in loops of unequal length"
            )
            finding = Finding(FAIL, seen, remedy)
            report([*entries, Entry(check.name, finding, HANG_SECONDS), *rest])
        except Exception as error:
            warn(f"the preflight hangs in {check.name}, and its report failed: {error}")
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(HANG_SECONDS, end_job)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
