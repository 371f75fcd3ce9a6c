"""Curves of a run: a picture of the expected size, whatever metrics there are."""

import json

import numpy as np
import PIL.Image
import pytest

from utils.files import read_json_lines
from utils.plots import PANELS, plot_curves, read_metrics

SIZE = (1210, 770)


def write(directory, lines) -> None:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)


def lines_of_a_run(steps: int) -> list[dict]:
    keys = [key for keys, _, _ in PANELS for key in keys]
    return [
        {"step": s, "data/digest": "ab", **{key: 1 / s for key in keys}} for s in range(1, steps)
    ]


def pixels(directory) -> PIL.Image.Image:
    with PIL.Image.open(directory / "curves.png") as image:
        assert image.format == "PNG" and image.size == SIZE
        return image.convert("RGB")


def blue_pixels(image) -> int:
    red, _, blue = np.asarray(image).astype(int).transpose(2, 0, 1)
    return int(((red < 40) & (blue > 150)).sum())


def test_read_metrics(tmp_path):
    write(
        tmp_path,
        [
            {"step": 1, "train/loss": 2.0, "data/digest": "ff"},
            {"step": 2, "train/loss": None},
            {"step": 3, "train/loss": 1, "val/loss": 0.5},
            '{"step": 4, "train/lo',
        ],
    )
    assert read_metrics(tmp_path / "metrics.jsonl") == {
        "train/loss": ([1, 3], [2.0, 1]),
        "val/loss": ([3], [0.5]),
    }
    assert read_metrics(tmp_path / "missing.jsonl") == {}
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1}],
        [{"step": 1, "train/loss": None}],
        [{"step": 1, "train/loss": 1e30}, {"step": 2, "train/loss": -5.0}],
        [{"step": 0, "val/accuracy": 0.5}],
    ],
)
def test_few_or_odd_metrics(tmp_path, lines):
    write(tmp_path, lines)
    plot_curves(tmp_path)
    pixels(tmp_path)


def test_curves_are_drawn_and_replaced(tmp_path):
    plot_curves(tmp_path)  # no metrics at all
    empty = pixels(tmp_path)
    write(tmp_path, lines_of_a_run(200))
    plot_curves(tmp_path)
    full = pixels(tmp_path)
    assert blue_pixels(full) > 500 and blue_pixels(empty) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_a_picture_that_cannot_be_written_costs_no_run(tmp_path, capfd):
    (tmp_path / "curves.png").mkdir()
    plot_curves(tmp_path)
    assert "curves.png not written" in capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def plot_in_own_folder(directory) -> list[str]:
    import torch.distributed as dist

    own = directory / str(dist.get_rank())
    own.mkdir()
    plot_curves(own)
    return [path.name for path in own.iterdir()]


def test_all_processes_may_ask_and_one_draws(pool, tmp_path):
    assert pool.run(2, plot_in_own_folder, tmp_path) == [["curves.png"], []]
