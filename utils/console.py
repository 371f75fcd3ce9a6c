"""Console output of the main process: a progress bar on a terminal, plain lines elsewhere."""

import sys
import time

from tqdm import tqdm

from utils.distributed import rank, world_size

LINE_SECONDS = 5.0  # between plain lines of a training loop


def say(text: str) -> None:
    """Print one line, from the main process only, above a running progress bar."""
    if rank() == 0:
        tqdm.write(text)
        sys.stdout.flush()


def warn(text: str) -> None:
    """Print one line on stderr, from any process, with its rank where there are several."""
    origin = f"[rank {rank()}] " if world_size() > 1 else ""
    tqdm.write(f"warning: {origin}{text}", file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Progress over the updates of a run, or over other units that are called `name`.

    A bar on a terminal, else a line every few seconds.
    """

    def __init__(self, total: int, done: int, *, name: str = "step", unit: str = "update"):
        self.total = total
        self.name = name
        self._last = float("-inf")
        on_terminal = sys.stderr.isatty()
        self._bar = None
        if rank() == 0 and on_terminal:
            self._bar = tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)

    def update(self, step: int, text: str) -> None:
        """Show update (or unit) `step` with a few figures."""
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(text)
        elif time.monotonic() - self._last >= LINE_SECONDS or step == self.total:
            self._last = time.monotonic()
            say(f"{self.name} {step}/{self.total}  {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
