"""Images decoded and transformed where a loader's workers read them; files that cannot be read.

An unreadable file must not break a run that all processes take part in, nor change it in silence.
Whoever reads gives a placeholder and says so in the batch; this process's loader then stops, or
notes it for the list in the run directory.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, default_collate
from tqdm import tqdm

from utils.console import Progress, say
from utils.distributed import gather_objects, on_main_process, rank, world_size
from utils.errors import ExplainedError, UsageError
from utils.files import write_text
from utils.image_sets import UNLABELLED, Images, Split
from utils.images import BadImage, decode_rgb
from utils.loaders import SteadyLoader
from utils.order import SampleIndex, ShardSampler, random_integers, seeded_for_sample
from utils.start import default_workers

REMEDY = "remove it, or leave it out with --bad-images skip (--verify-data finds all at once)"
MOST_NAMED = 5  # faults in an error's text
MOST_REPLACEMENTS = 20  # tried for one image: so many bad ones in a row are no accident
REPLACEMENT_STREAM = 0x2E91
VERIFY_BATCH = 16


class ImageBatch(dict[str, torch.Tensor]):
    """A batch, and lines about the files that could not be read for it."""

    bad: tuple[str, ...] = ()
    lost: bool = False  # whether no image has been found in the place of one of them


class ImageDataset(Dataset):
    """Samples {"image": uint8 (3, H, W), "label": int64, "id": int64} of a split.

    `transform` is given uint8 (3, H, W) of any size; its random numbers are those of (seed, epoch,
    index) (utils/order.py). With `replace`, an image that cannot be read gives its place to
    another one with that one's label, chosen by (seed, epoch, index) too: in any layout the same.
    "id" stays the one asked for, so that order and digest are those of the data set. Without, the
    place has no label.
    """

    def __init__(
        self,
        split: Split,
        transform: Callable[[torch.Tensor], torch.Tensor],
        seed: int,
        *,
        replace: bool,
    ):
        self.split = split
        self.transform = transform
        self.seed = seed
        self.replace = replace

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label, bad = self._readable(index)
        with seeded_for_sample(index, self.seed):
            image = self.transform(image)
        return {"image": image, "label": label, "id": torch.tensor(int(index)), "bad": bad}

    def _readable(self, index: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        """Pixels and label of this image, or of what is in its place; lines about bad ones."""
        bad = []
        for attempt in range(MOST_REPLACEMENTS if self.replace else 1):
            chosen = int(index)
            if attempt:
                epoch = SampleIndex(index).epoch
                numbers = dict(seed=self.seed, epoch=epoch, stream=attempt + REPLACEMENT_STREAM)
                chosen = int(random_integers(torch.tensor(chosen), len(self), **numbers))
            try:
                images = self.split.images
                pixels = decode_rgb(images.source(chosen), images.name(chosen))
                return pixels, self.split.labels[chosen], bad
            except BadImage as error:
                bad.append(str(error))
        return torch.zeros(3, 8, 8, dtype=torch.uint8), torch.tensor(UNLABELLED), bad


def collate(samples: list[dict[str, Any]]) -> ImageBatch:
    batch = ImageBatch(
        default_collate([{k: v for k, v in sample.items() if k != "bad"} for sample in samples])
    )
    batch.bad = tuple(line for sample in samples for line in sample["bad"])
    batch.lost = any(len(sample["bad"]) == MOST_REPLACEMENTS for sample in samples)
    return batch


class BadImages:
    """The unreadable files that this process's loaders have met, and what to do about them.

    Args:
        directory: of the run: the list of all processes' files is its bad_images.txt, one
            "name: reason" a line.
        action: "stop" or "skip".
        remedy: what to do about a file, for the message.
    """

    def __init__(self, directory: Path, action: str, remedy: str = REMEDY):
        self.path = directory / "bad_images.txt"
        self.action = action
        self.remedy = remedy
        self.found: set[str] = set()

    def meet(self, batch: ImageBatch) -> None:
        """Note a batch's files; ExplainedError, naming file and process, where it must not be."""
        if batch.bad and self.action == "stop":
            raise ExplainedError(f"rank {rank()}: unreadable image: {batch.bad[0]}; {self.remedy}")
        if batch.lost:
            raise ExplainedError(
                f"rank {rank()}: {MOST_REPLACEMENTS} unreadable images in a row, such as "
                f"{batch.bad[-1]}; is the folder still there?"
            )
        self.found.update(batch.bad)

    def write(self) -> None:
        """Add all processes' files to the list, sorted; called by all of them.

        Nothing is written, or said, where nothing is new.
        """
        found = set().union(*gather_objects(self.found))

        def write() -> None:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            known = set(text.splitlines())
            if found - known:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.path, "".join(f"{line}\n" for line in sorted(found | known)))
                say(
                    f"bad       {len(found | known)} unreadable images so far, replaced in "
                    f"training and left out of evaluation: {self.path}"
                )

        on_main_process(write)


class ImageLoader(SteadyLoader):
    """A loader of ImageBatch that hands the files its workers could not read to BadImages."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_sampler: Sampler,
        bad_images: BadImages,
        workers: int,
        pin: bool,
    ):
        super().__init__(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin,
        )
        self.bad_images = bad_images

    def __iter__(self) -> Iterator[ImageBatch]:  # type: ignore[override]
        for batch in super().__iter__():
            self.bad_images.meet(batch)
            yield batch


# ---- All of them before training --------------------------------------------------------------


class _Verified(Dataset):
    """For each image the line that says why it cannot be read, or ""."""

    def __init__(self, images: Images, count: int):
        self.images = images
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> str:
        try:
            decode_rgb(self.images.source(index), self.images.name(index))
        except BadImage as error:
            return str(error)
        return ""


def verify_images(splits: list[Split], num_workers: int, bad_images: BadImages) -> None:
    """Decode all images, each by one of the processes, and list the unreadable ones.

    Where they must not be, UsageError, on all processes alike, that names some of them.
    """
    progress = Progress(sum(map(len, splits)), 0, name="verified", unit="image")
    own: dict[str, int] = {}  # line -> the process that has read the file
    done = 0
    for split in splits:
        loader = SteadyLoader(
            _Verified(split.images, len(split)),
            batch_size=VERIFY_BATCH,
            sampler=ShardSampler(len(split), world_size(), rank()),
            num_workers=num_workers,
            collate_fn=list,
        )
        for lines in loader:
            own.update((line, rank()) for line in lines if line)
            done += len(lines)
            progress.update(min(done * world_size(), progress.total), f"{len(own)} unreadable")
    progress.close()
    bad_images.found.update(own)
    bad_images.write()
    found = {line: reader for part in gather_objects(own) for line, reader in part.items()}
    if found and bad_images.action == "stop":
        some = "; ".join(f"{line} (rank {found[line]})" for line in sorted(found)[:3])
        raise UsageError(
            f"--verify-data: {len(found)} unreadable images, listed in {bad_images.path}: {some}; "
            "remove them, or leave them out with --bad-images skip"
        )
    say(f"verified  {progress.total} images, {len(found)} unreadable")


def verify_samples(what: str, remedy: str, *splits: Any) -> None:
    """Read every sample once by its split's `read(index)`, each process its share.

    All processes call it. UsageError, on all of them, that names the first ones that cannot be
    used, their number and the `remedy`.
    """
    samples = [(split, index) for split in splits for index in range(len(split))]
    own = range(rank(), len(samples), world_size())

    def fault(number: int) -> tuple[int, str] | None:
        split, index = samples[number]
        try:
            split.read(index)
        except (BadImage, OSError) as error:
            return number, str(error)
        return None

    with ThreadPoolExecutor(max(1, default_workers())) as threads:  # decoding releases the lock
        results = threads.map(fault, own)
        bar = tqdm(results, f"reading {what}", len(own), disable=rank() > 0 or None)
        faults = [result for result in bar if result]
    everyone = sorted(fault for found in gather_objects(faults) for fault in found)
    if everyone:
        texts = [text for _, text in everyone]
        more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
        raise UsageError(f"{'; '.join(texts[:MOST_NAMED])}{more}: {remedy}")
