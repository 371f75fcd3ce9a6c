"""Text as one long row of tokens, and windows of it as examples.

The token files (utils/token_files.py) are made by the main process at the first start, and used
again as long as text and tokenizer stay the same.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.console import say
from utils.errors import UsageError
from utils.text_sets import Texts, find_texts
from utils.token_files import (
    FORMAT,
    MANIFEST,
    TokenData,
    TokenSplit,
    open_tokens,
    unreadable,
    write_tokens,
)
from utils.vocabulary import Bytes, Characters, Vocabulary, read_tokenizer

UNLABELLED = -100


class TokenWindows(Dataset):
    """Example i: tokens i * context to i * context + context, read a whole micro-batch at a time.

    All but the last are inputs, all but the first are labels. The last window of the row is filled
    up with unlabelled places; those after it have nothing else (ShardSampler asks for some).

    Args:
        context: tokens that the model sees at once.
    """

    device = torch.device("cpu")  # where the examples are (utils.small_images.TensorLoader)

    def __init__(self, split: TokenSplit, context: int):
        self.split = split
        self.context = context
        self.tokens, self.mask = split.read()

    def __len__(self) -> int:
        return -(-(self.split.num_tokens - 1) // self.context)

    def __getitems__(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """ "id" (B), "tokens" and "label" (B, context); all int64."""
        index = torch.tensor(ids, dtype=torch.int64)
        places = index.numpy()[:, None] * self.context + np.arange(self.context + 1)
        last = self.split.num_tokens - 1
        found = places.clip(max=last)
        tokens = torch.from_numpy(self.tokens[found].astype(np.int64))
        missing = places > last
        if self.mask is not None:
            missing |= self.mask[found] > 0
        labels = tokens[:, 1:].masked_fill(torch.from_numpy(missing[:, 1:]), UNLABELLED)
        return {"tokens": tokens[:, :-1].contiguous(), "label": labels, "id": index}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokens": None, "mask": None}  # the file, not its content

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokens, self.mask = self.split.read()


def load_tokens(dataset: str, tokenizer: str, folder: Path, limit: int = 0) -> TokenData:
    """The tokens of a data set; for the main process (utils.distributed.on_main_process).

    Args:
        dataset: as for utils.text_sets.find_texts, or a folder of token files made before.
        tokenizer: auto (bytes, or that of the token files), bytes, characters, or a file.
        folder: where the token files are, or are made.
        limit: only the first so many predicted tokens of each split; 0 = all.

    UsageError when the data cannot be had, ExplainedError when the files cannot be written.
    """
    made_before = Path(dataset).expanduser()
    if (made_before / MANIFEST).exists():
        data = open_tokens(made_before, dataset)
        if data is None:
            raise UsageError(f"--dataset {dataset}: {MANIFEST} and the token files do not agree")
        if not _means(tokenizer, data.vocabulary):
            raise UsageError(
                f"--tokenizer {tokenizer}: the token files of {dataset} were made with another "
                "one; leave the flag out, or give the text"
            )
    else:
        texts = find_texts(dataset)
        vocabulary = None  # of the characters, known when the text has been read
        if tokenizer != "characters":
            vocabulary = Bytes() if tokenizer in ("auto", "bytes") else read_tokenizer(tokenizer)
        kind = vocabulary.fingerprint if vocabulary else tokenizer
        source = hashlib.sha256(f"{FORMAT} {kind} {texts.source}".encode()).hexdigest()
        data = open_tokens(folder, dataset, source)
        if data is None:
            say(f"tokens    of {dataset} are made, in {folder}")
            write_tokens(texts, vocabulary or _characters(texts), folder, source)
            data = open_tokens(folder, dataset, source)
            assert data is not None
    if limit:
        train, val = (split.first(limit, data.vocabulary) for split in (data.train, data.val))
        data = replace(data, train=train, val=val)
    return data


def _means(tokenizer: str, vocabulary: Vocabulary) -> bool:
    """Whether the flag means this vocabulary, of token files made before."""
    if tokenizer in ("auto", "bytes", "characters"):
        return tokenizer in ("auto", vocabulary.as_dict()["kind"])
    return read_tokenizer(tokenizer).fingerprint == vocabulary.fingerprint


def _characters(texts: Texts) -> Characters:
    """Those of both splits."""
    found: set[str] = set()
    for pieces in (texts.train(), texts.val()):
        for piece in pieces:
            try:
                found.update(piece.text.decode())
            except UnicodeDecodeError as error:
                raise unreadable(piece, error) from error
    return Characters("".join(sorted(found)))
