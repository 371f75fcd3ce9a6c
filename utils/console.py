"""Console output of the main process: a progress bar on a terminal, plain lines elsewhere.

All but the bars is in RUN/log.txt too, with the time of day.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from utils.distributed import rank, world_size

LINE_SECONDS = 5.0  # between plain lines of a training loop
BAR_SECONDS = 0.1  # between two states of a bar
MOST_HELD = 1000  # lines, before there is a file for them
CELL = 10  # characters of a table's column, at least

_held: list[str] = []
_log: TextIO | None = None


def say(text: str) -> None:
    """Print one line, from the main process only, above a running progress bar."""
    if rank() == 0:
        tqdm.write(text)
        sys.stdout.flush()
        note(text)


def warn(text: str) -> None:
    """Print one line on stderr, from any process, with its rank where there are several."""
    origin = f"[rank {rank()}] " if world_size() > 1 else ""
    tqdm.write(f"warning: {origin}{text}", file=sys.stderr)
    sys.stderr.flush()
    note(f"warning: {text}")


def note(text: str) -> None:
    """Lines for the main process's log file only; held until there is one."""
    if rank() != 0:
        return
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = "".join(f"{now}  {line}\n" for line in text.splitlines())
    if _log is not None:
        with suppress(OSError, ValueError):  # a full disk, or closed: it is on the console too
            _log.write(lines)
            _log.flush()
    elif len(_held) < MOST_HELD:
        _held.append(lines)


def open_log(path: Path | None) -> None:
    """Add what is said from now on to `path`, after what is held; None: hold it, for another."""
    global _log
    if _log is not None:
        with suppress(OSError):
            _log.close()
    _log = None
    if path is None:
        _held.clear()
    elif rank() == 0:
        try:
            _log = path.open("a", encoding="utf-8")
            _log.write("".join(_held))
            _log.flush()
        except OSError as error:
            tqdm.write(f"warning: {path} cannot be written: {error}", file=sys.stderr)
        _held.clear()


class Progress:
    """Progress over the updates of a run, or over other units that are called `name`.

    A bar on a terminal, else a line every few seconds.
    """

    def __init__(self, total: int, done: int, *, name: str = "step", unit: str = "update"):
        self.total = total
        self.name = name
        self._last_line = self._last_state = float("-inf")
        on_terminal = sys.stderr.isatty()
        self._bar = None
        if rank() == 0 and on_terminal:
            self._bar = tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)

    def update(self, step: int, text: str) -> None:
        """Show update (or unit) `step` with a few figures."""
        now = time.monotonic()
        if self._bar is not None and (now - self._last_state >= BAR_SECONDS or step == self.total):
            self._last_state = now
            self._bar.n = step
            self._bar.set_postfix_str(text)
        if now - self._last_line >= LINE_SECONDS or step == self.total:
            self._last_line = now
            (say if self._bar is None else note)(f"{self.name} {step}/{self.total}  {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Table:
    """A line for each evaluation, in columns, with a heading above the first one."""

    def __init__(self) -> None:
        self._has_heading = False

    def row(self, step: int, epoch: float, **figures: float | int) -> None:
        """Say them; floats with four decimals."""
        cells = {"evaluation after": f"update {step}", "epoch": f"{epoch:.1f}"}
        cells |= {k: f"{v:.4f}" if isinstance(v, float) else str(v) for k, v in figures.items()}
        widths = [max(CELL, len(name)) for name in cells]
        lines = [cells.values()] if self._has_heading else [cells, cells.values()]
        self._has_heading = True
        for line in lines:
            say("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
