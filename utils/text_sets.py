"""Sets of documents: a text file, a folder of them, or what `datasets` reads, piece by piece.

A file is a document, and so is a row of a data set. In a folder with `train` (a file train.txt, or
a folder), `val` beside it is the validation split; else it is the last tenth of the text: of the
bytes of all files in their order, or of the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from utils import hub
from utils.errors import UsageError
from utils.image_sets import natural_key

if TYPE_CHECKING:
    import datasets

VAL_SHARE = 0.1  # of a text without a validation split
TRAIN, EVALUATION = "train", ("val", "valid", "validation", "test")  # the first found of those
TEXT_COLUMNS = ("text", "content", "document", "sentence")
PROMPT, COMPLETION = "prompt", "completion"  # columns; together they are the text of a row
TABLES = {".parquet", ".arrow", ".json", ".jsonl", ".csv"}  # a folder with one is for `datasets`
PIECE_BYTES = 1 << 22  # read at once, and then to the end of the line
ROWS = 1000  # read at once
Span = tuple[Path, int, int]  # a file, from byte to byte


class Piece(NamedTuple):
    """Some text of a document, which is cut at the ends of lines only."""

    text: bytes  # UTF-8, unless nobody has checked it
    where: str  # for an error message
    begins: bool  # whether a document begins with it
    counts: bool = True  # whether it is to be predicted; a prompt is not


@dataclass(frozen=True)
class Texts:
    """A data set of documents.

    Attributes:
        source: changes when the text does.
        train, val: give the pieces anew at each call.
        has_prompts: whether some pieces do not count.
    """

    name: str
    source: str
    train: Callable[[], Iterator[Piece]]
    val: Callable[[], Iterator[Piece]]
    has_prompts: bool = False


def find_texts(dataset: str) -> Texts:
    """The documents of a data set; for the main process (utils.distributed.on_main_process).

    Args:
        dataset: a text file, a folder of text files, or a folder or hub name that `datasets`
            reads, with a column of text, or columns prompt and completion.

    UsageError when it cannot be had, with what to do.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        if path.suffix in TABLES:
            raise UsageError(f"--dataset {dataset} is a table, not text: give the folder it is in")
        return _from_files(dataset, [path])
    if path.is_dir() and not any(file.suffix in TABLES for file in path.rglob("*")):
        return _from_files(dataset, _files(path), path)
    return _from_dataset(dataset)


# ---- Files -----------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """A file, or all in a folder in natural order (1, 2, 10); hidden ones left out."""
    if path.is_file():
        return [path]
    found = (file for file in path.rglob("*") if file.is_file())
    visible = (f for f in found if not any(p.startswith(".") for p in f.relative_to(path).parts))
    return sorted(visible, key=lambda file: natural_key(file.as_posix()))


def _from_files(dataset: str, files: list[Path], folder: Path | None = None) -> Texts:
    entries = {}
    for entry in sorted(folder.iterdir()) if folder else ():
        entries.setdefault(entry.stem if entry.is_file() else entry.name, entry)
    val_part = next((name for name in EVALUATION if name in entries), None)
    if TRAIN in entries and val_part:
        parts = [_files(entries[TRAIN]), _files(entries[val_part])]
        train, val = ([(f, 0, f.stat().st_size) for f in part] for part in parts)
    else:
        train, val = _cut_off_end(_files(entries[TRAIN]) if TRAIN in entries else files)
    source = hashlib.sha256()
    for name, spans in (("train", train), ("val", val)):
        if not any(stop > start for _, start, stop in spans):
            raise UsageError(f"--dataset {dataset}: no text for the split {name}")
        for file, start, stop in spans:
            changed = file.stat().st_mtime_ns
            source.update(f"{name} {file.name} {start} {stop} {changed}\n".encode())
    return Texts(dataset, source.hexdigest(), partial(_read, train), partial(_read, val))


def _cut_off_end(files: list[Path]) -> tuple[list[Span], list[Span]]:
    """The files' text, and its last tenth apart, cut between two characters."""
    sizes = [file.stat().st_size for file in files]
    left = int(sum(sizes) * (1 - VAL_SHARE))
    train, val = [], []
    for file, size in zip(files, sizes, strict=True):
        cut = min(left, size)
        left -= cut
        if 0 < cut < size:
            with file.open("rb") as opened:
                opened.seek(cut)
                following = opened.read(4)  # a character of UTF-8 has at most 3 more bytes
            cut += next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)
        train += [(file, 0, cut)] if cut else []
        val += [(file, cut, size)] if cut < size else []
    return train, val


def _read(spans: list[Span]) -> Iterator[Piece]:
    for path, start, stop in spans:
        with path.open("rb") as file:
            file.seek(start)
            while (at := file.tell()) < stop:
                text = file.read(min(PIECE_BYTES, stop - at))
                text += file.readline(stop - file.tell())
                yield Piece(text, str(path), begins=at == start)


# ---- What `datasets` reads -------------------------------------------------------------------


def _from_dataset(dataset: str) -> Texts:
    try:
        splits = hub.open_dataset(dataset)
    except hub.HubUnreachable as error:
        raise UsageError(f"--dataset {dataset}: {error}. {hub.cache_hint(dataset)}") from error
    if TRAIN not in splits:
        raise UsageError(f"--dataset {dataset}: no split {TRAIN!r}, it has {sorted(splits)}")
    train = splits[TRAIN]
    val_part = next((name for name in EVALUATION if name in splits), None)
    cut = round(len(train) * (1 - VAL_SHARE))
    val = splits[val_part] if val_part else train.select(range(cut, len(train)))
    train = train if val_part else train.select(range(cut))
    has_prompts = {PROMPT, COMPLETION} <= set(train.column_names)
    for name, rows in (("train", train), ("val", val)):
        if not len(rows):
            raise UsageError(f"--dataset {dataset}: no rows for the split {name}")
    columns = [(PROMPT, False), (COMPLETION, True)]
    if not has_prompts:
        columns = [(hub.find_column(train, TEXT_COLUMNS, "text"), True)]
    source = " ".join(f"{len(rows)} {rows._fingerprint}" for rows in (train, val))
    pieces = (partial(_rows, rows, columns) for rows in (train, val))
    return Texts(dataset, source, *pieces, has_prompts=has_prompts)


def _rows(rows: datasets.Dataset, columns: list[tuple[str, bool]]) -> Iterator[Piece]:
    """The pieces of all rows; `columns` are names, and whether their text counts."""
    number = 0
    chosen = rows.select_columns([name for name, _ in columns]).with_format(None)
    for batch in chosen.iter(ROWS):
        for values in zip(*(batch[name] for name, _ in columns), strict=True):  # type: ignore
            for index, (text, (name, counts)) in enumerate(zip(values, columns, strict=True)):
                where = f"--dataset: split {rows.split}, row {number}, column {name}"
                if not isinstance(text, str):
                    raise UsageError(f"{where}: {text!r:.80} is not text")
                yield Piece(text.encode(errors="replace"), where, index == 0, counts)
            number += 1
