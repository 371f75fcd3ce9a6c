"""Files that are either whole or not there, and files from elsewhere that are never executed."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch


def fsync_directory(path: Path) -> None:
    """Make a rename or a new entry in `path` survive a power cut (not needed on Windows)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`: readers see the old file or the new one, even after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The file's value, or None when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of one a line; without a line that a kill has torn. [] without file."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def read_tensors(path: Path, *, check_only: bool = False) -> Any:
    """A file of torch.save, onto the CPU; ValueError with the reason when it cannot be read.

    Nothing in the file is executed: what is not a tensor or a plain value is refused. With
    `check_only` the tensors' content stays on the disk.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=check_only)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error):  # torch's own text tells how to execute it all the same
            raise ValueError("it holds more than tensors: loading it could run code") from error
        raise ValueError("it is broken, or no file of torch.save") from error
    except Exception as error:  # a broken file may fail in any of torch's layers
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(lines[0]) from error
