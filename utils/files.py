"""Files that are either whole or not there, and files from elsewhere that are never executed."""

import json
import os
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


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace `path` at once, for what readers may look at meanwhile; a power cut may lose it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
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


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """A file of torch.save, onto the CPU, without executing anything in it.

    ValueError when it is broken or would need that; with `mmap` the tensors' content stays on the
    disk until it is used.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # of any kind; torch's own text tells how to execute it all the same
        raise ValueError(
            f"{path.name} is broken, or holds more than tensors and plain values (which is refused:"
            " loading it could run code)"
        ) from error
