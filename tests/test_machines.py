"""Two machines with two processes each: checkpoints on disks of their own, or on one for all."""

import contextlib
import io
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.test_checkpoint import RECIPE, build, train
from utils import checkpoint as ck
from utils import hub
from utils.errors import ExplainedError, UsageError
from utils.machines import find_on_each_machine, is_first_on_disk, on_local_main_processes

RUN = Path("run")  # below each machine's own folder


def enter_machine(folder: Path, shared: bool) -> int:
    """Be a process of machine 0 or 1 (its number), in a folder on its disk."""
    machine, local_rank = divmod(dist.get_rank(), 2)
    os.environ["LOCAL_RANK"] = str(local_rank)
    disk = folder / ("shared" if shared else f"disk{machine}")
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    return machine


def save(step: int) -> int:
    """Save; how often this process has written a manifest."""
    written = []
    plain = ck.write_json
    ck.write_json = lambda *args: (written.append(args), plain(*args))
    model, optimizer = build()
    train(model, optimizer)
    try:
        ck.save_checkpoint(
            RUN / "checkpoints",
            step,
            model=model,
            optimizer=optimizer,
            scaler=None,
            extra={},
            manifest={"recipe": RECIPE, "total_steps": 100},
            keep=9,
            on_each_node=True,
        )
    finally:
        ck.write_json = plain
    return len(written)


def look(path: Path = RUN) -> tuple[str, str]:
    """The checkpoint that all have, and what was said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        found = ck.find_checkpoint(path, on_each_node=True)
    dist.barrier()
    return (found.path.as_posix() if found else "", said.getvalue())


def save_and_look(folder: Path, shared: bool):
    enter_machine(folder, shared)
    writes = [save(5), save(7)]
    hidden = sorted(path.name for path in (RUN / "checkpoints").glob(".*"))
    return writes, look()[0], hidden


@pytest.mark.parametrize("shared", [False, True])
def test_each_disk_is_written_once(pool, tmp_path, shared):
    replies = pool.run(4, save_and_look, tmp_path, shared)
    writers = [writes for writes, _, _ in replies]
    assert writers == [[1, 1], [0, 0], [0, 0] if shared else [1, 1], [0, 0]]
    for _, newest, hidden in replies:
        assert newest == "run/checkpoints/step_00000007" and hidden == []


def lose_some(folder: Path):
    machine = enter_machine(folder, shared=False)
    for step in (5, 7, 9):
        save(step)
    main = os.environ["LOCAL_RANK"] == "0"
    if main and machine == 1:
        shutil.rmtree(RUN / "checkpoints" / "step_00000009")
    dist.barrier()
    newest_of_all = look()
    found = ck.find_checkpoint(RUN)  # as if they shared a disk
    assert found is not None and found.step == 9
    try:
        ck.load_checkpoint(found, model=build()[0])
        error = ""
    except ExplainedError as failure:
        error = f"{failure}"
    if main and machine == 0:  # one of step 7, but of another save
        path = RUN / "checkpoints" / "step_00000007" / ck.MANIFEST
        path.write_text(path.read_text().replace('"save_id": "', '"save_id": "other'))
    dist.barrier()
    named = look(RUN / "checkpoints" / "step_00000009")
    return newest_of_all, error, look(), named


def test_the_newest_one_that_all_machines_have(pool, tmp_path):
    replies = pool.run(4, lose_some, tmp_path)
    for newest, _, older, named in replies:
        assert newest[0] == "run/checkpoints/step_00000007"
        assert older[0] == "run/checkpoints/step_00000005" and named[0] == ""
    said = replies[0][0][1] + replies[0][2][1]
    assert "step_00000009 skipped: not on machine 1" in said
    assert "step_00000007 skipped: of different saves" in said
    errors = [error for _, error, _, _ in replies]
    assert errors[:2] == ["", ""] and "not on this machine" in errors[2] + errors[3]
    assert "--save-on-each-node" in errors[2]


def fail_on_one(folder: Path, kind: type[Exception]):
    machine = enter_machine(folder, shared=False)

    def fail() -> None:
        if machine == 1:
            raise kind("disk full")

    try:
        on_local_main_processes(fail)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_failure_on_one_machine_is_everybodys(pool, tmp_path):
    replies = pool.run(4, fail_on_one, tmp_path, OSError)
    assert replies[2] == ("OSError", "disk full")
    assert {replies[0], replies[1], replies[3]} == {
        ("ExplainedError", "rank 2: OSError: disk full")
    }
    replies = pool.run(4, fail_on_one, tmp_path, UsageError)
    assert set(replies) == {("UsageError", "disk full")}


def test_one_process_is_first_on_its_disk(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert is_first_on_disk(tmp_path / "new", ".mark_")
    assert list((tmp_path / "new").iterdir()) == []
    assert on_local_main_processes(lambda: 3) == [3]


def fetch(folder: Path, name: str) -> list[str]:
    """What was there when this process has downloaded `name`; [] when it has not."""
    machine, found = enter_machine(folder, shared=True), []

    def download(wanted: str) -> None:
        found.extend(sorted(path.name for path in Path().iterdir()) or ["nothing"])
        Path(f"{wanted.replace('/', '-')} of machine {machine}").touch()

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    plain, hub.open_dataset = hub.open_dataset, download
    try:
        assert find_on_each_machine(name, lambda: 5) == 5
    finally:
        hub.open_dataset = plain
    return found


def test_one_download_on_each_machine_the_first_by_rank_0(pool, tmp_path):
    replies = pool.run(4, fetch, tmp_path, "owner/name")
    assert replies == [["nothing"], [], ["owner-name of machine 0"], []]
    assert pool.run(4, fetch, tmp_path, str(tmp_path)) == [[]] * 4


def unreachable(name: str) -> str:
    def refuse(wanted: str) -> None:
        raise hub.HubUnreachable(f"{wanted} is not in the cache")

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    plain, hub.open_dataset = hub.open_dataset, refuse
    try:
        assert find_on_each_machine(name, lambda: 5) == 5
    except UsageError as error:
        return f"{error}"
    finally:
        hub.open_dataset = plain
    return ""


def test_a_hub_that_is_out_of_reach(pool):
    for said in pool.run(2, unreachable, "owner/name"):
        assert said.startswith("--dataset owner/name: owner/name is not in the cache. run `hf down")
