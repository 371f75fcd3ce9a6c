"""What an update of the real scripts costs: host reads, collectives, searches, compilations."""

import importlib
import os
from collections import Counter
from contextlib import nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import (
    test_cifar_fast,
    test_detection,
    test_image_folder,
    test_language_model,
    test_segmentation,
)
from tests.scripts import small_cifar, small_data
from utils.window import WindowLoader

FIRST, LAST, TOTAL = 3, 5, 7  # the updates that are looked at; all buffers are made before


class HostReads(TorchDispatchMode):
    """Tensors that the host reads: `item` and its like dispatched, `tolist` not."""

    def __init__(self):
        super().__init__()
        self.reads: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.reads.append(("item", args[0].dtype))
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.plain_tolist = plain = torch.Tensor.tolist

        def tolist(tensor):
            self.reads.append(("tolist", tensor.dtype))
            return plain(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self.plain_tolist
        super().__exit__(*error)


def count_in_loop(given: dict) -> dict:
    """What updates FIRST..LAST of cifar.py read, send and look for, in its whole loop body."""
    from utils import window

    result: dict = {}
    with small_cifar(small_data(num_train=64 * TOTAL, num_test=8), torch.float32) as cifar:
        iterate = cifar.WindowLoader.__iter__
        searches = mock.patch.object(PathFinder, "find_spec", wraps=PathFinder.find_spec)

        def counted(loader):
            for one in iterate(loader):
                one.counted()  # it comes now, and belongs to the update before
                if one.step == FIRST:
                    result["reads"] = HostReads()
                    result["reads"].__enter__()
                    activities = [torch.profiler.ProfilerActivity.CPU]
                    result["profile"] = torch.profiler.profile(activities=activities)
                    result["profile"].__enter__()
                    result["searches"] = searches.__enter__()
                if one.step == LAST + 1:
                    searches.__exit__(None, None, None)
                    result["profile"].__exit__(None, None, None)
                    result["reads"].__exit__(None, None, None)
                yield one

        # Of the indices, which are on the host anyway.
        digest, window.digest = window.digest, lambda ids: 0
        cifar.WindowLoader.__iter__ = counted
        try:
            assert cifar.main(cifar.Config(**{"tracker": "none", **given})) == 0
        finally:
            window.digest, cifar.WindowLoader.__iter__ = digest, iterate
    events = Counter(event.name for event in result["profile"].events())
    assert torch.distributed.get_world_size() == 2
    return {
        "reads": Counter(result["reads"].reads),
        "collectives": {name: n for name, n in events.items() if name.startswith("gloo:")},
        "searches": [call.args[0] for call in result["searches"].mock_calls],
    }


SLOW_LAYOUT = pytest.param(8, 16, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("micro", "group", "bn"), [(32, 32, 0), (32, 64, 1), SLOW_LAYOUT])
def test_host_reads_and_collectives_of_an_update(pool, tmp_path, micro, group, bn):
    given = dict(output_dir=str(tmp_path), global_batch_size=64, micro_batch_size=micro)
    given |= dict(bn_group=group, epochs=1)
    updates, micro_steps = LAST - FIRST + 1, 64 // (2 * micro)
    for found in pool.run(2, count_in_loop, given, init=False):
        reads = found["reads"]
        # Indices of the samples, which are on the host: the sampler reads them for each micro-step.
        assert reads.pop(("tolist", torch.int64)) == updates * micro_steps
        assert reads == {("tolist", torch.float64): updates}  # the one host read of an update
        # 21 BatchNorm layers: forward and backward where they are synchronised; one bucket of
        # gradients, the count, and the figures with the window's statistics.
        layers = 21 * 2 * micro_steps if bn else 0
        assert sum(found["collectives"].values()) == updates * (layers + 1 + 1 + 1)
        assert found["searches"] == []  # of sys.path, for a package


def run_compiled(name: str, backend: str, given: dict, data=None) -> list[int]:
    """The number of graphs that were compiled so far, at each update of a script and at its end."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = backend
    graphs = []
    iterate = WindowLoader.__iter__

    def counted(loader):
        for one in iterate(loader):
            graphs.append(counters["stats"]["unique_graphs"])
            yield one

    script = importlib.import_module(f"train.{name}")
    on_data = small_cifar(data, torch.float32) if data is not None else nullcontext()
    with mock.patch.object(WindowLoader, "__iter__", counted), on_data:
        assert script.main(script.Config(**{"tracker": "none", **given})) == 0
    assert torch.distributed.get_world_size() == 2
    return [*graphs, counters["stats"]["unique_graphs"]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_once(pool, tmp_path: Path, backend):
    """Two epochs with evaluations between: nothing is compiled after the first update."""
    given = dict(output_dir=str(tmp_path), global_batch_size=16, micro_batch_size=4)
    given |= dict(bn_group=8, epochs=2)
    data = small_data(num_train=48, num_test=20)
    for graphs in pool.run(2, run_compiled, "cifar", backend, given, data, init=False, timeout=600):
        assert graphs[0] == 0 and graphs[1] > 0
        assert graphs[1:] == [graphs[1]] * 6


def small_run(name: str, folder: Path) -> dict:
    """Flags of this script, for six updates or more on small data of its kind."""
    run, data = folder / "run", folder / "data"
    if name == "cifar_fast":
        given = test_cifar_fast.recipe(run, bn_group=16, max_steps=6)
        return given | dict(dataset="digits", subset=96)
    if name == "image_folder":
        test_image_folder.make_folder(data)
        return test_image_folder.recipe(run, data, bn_group=12)
    if name == "segmentation":
        return test_segmentation.config(test_segmentation.make_folder(data), run)
    if name == "detection":
        return test_detection.config(test_detection.make_folder(data), run, epochs=5)
    return test_language_model.config(test_language_model.make_text(data), run, max_steps=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "cifar_fast",
        "image_folder",
        "segmentation",
        pytest.param("detection", marks=test_detection.evaluator),
        "language_model",
    ],
)
def test_every_script_compiles(pool, tmp_path, name):
    """Groups span the processes; nothing is compiled after the first update."""
    given = small_run(name, tmp_path)
    for graphs in pool.run(2, run_compiled, name, "aot_eager", given, init=False, timeout=600):
        assert graphs[0] == 0 and graphs[1] > 0 and len(graphs) > 3
        assert set(graphs[1:]) == {graphs[1]}, graphs
