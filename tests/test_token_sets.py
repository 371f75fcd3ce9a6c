"""utils/token_sets.py and what it stands on: text, vocabularies, token files, windows."""

import json
import pickle

import numpy as np
import pytest
import torch

from utils import text_sets, token_files
from utils.errors import ExplainedError, UsageError
from utils.text_sets import find_texts
from utils.token_sets import TokenWindows, load_tokens
from utils.vocabulary import Bytes, Characters, from_dict

TEXT = "Füße, 12 €.\nEin Satz\r\nund noch einer 𝄞.\n" * 9


def write(path, text: str | bytes = TEXT):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(dataset, folder, tokenizer="auto", limit=0):
    return load_tokens(str(dataset), tokenizer, folder, limit)


def words(folder):
    """A tokenizer.json of the package: whole words, and what ends a document."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


# ---- Vocabularies ----------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [Bytes(), Characters("".join(sorted(set(TEXT))))])
def test_text_becomes_numbers_and_text_again(vocabulary):
    [tokens] = vocabulary.encode([TEXT.encode()])
    assert 0 <= tokens.min() and tokens.max() < vocabulary.boundary == vocabulary.size - 1
    with_boundary = [vocabulary.boundary, *tokens.tolist(), vocabulary.boundary]
    assert vocabulary.decode(with_boundary) == TEXT
    assert vocabulary.count_bytes(np.array(with_boundary)) == len(TEXT.encode())
    again = from_dict(json.loads(json.dumps(vocabulary.as_dict())))
    assert again.fingerprint == vocabulary.fingerprint
    assert np.array_equal(again.encode([TEXT.encode()])[0], tokens)


def test_character_that_the_vocabulary_lacks():
    for unknown in "az":  # in front of all, and behind
        with pytest.raises(ValueError, match=f"'{unknown}'"):
            Characters("bc").encode([f"b{unknown}".encode()])


def test_tokenizer_file(tmp_path):
    file = words(tmp_path)
    data = load(write(tmp_path / "text", "a b a\n" * 30), tmp_path / "tokens", str(file))
    assert data.vocabulary.size == 4 and data.vocabulary.boundary == 3
    tokens, _ = data.train.read()
    assert tokens[:7].tolist() == [3, 1, 2, 1, 1, 2, 1]
    assert pickle.loads(pickle.dumps(data)).vocabulary.decode([1, 3, 2]) == "a b"
    with pytest.raises(UsageError, match="--tokenizer bytes: .* another one"):
        load(tmp_path / "tokens", tmp_path / "other", "bytes")
    assert load(tmp_path / "tokens", tmp_path / "other", str(file)).fingerprint == data.fingerprint


@pytest.mark.parametrize("content", ["{}", "no json"])
def test_tokenizer_file_that_is_none(tmp_path, content):
    file = write(tmp_path / "tokenizer.json", content)
    with pytest.raises(UsageError, match="tokenizer.json (is no tokenizer|needs a package)"):
        load(write(tmp_path / "text"), tmp_path / "tokens", str(file))
    with pytest.raises(UsageError, match="--tokenizer ./nowhere: no such file; or write bytes"):
        load(tmp_path / "text", tmp_path / "tokens", "./nowhere")


# ---- Text ------------------------------------------------------------------------------------


def text_of(pieces) -> bytes:
    return b"".join((b"|" if piece.begins else b"") + piece.text for piece in pieces)


@pytest.mark.parametrize("piece_bytes", [7, 1 << 22])
def test_last_tenth_is_cut_off_between_characters(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(text_sets, "PIECE_BYTES", piece_bytes)
    for length in range(40, 60):  # the cut falls on each byte of a character
        path = write(tmp_path / "text", ("€" * length + "\n") * 2)
        texts = find_texts(str(path))
        train, val = text_of(texts.train()), text_of(texts.val())
        assert (train[1:] + val[1:]) == path.read_bytes()
        train.decode(), val.decode()
        assert abs(0.1 - len(val[1:]) / path.stat().st_size) < 0.02


def test_files_of_a_folder_in_natural_order(tmp_path):
    for name in ("10", "2", "1", ".hidden"):
        write(tmp_path / f"{name}.txt", name * 30)
    texts = find_texts(str(tmp_path))
    assert text_of(texts.train()) == b"|" + b"1" * 30 + b"|" + b"2" * 30 + b"|" + b"10" * 24
    assert text_of(texts.val()) == b"|" + b"10" * 6


@pytest.mark.parametrize("form", ["files", "folders"])
def test_validation_split_beside_train(tmp_path, form):
    names = ("train.txt", "valid.txt") if form == "files" else ("train/1.txt", "val/7.txt")
    for name in names:
        write(tmp_path / name, f"of {name}\n")
    texts = find_texts(str(tmp_path))
    assert text_of(texts.train()) == f"|of {names[0]}\n".encode()
    assert text_of(texts.val()) == f"|of {names[1]}\n".encode()


def test_rows_of_a_data_set(tmp_path):
    rows = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(20)]
    write(tmp_path / "data" / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    texts = find_texts(str(tmp_path / "data"))
    assert text_of(texts.val()) == b"|18?18!|19?19!" and texts.has_prompts
    assert [piece.counts for piece in texts.val()] == [False, True] * 2
    data = load(tmp_path / "data", tmp_path / "tokens")
    assert data.val.num_bytes == 6  # of the completions
    batch = TokenWindows(data.val, 9).__getitems__([0, 1])
    labels = ["".join(chr(x) for x in row if x >= 0) for row in batch["label"].tolist()]
    assert labels == ["18!Ā", "19!"]  # without prompts, with the second row's boundary (256)
    tokens = data.val.read()[0].tolist()
    assert batch["tokens"][0].tolist() == tokens[:9]
    assert batch["tokens"].dtype == batch["label"].dtype == batch["id"].dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "content", "tokenizer", "words"),
    [
        ("latin.txt", "Füße\n".encode("latin-1") * 20, "characters", "latin.txt cannot be read"),
        ("empty.txt", "", "auto", "no text for the split train"),
        ("one.txt", "a", "auto", "no text for the split train"),
        ("rows.parquet", "", "auto", "is a table, not text: give the folder"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, name, content, tokenizer, words):
    path = write(tmp_path / name, content)
    with pytest.raises(UsageError, match=words):
        load(path, tmp_path / "tokens", tokenizer)
    assert not (tmp_path / "tokens").exists()


def test_bytes_take_text_in_any_encoding(tmp_path):
    path = write(tmp_path / "latin.txt", "Füße\n".encode("latin-1") * 20)
    assert load(path, tmp_path / "tokens").val.num_bytes == 10


# ---- Token files and windows -----------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
@pytest.mark.parametrize("encoded_bytes", [1, 1 << 22])
def test_windows_give_each_token_once(tmp_path, monkeypatch, tokenizer, encoded_bytes):
    monkeypatch.setattr(token_files, "ENCODED_BYTES", encoded_bytes)
    data = load(write(tmp_path / "text"), tmp_path / "tokens", tokenizer)
    text = TEXT.encode()
    cut = data.train.num_bytes
    assert cut + data.val.num_bytes == len(text)
    for split, own in ((data.train, text[:cut]), (data.val, text[cut:])):
        windows = TokenWindows(split, context=8)
        batch = windows.__getitems__(list(range(len(windows))))
        labels = batch["label"][batch["label"] != -100]
        assert data.vocabulary.decode(labels.tolist()).encode() == own
        assert (batch["label"][:-1] != -100).all() and (batch["label"][-1, 0] != -100).all()
        assert torch.equal(batch["tokens"][:-1, 1:], batch["label"][:-1, :-1])
        assert batch["tokens"][0, 0] == data.vocabulary.boundary
        assert torch.equal(batch["tokens"][1:, 0], batch["label"][:-1, -1])


def test_large_vocabulary_takes_four_bytes(tmp_path):
    text = "".join(chr(x) for x in range(0x10000, 0x30000)) * 2
    data = load(write(tmp_path / "text", text), tmp_path / "tokens", "characters")
    assert data.train.itemsize == 4 and data.vocabulary.size == 0x20001
    tokens, _ = data.train.read()
    assert tokens[:3].tolist() == [0x20000, 0, 1] and tokens[0x20000] == 0x1FFFF


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_first_examples_and_their_bytes(tmp_path, tokenizer):
    data = load(write(tmp_path / "text"), tmp_path / "tokens", tokenizer, limit=16)
    windows = TokenWindows(data.train, context=8)
    labels = windows.__getitems__([0, 1])["label"]
    assert len(windows) == 2 and (labels != -100).all()
    text = data.vocabulary.decode(labels.flatten().tolist()).encode()
    assert data.train.num_bytes == (16 if tokenizer == "bytes" else len(text))


def test_files_are_made_once_and_anew_for_other_text(tmp_path):
    path, folder = write(tmp_path / "text"), tmp_path / "tokens"
    first = load(path, folder)
    made = (folder / "train.bin").stat().st_mtime_ns
    assert load(path, folder).fingerprint == first.fingerprint
    assert (folder / "train.bin").stat().st_mtime_ns == made
    assert sorted(p.name for p in folder.iterdir()) == ["tokens.json", "train.bin", "val.bin"]
    other = TEXT.replace("noch", "auch")
    write(path, other)
    changed = load(path, folder)
    assert changed.fingerprint != first.fingerprint
    assert changed.train.num_tokens == first.train.num_tokens
    assert load(path, folder, "characters").vocabulary.size == len(set(other)) + 1


@pytest.mark.parametrize("fault", ["cut short", "no manifest", "broken manifest"])
def test_files_that_are_not_whole_are_made_anew(tmp_path, fault):
    path, folder = write(tmp_path / "text"), tmp_path / "tokens"
    first = load(path, folder)
    if fault == "cut short":
        (folder / "val.bin").write_bytes((folder / "val.bin").read_bytes()[:-2])
    elif fault == "no manifest":
        (folder / "tokens.json").unlink()
    else:
        (folder / "tokens.json").write_text('{"format": 1')
    if fault == "cut short":
        with pytest.raises(UsageError, match="do not agree"):
            load(folder, tmp_path / "other")
    again = load(path, folder)
    assert again.fingerprint == first.fingerprint
    assert again.val.path.stat().st_size == 2 * again.val.num_tokens


def test_killed_while_writing(tmp_path, monkeypatch):
    """New text, and a kill at each rename: what is found afterwards is never a mixture."""
    path, folder = write(tmp_path / "text"), tmp_path / "tokens"
    rename = token_files.os.replace
    for survived in range(3):
        write(path, TEXT)
        load(path, folder)
        write(path, TEXT.upper())
        renamed = []

        def kill(source, target, survived=survived, renamed=renamed):
            if len(renamed) == survived:
                raise KeyboardInterrupt
            renamed.append(target)
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(token_files.os, "replace", kill)
            with pytest.raises(KeyboardInterrupt):
                load(path, folder)
        assert token_files.open_tokens(folder, "") is None
        tokens, _ = load(path, folder).train.read()
        assert bytes(tokens[1:].tolist()) in TEXT.upper().encode()


def test_windows_travel_to_workers_as_a_path(tmp_path):
    data = load(write(tmp_path / "text", TEXT * 50), tmp_path / "tokens")
    windows = TokenWindows(data.train, 8)
    packed = pickle.dumps(windows)
    assert len(packed) < 2000 < data.train.num_tokens
    batch, again = (w.__getitems__([3, 1]) for w in (windows, pickle.loads(packed)))
    assert all(torch.equal(batch[key], again[key]) for key in batch)


def test_files_that_a_machine_cannot_see(tmp_path):
    data = load(write(tmp_path / "text"), tmp_path / "tokens")
    data.train.path.unlink()
    with pytest.raises(ExplainedError, match="train.bin .*--output-dir on a file system"):
        TokenWindows(data.train, 8)


def test_folder_that_cannot_be_written(tmp_path):
    write(tmp_path / "tokens", "a file")
    with pytest.raises(ExplainedError, match="could not be written to .*tokens"):
        load(write(tmp_path / "text"), tmp_path / "tokens")
