"""Text as numbers and back: by bytes, by characters, or by a file of the package `tokenizers`.

Every vocabulary has one number of its own for the boundary in front of a document.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError, first_line

# The boundary of a tokenizer's file: the first of these that it knows, else one number more.
BOUNDARIES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Vocabulary(ABC):
    """How many numbers there are, which of them is the boundary, and the way there and back."""

    size: int  # numbers are 0 to size - 1
    boundary: int

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The numbers of each text (UTF-8), without boundaries.

        ValueError for what the vocabulary does not have.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these numbers; boundaries are left out."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """What `from_dict` makes it from, for a JSON file."""

    def count_bytes(self, tokens: np.ndarray) -> int:
        """Bytes (UTF-8) of the text of these numbers."""
        return len(self.decode(tokens.tolist()).encode())

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """Of a file of its numbers."""
        return np.uint16 if self.size <= 1 << 16 else np.uint32

    @property
    def fingerprint(self) -> str:
        """Of all that it does, equal on all machines."""
        return hashlib.sha256(json.dumps(self.as_dict()).encode()).hexdigest()[:16]


class Bytes(Vocabulary):
    """The 256 bytes: takes every text, in any encoding."""

    size, boundary = 257, 256

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def count_bytes(self, tokens: np.ndarray) -> int:
        return int((tokens < 256).sum())  # a character may be cut: decoded, it has other bytes


class Characters(Vocabulary):
    """The characters of one text, in the order of their code points."""

    def __init__(self, characters: str):
        self.characters = characters
        self.points = np.frombuffer(characters.encode("utf-32-le"), "<u4")
        self.size, self.boundary = len(characters) + 1, len(characters)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [self._encode(text.decode()) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        tokens = np.searchsorted(self.points, points).clip(max=len(self.points) - 1)
        unknown = points[self.points[tokens] != points]
        if len(unknown):
            raise ValueError(f"the character {chr(unknown[0])!r} is not in the vocabulary")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in tokens if token != self.boundary)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}


class TokenizerFile(Vocabulary):
    """A tokenizer.json of the package `tokenizers`; UsageError where it cannot be read."""

    def __init__(self, content: str, name: str):
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError(
                f"--tokenizer {name} needs a package that is not installed: pip install tokenizers"
            ) from error
        try:
            self.tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the package raises nothing narrower
            raise UsageError(
                f"--tokenizer {name} is no tokenizer.json of the package tokenizers: "
                f"{first_line(error)}"
            ) from error
        self.content = content
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        known = (self.tokenizer.token_to_id(name) for name in BOUNDARIES)
        self.boundary = next((token for token in known if token is not None), self.size)
        self.size = max(self.size, self.boundary + 1)

    def __reduce__(self):
        return TokenizerFile, (self.content, "")

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode() for text in texts]
        encoded = self.tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token != self.boundary])

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "tokenizer": json.loads(self.content)}


def from_dict(description: dict[str, Any]) -> Vocabulary:
    """The vocabulary whose `as_dict` this is, of a model.json say."""
    if description["kind"] == "bytes":
        return Bytes()
    if description["kind"] == "characters":
        return Characters(description["characters"])
    return TokenizerFile(json.dumps(description["tokenizer"]), "of the saved vocabulary")


def read_tokenizer(name: str) -> TokenizerFile:
    """The vocabulary of a file. UsageError, naming it, when there is none."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"--tokenizer {name}: no such file; or write bytes or characters")
    try:
        return TokenizerFile(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tokenizer {name} cannot be read: {first_line(error)}") from error
