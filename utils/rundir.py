"""Where a run lives, and the command that continues it."""

import os
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path

import psutil

from utils.distributed import on_main_process
from utils.errors import UsageError

LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun"}
LAUNCHER_MODULES = {
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "torch.distributed.launch",
    "torch.distributed.run",
}


def choose_directory(output_dir: str, resume: str, script: str) -> Path:
    """The run directory, the same on all processes; nothing is created yet.

    `output_dir`, or the run that `--resume PATH` belongs to, or runs/<script>-<date-time>.
    Raises UsageError when it cannot be written, or holds a run that this command would end.
    """

    def choose() -> Path:
        if not output_dir and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise UsageError(
                "--max_restarts needs an explicit --output-dir: a restarted job would otherwise "
                "start again in a new directory"
            )
        source = None if resume in ("auto", "never") else _run_of(Path(resume).expanduser())
        if output_dir:
            directory = Path(output_dir).expanduser()
        else:
            directory = source or _new_directory(script)
        ancestor = directory
        while not ancestor.exists() and ancestor != ancestor.parent:
            ancestor = ancestor.parent
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
            raise UsageError(f"--output-dir {directory}: {ancestor} is not a writable folder")
        continues_itself = source is not None and source.resolve() == directory.resolve()
        has_run = any((directory / "checkpoints").glob("step_*"))
        if has_run and resume != "auto" and not continues_itself and not is_restart():
            raise UsageError(
                f"--output-dir {directory} already holds a run; choose another directory, or leave "
                f"--resume {resume} out to continue it"
            )
        return directory

    return on_main_process(choose)


def is_restart() -> bool:
    """Whether a launcher's --max_restarts has started this process again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def continue_command(directory: Path, drop: tuple[str, ...] = ("stop-after", "resume")) -> str:
    """The command that continues this run: as it was typed, launcher included, with --output-dir.

    Without the flags named in `drop`, which belonged to this start only.
    """
    line = _typed_command()
    start = len(line) - len(sys.argv[1:])
    kept, flags = line[:start], iter(line[start:])
    dropped = {f"--{name}" for name in (*drop, "output-dir")}
    for word in flags:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") not in dropped:
            kept.append(word)
        elif not equals:
            next(flags, None)  # its value
    return shlex.join([*kept, "--output-dir", str(directory)])


def _run_of(path: Path) -> Path | None:
    """The run that a path of `--resume` belongs to; None for a checkpoint outside of any."""
    path = path.absolute()
    if path.name == "checkpoints":
        return path.parent
    if path.parent.name == "checkpoints":
        return path.parent.parent
    return None if (path / "manifest.json").exists() else path


def _new_directory(script: str) -> Path:
    stem = f"{script}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    directory, twin = Path("runs") / stem, 1
    while directory.exists():
        twin += 1
        directory = Path("runs") / f"{stem}-{twin}"
    return directory


def launcher_pid() -> int:
    """Process id of the launcher that is the parent of this process, 0 when it is none."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or any(map(_is_launcher, _ancestors[:1]))
    return os.getppid() if launched else 0


def _command_lines_of_ancestors() -> list[list[str]]:
    """Of the parent and its parent; [] for one that cannot be read."""
    lines = []
    for ancestor in psutil.Process().parents()[:2]:
        try:
            lines.append(ancestor.cmdline())
        except psutil.Error:
            lines.append([])
    return lines


def _is_launcher(line: list[str]) -> bool:
    return any(Path(word).name in LAUNCHERS or word in LAUNCHER_MODULES for word in line)


def _typed_command() -> list[str]:
    """The command line of the launcher that started this process, or of the process itself."""
    flags = sys.argv[1:]

    def head_of(line: list[str]) -> list[str]:
        """A command line up to this script's flags; [] when they are not its last words."""
        start = len(line) - len(flags)
        return line[:start] if start > 0 and line[start:] == flags else []

    # A launcher that a signal has ended is remembered.
    for ancestor in (*_command_lines_of_ancestors(), *_ancestors):
        head = head_of(ancestor)
        if _is_launcher(head):
            # The kernel shows a launcher that is a Python script as `python /path/launcher`.
            if "python" in Path(head[0]).name.lower() and Path(head[1]).name in LAUNCHERS:
                head = head[1:]
            return [_short(head[0]), *head[1:], *flags]
    head = head_of(psutil.Process().cmdline())
    if sys.argv[0] not in head:  # called from another program, a test say
        head = [sys.executable, sys.argv[0]]
    return [_short(head[0]), *head[1:], *flags]


def _short(program: str) -> str:
    """A program's bare name where that finds the same one."""
    name = Path(program).name
    found = shutil.which(name)
    return name if found and os.path.abspath(found) == os.path.abspath(program) else program


_ancestors = _command_lines_of_ancestors()  # of this process when it started
