"""Errors that a user caused and can mend, and the exit codes of a script's processes."""

import os
import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

FINISHED, ERROR, WRONG_USAGE, PREEMPTED = 0, 1, 2, 75
ends_the_process = False  # whether the process ends with `main`, which exit_with has called
PRINT_SECONDS = 10.0  # for the first process to come to the same usage error and print it


class UsageError(ValueError):
    """A flag, file or launch that cannot work: the message names it, its value and the fix.

    Raised by every process of a machine alike (from the same flags, or through
    `utils.distributed.on_main_process`), so only the first one prints it.
    """


class ExplainedError(RuntimeError):
    """A failure whose message says what to do: printed as one line, without a traceback.

    quiet: not printed here, because another process has the same one and prints it.
    """

    quiet = False


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def exit_with(main: Callable[[], int]) -> None:
    """Call `main` and leave the process with its exit code.

    UsageError becomes one line and exit code 2, ExplainedError one line and 1; any other
    exception keeps its traceback (and exit code 1). All go to the launcher's summary.
    """
    global ends_the_process
    ends_the_process = True

    @record  # writes the error into the file that the launcher reads
    def recorded() -> int:
        try:
            return main()
        except (UsageError, ExplainedError) as error:
            raise error.with_traceback(None) from None  # the message says it all

    try:
        code = recorded()
        if dist.is_initialized():
            dist.destroy_process_group()
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:  # the launcher ends all with the first that ends: not before the line is out
            time.sleep(PRINT_SECONDS)
        code = WRONG_USAGE
    except ExplainedError as error:
        if not error.quiet:
            rank = os.environ.get("RANK", "0")
            print(f"error: [rank {rank}] {error}", file=sys.stderr, flush=True)
        code = ERROR
    sys.exit(code)
