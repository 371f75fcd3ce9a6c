"""Checkpoints: nothing is lost, nothing half used, nothing executed."""

import errno
import hashlib
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils import checkpoint as ck
from utils.errors import ExplainedError, UsageError
from utils.files import read_json, write_json

RECIPE = {"lr": 0.1, "seed": 0, "model": "net"}


def build(width: int = 4, seed: int = 0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(directory: Path, step: int, *, keep=9, seed=0, width=4, scaler=None, score=None, **more):
    model, optimizer = build(width, seed)
    train(model, optimizer)
    ck.save_checkpoint(
        directory,
        step,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        extra={"digest": 2**64 - 1, "list": [1.5, "x"], "tensor": torch.arange(3)},
        manifest={"recipe": RECIPE, "total_steps": 100, **more},
        keep=keep,
        score=score,
    )
    return model, optimizer


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def loadable(directory: Path) -> list[int]:
    """Steps of all checkpoints that pass the check and load."""
    steps = []
    for path in sorted(directory.glob("step_*")):
        found = ck.find_checkpoint(path)
        if found is not None:
            model, optimizer = build(seed=7)
            ck.load_checkpoint(found, model=model, optimizer=optimizer)
            steps.append(found.step)
    return steps


def found_in(path: Path) -> ck.Checkpoint:
    found = ck.find_checkpoint(path)
    assert found is not None
    return found


# ---- Round trip --------------------------------------------------------------------------------


def states_of(optimizer):
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def test_round_trip_is_bitwise(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        model, optimizer = save(tmp_path, 5, scaler=scaler, device="cpu")
        expected_random = torch.rand(3)  # what comes next from the generator
        found = found_in(tmp_path)
        assert found.step == 5 and found.path == tmp_path / "step_00000005"
        assert found.manifest["world_size"] == 1 and found.manifest["device"] == "cpu"

        fresh, fresh_optimizer = build(seed=3)
        fresh_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        extra = ck.load_checkpoint(
            found, model=fresh, optimizer=fresh_optimizer, scaler=fresh_scaler
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(3, dtype=torch.float64), expected_random)
    assert extra["digest"] == 2**64 - 1 and extra["list"] == [1.5, "x"]
    assert torch.equal(extra["tensor"], torch.arange(3))
    assert fresh_scaler.state_dict() == scaler.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    for old, new in zip(states_of(optimizer), states_of(fresh_optimizer), strict=True):
        assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)


def test_the_manifest_lists_sizes_and_checksums(tmp_path):
    save(tmp_path, 5)
    manifest = read_json(tmp_path / "step_00000005" / "manifest.json")
    assert manifest["step"] == 5 and manifest["order_version"] == 1
    assert sorted(manifest["files"]) == ["model.pt", "training.pt"]
    for name, entry in manifest["files"].items():
        content = (tmp_path / "step_00000005" / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert names(tmp_path / "step_00000005") == ["manifest.json", "model.pt", "training.pt"]


def test_without_an_optimizer_only_the_model_is_loaded(tmp_path):
    model, _ = save(tmp_path, 5)
    fresh, _ = build(seed=3)
    before = torch.get_rng_state()
    ck.load_checkpoint(found_in(tmp_path), model=fresh)
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert torch.equal(before, torch.get_rng_state())


def test_tensors_of_a_gpu_load_without_one(tmp_path, monkeypatch):
    # The tags that torch.save gives to storages on a GPU, on the CPU's.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    model, _ = save(tmp_path, 5)
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):  # the tags are really there
            torch.load(tmp_path / "step_00000005" / "model.pt", weights_only=True)
    fresh, fresh_optimizer = build(seed=3)
    ck.load_checkpoint(found_in(tmp_path), model=fresh, optimizer=fresh_optimizer)
    assert torch.equal(fresh[0].weight, model[0].weight)


# ---- Which one, and which go -------------------------------------------------------------------


def test_pruning_counts_in_numbers(tmp_path):
    for step in (2, 9, 10, 99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step, keep=2)
        assert found_in(tmp_path).step == step
    assert names(tmp_path) == ["step_100000000", "step_100000001"]


@pytest.mark.parametrize(
    "scores, stay",
    [
        ((0.5, 0.9, 0.7, 0.8), [2, 4]),
        ((0.5, 0.9, 0.9, 0.8), [3, 4]),  # of equals the newest
        ((0.5, 0.6, 0.7, 0.8), [4]),
        ((0.5, None, math.nan, None), [1, 4]),
    ],
)
def test_the_best_one_stays(tmp_path, scores, stay):
    for step, score in enumerate(scores, 1):
        save(tmp_path, step, keep=1, score=score)
    assert loadable(tmp_path) == stay
    assert found_in(tmp_path).step == 4  # the newest is what a run continues from


@pytest.mark.parametrize("keep", [1, 0, -3])
def test_one_stays_in_any_case(tmp_path, keep):
    for step in (9, 10):
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == ["step_00000010"]
    assert loadable(tmp_path) == [10]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step_00000004" / "model.pt").write_bytes(b"broken")
    save(tmp_path, 4)
    assert names(tmp_path) == ["step_00000004"] and loadable(tmp_path) == [4]


def test_names_that_only_look_alike_are_left_alone(tmp_path, capfd):
    save(tmp_path, 4)
    for name in ("step_foo", "step_", "best", "step_00000099"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000098").write_text("a file")
    assert found_in(tmp_path).step == 4
    said = capfd.readouterr().err
    assert "step_00000099 skipped: manifest.json is missing" in said
    assert "step_00000098 skipped" in said
    ck.set_aside_newer(tmp_path, 4)
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["best", "step_", "step_00000005", "step_foo"]
    shutil.rmtree(tmp_path / "step_00000005")
    assert ck.find_checkpoint(tmp_path) is None
    assert "step_foo skipped" in capfd.readouterr().err


def test_where_it_looks(tmp_path, monkeypatch):
    directory = tmp_path / "run" / "checkpoints"
    assert ck.find_checkpoint(tmp_path / "run") is None
    save(directory, 3)
    save(directory, 12)
    for path in (tmp_path / "run", directory):
        assert found_in(path).path == directory / "step_00000012"
    assert found_in(directory / "step_00000003").step == 3
    copy = shutil.copytree(directory / "step_00000003", tmp_path / "my copy")
    assert found_in(copy).step == 3

    assert ck.resume_path("never", directory) is None
    assert ck.resume_path("auto", directory) == directory
    assert ck.resume_path(str(copy), directory) == copy
    # Started again by the launcher: what the run itself has saved comes first.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for resume in ("auto", "never", str(copy)):
        assert ck.resume_path(resume, tmp_path / "run") == tmp_path / "run"
    assert ck.resume_path("never", tmp_path / "new") is None
    assert ck.resume_path(str(copy), tmp_path / "new") == copy
    with pytest.raises(UsageError, match="--resume .*nowhere: no such run or checkpoint"):
        ck.resume_path(str(tmp_path / "nowhere"), directory)


def test_a_renamed_checkpoint_is_not_taken_for_the_newest(tmp_path, capfd):
    save(tmp_path, 3)
    shutil.copytree(tmp_path / "step_00000003", tmp_path / "step_00000050")
    assert found_in(tmp_path).path.name == "step_00000003"
    assert "step_00000050 skipped: its name is not that of step 3" in capfd.readouterr().err


def test_going_back_sets_the_newer_ones_aside(tmp_path, capfd):
    for step in (3, 6, 9):
        save(tmp_path, step)
    (tmp_path / "step_00000009" / "model.pt").unlink()
    ck.set_aside_newer(tmp_path, 3)
    assert "step_00000006 is newer than update 3" in capfd.readouterr().err
    assert found_in(tmp_path).step == 3
    assert len(names(tmp_path)) == 3  # they can be had back by renaming
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    ck.set_aside_newer(tmp_path, 4)
    ck.set_aside_newer(tmp_path / "missing", 4)
    assert loadable(tmp_path) == [3, 4]


# ---- Broken ones -------------------------------------------------------------------------------


class Evil:
    """A pickle that creates a file when it is loaded without care."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (os.system, (f"touch {self.trace}",))


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree with it."""
    (folder / name).write_bytes(content)
    manifest = read_json(folder / "manifest.json")
    manifest["files"][name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_json(folder / "manifest.json", manifest)


def edit_manifest(folder: Path, **changes) -> None:
    write_json(folder / "manifest.json", {**read_json(folder / "manifest.json"), **changes})


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


BROKEN = {
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "manifest.json is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "truncated manifest": (lambda f: truncate(f / "manifest.json") or truncate(f / "manifest.json"),
                           "manifest.json is missing or broken"),
    "binary manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\x00"), "broken"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "broken"),
    "files is a list": (lambda f: edit_manifest(f, files=["model.pt"]), "broken"),
    "nothing listed": (lambda f: edit_manifest(f, files={}), "does not list model.pt"),
    "odd entry": (lambda f: edit_manifest(f, files={"model.pt": 3}), "does not list model.pt"),
    "foreign manifest": (lambda f: edit_manifest(f, recipe=None), "has no recipe"),
    "step is text": (lambda f: edit_manifest(f, step="7"), "has no step"),
    "no model": (lambda f: (f / "model.pt").unlink(), "model.pt is missing"),
    "no training state": (lambda f: (f / "training.pt").unlink(), "training.pt is missing"),
    "truncated model": (lambda f: truncate(f / "model.pt"), "model.pt has .* bytes, not"),
    "empty training state": (lambda f: (f / "training.pt").write_bytes(b""), "has 0 bytes, not"),
    "tampered model": (lambda f: flip_a_bit(f / "model.pt"), "model.pt does not match its check"),
    "tampered state": (lambda f: flip_a_bit(f / "training.pt"), "training.pt does not match"),
    "forged garbage": (lambda f: forge(f, "model.pt", b"\x80\x02garbage"), "model.pt is broken"),
    "forged text": (lambda f: forge(f, "training.pt", b"hello"), "training.pt is broken"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_is_skipped_with_the_reason(tmp_path, capfd, kind):
    breaking, reason = BROKEN[kind]
    save(tmp_path, 5)
    save(tmp_path, 7)
    capfd.readouterr()
    breaking(tmp_path / "step_00000007")
    assert found_in(tmp_path).step == 5
    said = capfd.readouterr().err
    assert f"{tmp_path / 'step_00000007'} skipped: " in said
    assert re.search(reason, said), said
    assert ck.find_checkpoint(tmp_path / "step_00000007") is None  # named, too


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["model.pt", "training.pt"])
@pytest.mark.parametrize("writer", ["pickle", "torch.save"])
def test_a_pickle_that_would_run_code_is_not_executed(tmp_path, capfd, name, writer):
    save(tmp_path, 5)
    save(tmp_path, 7)
    trace, evil = tmp_path / "trace", tmp_path / "evil"
    if writer == "pickle":
        evil.write_bytes(pickle.dumps(Evil(trace)))
    else:
        torch.save({"weight": Evil(trace)}, evil)
    forge(tmp_path / "step_00000007", name, evil.read_bytes())
    assert found_in(tmp_path).step == 5
    assert f"{name} is broken, or holds more than tensors" in capfd.readouterr().err

    manifest = read_json(tmp_path / "step_00000007" / "manifest.json")
    forged = ck.Checkpoint(tmp_path / "step_00000007", 7, manifest)
    with pytest.raises(ExplainedError, match=f"step_00000007/{name} cannot be read: .* could run"):
        ck.load_checkpoint(forged, model=build()[0])
    assert not trace.exists()
    if writer == "pickle":
        pickle.loads(evil.read_bytes())
    else:
        torch.load(evil, weights_only=False)
    assert trace.exists()  # the bait was real


def test_a_file_that_may_not_be_read_is_skipped(tmp_path, capfd, monkeypatch):
    save(tmp_path, 5)
    save(tmp_path, 7)
    plain_open = Path.open

    def refuse(self, *args, **kwargs):  # root, as whom tests may run, reads everything
        if self.parent.name == "step_00000007" and self.name == "model.pt":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return plain_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    assert found_in(tmp_path).step == 5
    assert "Permission denied" in capfd.readouterr().err


def test_another_model_is_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(UsageError, match=r"step_00000005 is of another model: size mismatch"):
        ck.load_checkpoint(found_in(tmp_path), model=build(width=6)[0])
    with pytest.raises(UsageError, match="another model"):
        ck.load_checkpoint(found_in(tmp_path), model=torch.nn.Linear(3, 4))
    model, _ = build()
    halves = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
    with pytest.raises(UsageError, match="parameter group"):
        ck.load_checkpoint(
            found_in(tmp_path), model=model, optimizer=torch.optim.AdamW(halves, lr=0.1)
        )


# ---- Recipe ------------------------------------------------------------------------------------


def test_another_recipe_is_refused_with_both_values(tmp_path):
    save(tmp_path, 5)
    found = found_in(tmp_path)
    ck.check_same_recipe(found, dict(RECIPE), 100)
    ck.check_same_recipe(found, dict(RECIPE), 250)  # more updates than before
    with pytest.raises(UsageError, match="total_steps=99 .* made for 100"):
        ck.check_same_recipe(found, dict(RECIPE), 99)
    with pytest.raises(UsageError) as caught:
        ck.check_same_recipe(found, {**RECIPE, "lr": 0.2, "model": "other", "extra": 1}, 100)
    for text in ("lr=0.2 but", "made with 0.1", "model='other'", "'net'", "extra=1", "None"):
        assert text in str(caught.value)
    assert "seed" not in str(caught.value)
    missing = {key: value for key, value in RECIPE.items() if key != "seed"}
    with pytest.raises(UsageError, match="seed=None but the checkpoint was made with 0"):
        ck.check_same_recipe(found, missing, 100)
    edit_manifest(found.path, order_version=77)
    with pytest.raises(UsageError, match="version 1 but .* 77"):
        ck.check_same_recipe(found_in(tmp_path), dict(RECIPE), 100)


def test_the_recipe_is_what_is_learnt_not_how_it_is_run():
    flags = {"lr": 0.1, "seed": 1, "global_batch_size": 8}
    free = {"micro_batch_size": 2, "epochs": 3, "output_dir": "x", "tracker": "none", "bn_group": 4}
    recipe = ck.recipe_of({**flags, **free}, bn_group=2, data_fingerprint="abc")
    assert recipe == {**flags, "bn_group": 2, "data_fingerprint": "abc"}


# ---- A save that fails -------------------------------------------------------------------------


def fail_writing(monkeypatch, after: int) -> None:
    """A disk that is full after so many calls of fsync."""
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("after", range(4))  # model, training state, manifest, folder
def test_full_disk_leaves_the_older_ones(tmp_path, monkeypatch, after):
    save(tmp_path, 5, keep=1)
    fail_writing(monkeypatch, after)
    with pytest.raises(ExplainedError) as caught:
        save(tmp_path, 7, keep=1)
    assert "checkpoint of step 7 could not be written" in str(caught.value)
    assert "No space left" in str(caught.value) and "make space" in str(caught.value)
    assert names(tmp_path) == ["step_00000005"] and loadable(tmp_path) == [5]
    monkeypatch.undo()
    save(tmp_path, 7, keep=1)
    assert loadable(tmp_path) == [7]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExplainedError, match="step 7 could not be written to .*file/checkpoints"):
        save(tmp_path / "file" / "checkpoints", 7)


def test_an_old_one_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch, capfd):
    save(tmp_path, 5)

    def refuse(path, *args, **kwargs):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(tmp_path, 7, keep=1)
    assert "step_00000005 not removed: [Errno" in capfd.readouterr().err
    assert found_in(tmp_path).step == 7


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a tmpfs here (needs root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_disk(small_disk):
    directory = small_disk / "checkpoints"
    big = 8192  # hidden units: a checkpoint of 0.85 MB
    save(directory, 1, width=big)
    save(directory, 2, width=big)
    free = shutil.disk_usage(small_disk).free
    for step in (3, 4):
        with pytest.raises(ExplainedError, match=f"step {step} could not be written .*make space"):
            save(directory, step, width=big)
        assert names(directory) == ["step_00000001", "step_00000002"]
        assert shutil.disk_usage(small_disk).free == free  # nothing is left of the attempt
    model, optimizer = build(big)
    ck.load_checkpoint(found_in(directory), model=model, optimizer=optimizer)
    shutil.rmtree(directory / "step_00000001")  # the user makes space
    save(directory, 4, width=big)
    assert found_in(directory).step == 4


# ---- Several processes -------------------------------------------------------------------------


def rank_of() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def save_in_group(directory: Path, step: int) -> list[float]:
    model, optimizer = build()
    train(model, optimizer)
    torch.manual_seed(100 + rank_of())  # dropout differs between ranks
    ck.save_checkpoint(
        directory,
        step,
        model=model,
        optimizer=optimizer,
        scaler=None,
        extra={},
        manifest={"recipe": RECIPE, "total_steps": 100},
        keep=2,
    )
    return torch.rand(4).tolist()


def load_in_group(directory: Path) -> tuple[int, list[float], float]:
    found = ck.find_checkpoint(directory)
    assert found is not None
    model, optimizer = build(seed=5)
    ck.load_checkpoint(found, model=model, optimizer=optimizer, seed=3)
    return found.step, torch.rand(4).tolist(), model[0].weight.double().sum().item()


def test_generators_continue_or_start_anew(pool, tmp_path):
    for size in (1, 2, 4):
        following = pool.run(size, save_in_group, tmp_path, size)
        manifest = found_in(tmp_path).manifest
        assert manifest["step"] == manifest["world_size"] == size
        for other in (1, 2, 4):
            replies = pool.run(other, load_in_group, tmp_path)
            assert {reply[0] for reply in replies} == {size}
            assert len({reply[2] for reply in replies}) == 1
            numbers = [reply[1] for reply in replies]
            assert (numbers == following) == (other == size)
            assert len({tuple(n) for n in numbers}) == other  # never the same on two ranks
            if other != size:  # a function of (seed, step, rank): the same at a second try
                assert [r[1] for r in pool.run(other, load_in_group, tmp_path)] == numbers


def fail_in_group(directory: Path) -> tuple[str, str]:
    import torch.distributed as dist

    if rank_of() == 0:
        plain = os.fsync
        os.fsync = lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
    try:
        save_in_group(directory, 9)
        return "", ""
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        if rank_of() == 0:
            os.fsync = plain
        dist.barrier()  # all of them are here


def test_all_ranks_learn_of_a_full_disk(pool, tmp_path):
    save(tmp_path, 5)
    replies = pool.run(4, fail_in_group, tmp_path)
    for kind, message in replies:
        assert kind == "ExplainedError" and "checkpoint of step 9 could not be written" in message
    assert "rank 0" in replies[1][1]
    assert loadable(tmp_path) == [5]


def skip_in_group(directory: Path) -> str:
    found = ck.find_checkpoint(directory)
    return found.path.name if found else ""


def test_the_main_process_decides_for_all(pool, tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 7)
    truncate(tmp_path / "step_00000007" / "model.pt")
    assert pool.run(2, skip_in_group, tmp_path) == ["step_00000005"] * 2


# ---- Killed in the middle ----------------------------------------------------------------------


CHANGES = {"mkdir", "fsync", "replace", "rename", "unlink", "rmdir"}  # calls that change the disk


def save_and_die(directory: Path, point: int, every_line: bool) -> None:
    """Save step 7, and SIGKILL before the given change of the disk, or at the given line."""
    torch.set_num_threads(1)
    left = [point]

    def count_down():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def profile(frame, event, argument):
        if event == "c_call" and argument.__name__ in CHANGES:
            count_down()

    def trace(frame, event, argument):
        if Path(frame.f_code.co_filename).name not in ("checkpoint.py", "files.py"):
            return None
        if event == "line":
            count_down()
        return trace

    model, optimizer = build()
    sys.settrace(trace) if every_line else sys.setprofile(profile)
    ck.save_checkpoint(
        directory,
        7,
        model=model,
        optimizer=optimizer,
        scaler=None,
        extra={},
        manifest={"recipe": RECIPE, "total_steps": 100},
        keep=1,
    )
    sys.settrace(None)
    sys.setprofile(None)


@pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")
@pytest.mark.parametrize("every_line", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kill_at_every_point_of_a_save(tmp_path, capfd, every_line):
    context = multiprocessing.get_context("fork")
    save(tmp_path / "template", 3)
    save(tmp_path / "template", 5)
    seen, left_behind, point = [], 0, 0
    while True:
        point += 1
        directory = shutil.copytree(tmp_path / "template", tmp_path / str(point))
        process = context.Process(target=save_and_die, args=(directory, point, every_line))
        process.start()
        process.join()
        left_behind += any(name.startswith(".") for name in names(directory))
        found = found_in(directory)
        assert found.step in (5, 7)
        seen.append(found.step)
        assert not capfd.readouterr().err  # no half of one under a name that counts
        model, optimizer = build()
        ck.load_checkpoint(found, model=model, optimizer=optimizer)
        save(directory, 9, keep=2)
        assert names(directory) == [f"step_{found.step:08d}", "step_00000009"]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert seen == sorted(seen) and seen[-1] == 7  # once there, it stays
    assert seen.count(5) >= 6 and seen.count(7) >= 6 and left_behind >= 6, (seen, left_behind)
