"""Data sets from a local folder, the Hugging Face cache or the hub; images and labels as tensors.

Call everything here on rank 0 only (`utils.distributed.on_main_process`). This process only reads
files: whatever talks to the hub is a child process that can be killed (name resolution ignores
timeouts), so no setting of `datasets` changes here. Slow packages are imported where they are used.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import UsageError

if TYPE_CHECKING:
    import datasets
    import torch

_FALSE = ("", "0", "FALSE", "NO", "OFF")
REACH_SECONDS = 12  # the hub has answered by then, or counts as out of reach


class HubUnreachable(Exception):
    """The hub does not answer: one line with what was tried, for how long, and the cause."""


def cache_hint(name: str) -> str:
    """How to put the hub's data set `name` on a machine that cannot reach the hub."""
    command = f"hf download {name} --repo-type dataset --local-dir {name.split('/')[-1]}"
    return (
        f"run `{command}` where there is access, copy that folder here, and pass --dataset FOLDER"
    )


def is_hub_name(name: str) -> bool:
    """Whether it is written as `owner/name`, and nothing here has that path."""
    written_so = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)
    return written_so is not None and not os.path.exists(os.path.expanduser(name))


def open_dataset(name_or_path: str) -> datasets.DatasetDict:
    """The splits of a local folder, or of a hub data set `owner/name` (its cached copy first)."""
    import datasets

    folder = os.path.abspath(os.path.expanduser(name_or_path))
    if name_or_path and os.path.isdir(folder):
        try:
            if os.path.isfile(os.path.join(folder, "dataset_dict.json")):  # made by save_to_disk
                return datasets.DatasetDict.load_from_disk(folder)
            return datasets.load_dataset(folder)
        except Exception as error:
            raise UsageError(
                f"--dataset {name_or_path}: this folder needs parquet files, or other data that "
                f"datasets.load_dataset can read ({_cause(error)})"
            ) from error
    if not is_hub_name(name_or_path):  # a file, or nothing at all
        shown = name_or_path or "''"
        raise UsageError(
            f"--dataset {shown}: no such file or folder (hub names are written owner/name)"
        )
    return _open_cached(name_or_path) or _open_prepared(_download(name_or_path))


def _open_cached(name: str) -> datasets.DatasetDict | None:
    """The newest complete copy that `datasets` prepared on this machine before, or None."""
    from datasets import config, naming

    owner, repo = name.split("/")
    root = Path(config.HF_DATASETS_CACHE, f"{owner}___{naming.camelcase_to_snakecase(repo)}")
    copies = {}
    for info in sorted(root.glob("*/*/*/dataset_info.json"), key=lambda path: path.stat().st_mtime):
        try:
            copies[info.parts[-4]] = _open_prepared(info.parent)
        except Exception as error:
            print(f"warning: not used: {info.parent}: {_cause(error)}", file=sys.stderr, flush=True)
            if isinstance(error, json.JSONDecodeError) and os.access(info.parent, os.W_OK):
                info.unlink()  # `datasets` would stumble over it before it prepares a new copy
    # Which of several configurations is the default, only the hub's data card tells.
    return copies.popitem()[1] if len(copies) == 1 else None


def _open_prepared(folder: Path) -> datasets.DatasetDict:
    """Arrow files as `datasets` lays them out in its cache; every row must be there."""
    from datasets import Dataset, DatasetDict, Split, concatenate_datasets

    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    if info["config_name"] != folder.parts[-3] or not info["splits"]:
        raise ValueError("not the whole data set")
    result = DatasetDict()
    for split, facts in info["splits"].items():
        pattern = re.compile(rf".+-{re.escape(split)}(-\d+-of-\d+)?\.arrow")
        files = sorted(str(path) for path in folder.iterdir() if pattern.fullmatch(path.name))
        parts = [Dataset.from_file(file, split=Split(split)) for file in files]
        if sum(map(len, parts)) != facts["num_examples"]:
            raise ValueError(f"{sum(map(len, parts))} of {facts['num_examples']} rows of {split}")
        result[split] = concatenate_datasets(parts, split=Split(split))
    return result


def _download(name: str) -> Path:
    """Let a child process download and prepare `name`; returns the folder of Arrow files."""
    from datasets import config

    if config.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "0").upper() not in _FALSE:
        raise HubUnreachable(f"{name} is not in the cache, the hub is not tried: HF_HUB_OFFLINE")
    endpoint = _public(os.environ.get("HF_ENDPOINT") or config.HF_ENDPOINT)
    # sys.path[0] is the working folder, where a datasets.py would shadow the package.
    code = (
        "import sys; sys.path[0] = sys.argv[1]; from utils.hub import _child; _child(sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1]), name]
    start_time, pipe = time.monotonic(), subprocess.PIPE
    # Its stderr is ours, for the progress bars; it ends when we close its stdin, or die.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8") as child:
        timer = threading.Timer(REACH_SECONDS, child.kill)
        timer.daemon = True
        timer.start()
        answers = (line.strip().partition(" ") for line in child.stdout or ())
        outcome, _, text = next(answers, ("unreachable", "", "no answer"))
        timer.cancel()
        if outcome == "reached":
            print(f"downloading {name} from {endpoint}", file=sys.stderr, flush=True)
            outcome, _, text = next(answers, ("unreachable", "", "the download was killed"))
    if outcome == "prepared":
        return Path(text)
    if outcome == "refused":
        raise UsageError(f"--dataset {name}: no such folder; {endpoint}: {_public(text)}")
    tried = f"{endpoint} tried for {time.monotonic() - start_time:.0f} s"
    raise HubUnreachable(f"{name} is not in the cache; {tried}: {_public(text)}")


def _child(name: str) -> None:
    """The child of `_download`: writes one line when the hub has answered, and one at the end."""
    from huggingface_hub import HfApi, errors

    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    reached = False
    try:
        HfApi().dataset_info(name, timeout=REACH_SECONDS - 2)
        reached = True
        print("reached", file=answers)
        from datasets import exceptions, load_dataset

        try:
            splits = load_dataset(name, download_mode="reuse_cache_if_exists")
        except (exceptions.DatasetGenerationError, ValueError):  # a damaged file in the cache
            splits = load_dataset(name, download_mode="force_redownload")
        file = next(iter(splits.values())).cache_files[0]["filename"]
        answer = f"prepared {Path(file).resolve().parent}"
    except Exception as error:
        packages = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
        network = packages & {"httpx", "httpx2", "huggingface_hub"}
        response = None if reached else getattr(error, "response", None)
        status = getattr(response, "status_code", 0)
        from_hub = "x-error-message" in getattr(response, "headers", ())  # not from a firewall
        if isinstance(error, errors.GatedRepoError) or "is a gated dataset" in f"{error}":
            answer = "refused it is gated: ask for access on its page, then `hf auth login` here"
        elif status in (401, 404) or (status == 403 and from_hub):
            answer = "refused no data set of that name, or a private one: then `hf auth login`"
        elif not reached or network or isinstance(error, (ConnectionError, TimeoutError)):
            answer = f"unreachable {_cause(error)}"
        else:
            answer = f"refused it cannot be read: {_cause(error)}"
    print(answer, file=answers)
    os._exit(0)


def _cause(error: BaseException) -> str:
    """The innermost cause of an error, in one line."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _public(text: str) -> str:
    """`text` without passwords in addresses and access tokens."""
    return re.sub(r"(?<=//)[^/@\s]+(?=@)|hf_\w{8,}", "***", text)


def decode_images(dataset: datasets.Dataset, column: str) -> torch.Tensor:
    """All images of a column, in RGB as PIL converts them: uint8 (N, 3, H, W).

    The 60,000 images of CIFAR-10 take 3 s; small images gain nothing from threads.
    """
    import numpy
    import PIL.Image
    import torch
    from datasets import Image

    where = f"--dataset: split {dataset.split}, column {column}:"
    advice = "train/image_folder.py takes photographs of any size"
    files = dataset.select_columns([column]).cast_column(column, Image(decode=False))
    images = numpy.empty((0, 3, 0, 0), numpy.uint8)
    batches = files.with_format(None).iter(1024)
    for index, file in enumerate(file for batch in batches for file in batch[column]):  # type: ignore
        try:
            data = file["bytes"] or Path(file["path"]).read_bytes()
            with PIL.Image.open(io.BytesIO(data)) as image:
                if image.mode[0] in "IF":
                    raise ValueError(f"mode {image.mode} has more than 8 bits, PIL would clip them")
                pixels = numpy.asarray(image if image.mode == "RGB" else image.convert("RGB"))
        except Exception as error:
            raise UsageError(f"{where} image {index} is unreadable ({_cause(error)})") from error
        pixels = pixels.transpose(2, 0, 1)  # (3, H, W)
        if index == 0:
            try:
                images = numpy.empty((len(files), *pixels.shape), numpy.uint8)
            except MemoryError as error:
                raise UsageError(f"{where} {error}; {advice}") from error
        if pixels.shape != images.shape[1:]:
            old, new = (f"{a.shape[2]}x{a.shape[1]}" for a in (images[0], pixels))
            raise UsageError(f"{where} image 0 is {old}, image {index} is {new}; {advice}")
        images[index] = pixels
    if not len(images):
        raise UsageError(f"{where} the split has no rows")
    return torch.from_numpy(images)


def decode_labels(dataset: datasets.Dataset, column: str) -> tuple[torch.Tensor, list[str] | None]:
    """A column of class numbers, int64 (N,), and the names of the classes if the data has them."""
    import torch

    values = dataset.select_columns([column]).with_format(None)[column][:]
    names = getattr(dataset.features[column], "names", None)
    stop = len(names) if names else 1 << 63
    for index, value in enumerate(values):
        if not isinstance(value, int) or not 0 <= value < stop:
            allowed = f"a number from 0 to {stop - 1}" if names else "a number from 0"
            raise UsageError(
                f"--dataset: split {dataset.split}, column {column}: label {index} is {value!r}, "
                f"must be {allowed}"
            )
    return torch.tensor(values, dtype=torch.int64), names


def find_column(dataset: datasets.Dataset, candidates: Sequence[str], what: str) -> str:
    """The first of `candidates` that the data set has; `what` it holds is for the error message."""
    for name in candidates:
        if name in dataset.column_names:
            return name
    raise UsageError(
        f"--dataset: no column with {what}: looked for {', '.join(candidates)}, "
        f"found {', '.join(dataset.column_names)}"
    )
