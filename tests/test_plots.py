"""Curves of a run: a picture of the expected size, whatever metrics there are."""

import io
import json
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from tests.conftest import REPOSITORY
from utils.files import read_json_lines
from utils.plots import MOST_POINTS, PANELS, Curves, group_runs, plot_comparison, read_metrics

SIZE = (1210, 770)


def write(directory, lines) -> None:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)


def lines_of_a_run(steps: int) -> list[dict]:
    keys = [key for keys, _, _ in PANELS for key in keys]
    return [
        {"step": s, "data/digest": "ab", **{key: 1 / s for key in keys}} for s in range(1, steps)
    ]


def drawn(lines) -> PIL.Image.Image:
    curves = Curves()
    for line in lines:
        curves.add(line)
    with PIL.Image.open(io.BytesIO(curves.draw())) as image:
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
def test_few_or_odd_metrics(lines):
    drawn(lines)


def test_curves_are_drawn():
    assert blue_pixels(drawn(lines_of_a_run(200))) > 500 and blue_pixels(drawn([])) == 0


def test_the_newest_point_of_a_long_run_is_drawn():
    lines = [{"step": s, "train/loss": 1.0} for s in range(1, 50 * MOST_POINTS)]
    newest = {"step": 100 * MOST_POINTS, "train/loss": 1.0}
    assert np.any(np.asarray(drawn([*lines, newest])) != np.asarray(drawn(lines)))


# ---- Several runs -----------------------------------------------------------------------------


def make_run(directory, config: dict | None, values: list[float]):
    directory.mkdir()
    write(directory, [{"step": s, "train/loss": v} for s, v in enumerate(values, 1)])
    if config is not None:
        (directory / "config.json").write_text(json.dumps({"versions": {}, **config}))
    return directory


def test_seeds_are_one_group_and_recipes_are_told_apart(tmp_path):
    runs = [
        make_run(tmp_path / f"{lr}_{seed}", {"lr": lr, "seed": seed, "lr_used": lr / 2}, [seed])
        for lr in (0.1, 0.2)
        for seed in (0, 1, 2)
    ]
    runs.append(make_run(tmp_path / "bare", None, [5.0]))
    groups = group_runs(runs)
    assert {name: len(members) for name, members in groups.items()} == {
        "lr=0.1": 3,
        "lr=0.2": 3,
        "run=bare": 1,
    }
    assert [run["train/loss"][1] for run in groups["lr=0.2"]] == [[0], [1], [2]]
    assert list(group_runs(runs[:3])) == ["0.1_0"]  # nothing differs but the seed


def test_layouts_of_a_recipe_are_one_group_beside_another_recipe(tmp_path):
    runs = [
        make_run(tmp_path / f"{lr}_{size}", {"lr": lr, "world_size": size}, [size])
        for lr in (0.1, 0.2)
        for size in (1, 2)
    ]
    assert [len(members) for members in group_runs(runs).values()] == [2, 2]
    assert list(group_runs(runs[:2])) == ["world_size=1", "world_size=2"]  # all that differs


def test_a_comparison_shows_mean_and_band(tmp_path):
    one = make_run(tmp_path / "one", {"lr": 1, "seed": 0}, [1.0, 1.0, 1.0])
    two = make_run(tmp_path / "two", {"lr": 1, "seed": 1}, [3.0, 3.0, 3.0, 3.0])
    plot_comparison([one], tmp_path / "a.png")
    plot_comparison([one, two], tmp_path / "b.png")
    counts = []
    for name in "ab":
        with PIL.Image.open(tmp_path / f"{name}.png") as image:
            red, _, blue = np.asarray(image.convert("RGB")).astype(int).transpose(2, 0, 1)
            counts.append((blue - red > 30).sum())  # the band is light blue
    assert counts[1] > 10 * counts[0] > 0


def test_the_command(tmp_path):
    run = make_run(tmp_path / "run", None, [2.0, 1.0])
    command = [sys.executable, "utils/plots.py", str(run), "-o", str(tmp_path / "out.png")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out.png").stat().st_size > 1000
    command[2] = str(tmp_path)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2 and "it has no metrics.jsonl" in done.stderr
