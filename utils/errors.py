"""Errors that a user caused and can mend, and the exit codes of a script's processes."""

import os
import sys
from collections.abc import Callable

FINISHED, ERROR, WRONG_USAGE, PREEMPTED = 0, 1, 2, 75


class UsageError(ValueError):
    """A flag, file or launch that cannot work: the message names it, its value and the fix.

    Raised by every process of the job alike (from the same flags, or through
    `utils.distributed.on_main_process`), so only rank 0 prints it.
    """


def run(main: Callable[[], int]) -> None:
    """Call `main` and leave the process with its exit code; print a usage error as one line."""
    try:
        code = main()
    except UsageError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = WRONG_USAGE
    sys.exit(code)
