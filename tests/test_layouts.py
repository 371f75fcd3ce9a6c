"""One recipe, any layout: cifar.py gives the same training run, in float64, on each of them."""

import itertools

import pytest

from tests.scripts import relative_difference, run_cifar, small_data
from utils.errors import UsageError

GLOBAL_BATCH = 16
GROUPS = (2, 4, 8, 16)
LAYOUTS = [
    (processes, micro, GLOBAL_BATCH // (processes * micro))
    for processes in (1, 2, 4)
    for micro in (16, 8, 4, 2, 1)
    if processes * micro <= GLOBAL_BATCH
]
FAST_GROUP = 8  # with it every kind of layout occurs; the slow tier runs all
TOLERANCE = 1e-10

# 5 windows an epoch and a tail of 9 examples; a prime number of test examples; some not labelled.
# 16x16 images: with 8x8 the last layers are 1x1, and BatchNorm over 2 values of a channel amplifies
# rounding a thousandfold an update, whatever computes it.
DATA = dict(num_train=5 * GLOBAL_BATCH + 9, num_test=37, unlabelled=0.2, size=16)


def can_honour(processes: int, micro: int, group: int) -> bool:
    return micro % group == 0 or (group % micro == 0 and processes % (group // micro) == 0)


COMBINATIONS = list(itertools.product(LAYOUTS, GROUPS))
HONOURED = [(layout, group) for layout, group in COMBINATIONS if can_honour(*layout[:2], group)]
REFUSED = [combination for combination in COMBINATIONS if combination not in HONOURED]


def recipe(output_dir, micro: int, group: int, **changes) -> dict:
    return dict(
        output_dir=str(output_dir),
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro,
        bn_group=group,
        epochs=3,
        lr=0.02,
        lr_reference_batch=0,
        max_grad_norm=1.0,
        seed=3,
        **changes,
    )


def train(pool, directory, processes: int, micro: int, group: int, **changes) -> dict:
    config = recipe(directory, micro, group, **changes)
    result = pool.run(processes, run_cifar, config, small_data(**DATA), init=False)[0]
    assert result["config"]["world_size"] == processes
    return result


def assert_same_run(expected: dict, actual: dict, tolerance: float = TOLERANCE) -> None:
    for kind in ("model", "momentum"):
        assert expected[kind].keys() == actual[kind].keys()
        for name, value in expected[kind].items():
            assert relative_difference(value, actual[kind][name]) < tolerance, name
    assert expected["metrics"].keys() == actual["metrics"].keys()
    for step, values in expected["metrics"].items():
        for key, value in values.items():
            if key.startswith(("train/", "val/")):
                assert actual["metrics"][step][key] == pytest.approx(
                    value, rel=tolerance, abs=1e-14
                ), (step, key)
            elif key.startswith("data/"):
                assert actual["metrics"][step][key] == value, (step, key)


@pytest.fixture(scope="module")
def references(pool, tmp_path_factory):
    """The run in one process, without accumulation, for each group."""
    runs: dict[int, dict] = {}

    def get(group: int) -> dict:
        if group not in runs:
            directory = tmp_path_factory.mktemp(f"reference_{group}")
            runs[group] = train(pool, directory, 1, GLOBAL_BATCH, group)
        return runs[group]

    return get


def test_matrix_is_whole():
    assert len(COMBINATIONS) == len(LAYOUTS) * len(GROUPS) == 48
    assert len(HONOURED) == 29 and len(REFUSED) == 19


@pytest.mark.parametrize(
    ("layout", "group"),
    [
        pytest.param(
            layout,
            group,
            marks=() if group == FAST_GROUP else pytest.mark.slow,
            id=f"{'x'.join(map(str, layout))}-group{group}",
        )
        for layout, group in HONOURED
    ],
)
def test_layout_gives_the_same_run(pool, references, tmp_path, layout, group):
    processes, micro, accumulation = layout
    result = train(pool, tmp_path, processes, micro, group)
    assert result["config"]["accumulation"] == accumulation
    assert len(result["metrics"]) == 15  # the tail of each epoch is left out
    assert result["metrics"][15]["val/num_examples"] == int(
        (small_data(**DATA).test.labels >= 0).sum()
    )
    assert result["metrics"][15]["train/lr"] == 0.0
    assert_same_run(references(group), result)


@pytest.mark.parametrize(
    ("layout", "group"),
    [
        pytest.param(layout, group, id=f"{'x'.join(map(str, layout))}-group{group}")
        for layout, group in REFUSED
    ],
)
def test_layout_that_cannot_honour_the_group_is_refused(layout, group):
    from utils.batchnorm import resolve_group

    with pytest.raises(UsageError, match=f"bn_group={group}"):
        resolve_group(group, layout[1], layout[0])


def test_reference_learns(references):
    metrics = references(8)["metrics"]
    assert metrics[15]["train/loss"] < metrics[1]["train/loss"]
    assert len({metrics[step]["data/digest"] for step in metrics}) == 15


def test_a_changed_recipe_is_another_run(pool, references, tmp_path):
    """The comparison can fail: another group, all else equal, ends in other weights."""
    other = train(pool, tmp_path, 1, GLOBAL_BATCH, 4)
    with pytest.raises(AssertionError):
        assert_same_run(references(8), other, tolerance=1e-3)


@pytest.mark.parametrize("processes", [1, 4])
def test_saved_on_two_processes_continued_on_others(pool, references, tmp_path, processes):
    group = 8
    stopped = train(pool, tmp_path, 2, 4, group, stop_after=7)  # in the middle of the second epoch
    assert stopped["code"] == 75 and stopped["status"]["state"] == "preempted"
    assert max(stopped["metrics"]) == 7
    continued = train(pool, tmp_path, processes, GLOBAL_BATCH // processes, group)
    assert continued["code"] == 0 and continued["config"]["world_size"] == processes
    assert_same_run(references(group), continued)
