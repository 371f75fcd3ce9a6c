"""Files of tokens: written once, whole or not there, and read as mapped memory.

    train.bin, val.bin          tokens, little-endian uint16, or uint32 for a large vocabulary
    train.mask, val.mask        uint8, 1 for tokens not to be predicted; where there are prompts
    tokens.json                 written last: what they are, and the vocabulary

A split is boundary, document, boundary, document ...: every token of the text is predicted once,
the first one of a document from the boundary in front of it.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from utils.errors import ExplainedError, UsageError, first_line
from utils.files import fsync_directory, read_json, write_json
from utils.text_sets import Piece, Texts
from utils.vocabulary import Vocabulary, from_dict

FORMAT = 1  # raise it when the same text would give other files
MANIFEST = "tokens.json"
ENCODED_BYTES = 1 << 22  # about so many are encoded in one call


@dataclass(frozen=True)
class TokenSplit:
    """The token file of a split."""

    path: Path
    num_tokens: int
    num_bytes: int  # of the text to be predicted, in UTF-8
    itemsize: int  # bytes of a token
    has_mask: bool

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens, and whether each is left out of what is predicted; not loaded yet."""
        if not self.path.is_file():
            raise ExplainedError(
                f"{self.path} is not there, or another machine than the main process's cannot see "
                "it: give an --output-dir on a file system that all machines share"
            )
        mask = self.path.with_suffix(".mask")
        return (
            np.memmap(self.path, f"<u{self.itemsize}", "r", shape=(self.num_tokens,)),
            np.memmap(mask, np.uint8, "r", shape=(self.num_tokens,)) if self.has_mask else None,
        )

    def first(self, num_predicted: int, vocabulary: Vocabulary) -> "TokenSplit":
        """A split of the first so many tokens that are predicted."""
        if num_predicted + 1 >= self.num_tokens:
            return self
        tokens, mask = self.read()
        predicted = tokens[1 : num_predicted + 1]
        if mask is not None:
            predicted = predicted[mask[1 : num_predicted + 1] == 0]
        size = vocabulary.count_bytes(predicted)
        return replace(self, num_tokens=num_predicted + 1, num_bytes=size)


@dataclass(frozen=True)
class TokenData:
    """A data set of tokens."""

    name: str
    train: TokenSplit
    val: TokenSplit
    vocabulary: Vocabulary
    fingerprint: str  # of tokens and vocabulary, equal on all machines

    def describe(self) -> str:
        """One line for the console."""
        sizes = f"{self.train.num_tokens - 1:,} tokens train, {self.val.num_tokens - 1:,} val"
        kind = self.vocabulary.as_dict()["kind"]
        return f"{self.name}: {sizes}; vocabulary of {self.vocabulary.size:,} ({kind})"


def open_tokens(folder: Path, name: str, source: str | None = None) -> TokenData | None:
    """The token files of a folder; None where they are not whole, or of another `source`."""
    manifest = read_json(folder / MANIFEST)
    try:
        if manifest["format"] != FORMAT or source not in (None, manifest["source"]):
            return None
        splits = []
        for part in ("train", "val"):
            split = TokenSplit(folder.absolute() / f"{part}.bin", **manifest["splits"][part])
            sizes = {split.path: split.num_tokens * split.itemsize}
            sizes |= {split.path.with_suffix(".mask"): split.num_tokens} if split.has_mask else {}
            if any(file.stat().st_size != size for file, size in sizes.items()):
                return None
            splits.append(split)
        train, val = splits
        vocabulary = from_dict(manifest["vocabulary"])
        return TokenData(name, train, val, vocabulary, manifest["fingerprint"])
    except (KeyError, TypeError, OSError):
        return None


def write_tokens(texts: Texts, vocabulary: Vocabulary, folder: Path, source: str) -> None:
    """Make the files under temporary names, then rename them; the manifest comes last.

    Args:
        source: what open_tokens compares.

    UsageError for text that cannot be read, ExplainedError when the files cannot be written.
    """
    content = hashlib.sha256(vocabulary.fingerprint.encode())
    temporary: dict[Path, Path] = {}
    splits = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part, pieces in (("train", texts.train()), ("val", texts.val())):
            paths = [folder / f"{part}.bin"]
            paths += [folder / f"{part}.mask"] if texts.has_prompts else []
            temporary |= {path: path.with_name(f".{path.name}.tmp") for path in paths}
            with ExitStack() as stack:
                files = [stack.enter_context(temporary[path].open("wb")) for path in paths]
                num_tokens, num_bytes = 0, 0
                for tokens, mask, size in _encode(pieces, vocabulary):
                    for file, values in zip(files, (tokens, mask), strict=False):
                        file.write(values.data)
                        content.update(values.data)
                    num_tokens, num_bytes = num_tokens + len(tokens), num_bytes + size
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            if num_tokens < 2 or not num_bytes:
                raise UsageError(f"--dataset {texts.name}: no text for the split {part}")
            itemsize = np.dtype(vocabulary.dtype).itemsize
            split = TokenSplit(paths[0], num_tokens, num_bytes, itemsize, texts.has_prompts)
            splits[part] = {k: v for k, v in asdict(split).items() if k != "path"}
        (folder / MANIFEST).unlink(missing_ok=True)  # of other files than the ones renamed now
        for path, written in temporary.items():
            os.replace(written, path)
        fsync_directory(folder)
        manifest = {
            "format": FORMAT,
            "source": source,
            "fingerprint": content.hexdigest()[:16],
            "splits": splits,
            "vocabulary": vocabulary.as_dict(),
        }
        write_json(folder / MANIFEST, manifest)
    except OSError as error:
        raise ExplainedError(
            f"the tokens of {texts.name} could not be written to {folder}: {error}"
        ) from error
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)


def _encode(
    pieces: Iterator[Piece], vocabulary: Vocabulary
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Tokens with boundaries, their mask, and the bytes of the text that counts, in parts."""
    waiting: list[Piece] = []

    def encoded() -> tuple[np.ndarray, np.ndarray, int]:
        tokens, mask, size = [], [], 0
        for piece, own in zip(waiting, _tokens_of(waiting, vocabulary), strict=True):
            if piece.begins:
                tokens.append(np.array([vocabulary.boundary]))
                mask.append(np.zeros(1, np.uint8))
            tokens.append(own)
            mask.append(np.full(len(own), not piece.counts, np.uint8))
            size += len(piece.text) if piece.counts else 0
        kind = np.dtype(vocabulary.dtype).newbyteorder("<")
        return np.concatenate(tokens).astype(kind), np.concatenate(mask), size

    num_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        num_bytes += len(piece.text)
        if num_bytes >= ENCODED_BYTES:
            yield encoded()
            waiting.clear()
            num_bytes = 0
    if waiting:
        yield encoded()


def _tokens_of(pieces: list[Piece], vocabulary: Vocabulary) -> list[np.ndarray]:
    try:
        return vocabulary.encode([piece.text for piece in pieces])
    except ValueError:
        for piece in pieces:  # which of them it is
            try:
                vocabulary.encode([piece.text])
            except ValueError as error:
                raise unreadable(piece, error) from error
        raise


def unreadable(piece: Piece, error: ValueError) -> UsageError:
    """The error of a piece that the vocabulary cannot encode."""
    return UsageError(
        f"{piece.where} cannot be read as text: {first_line(error)}; save it as UTF-8, or use "
        "--tokenizer bytes"
    )
