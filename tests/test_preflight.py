"""`--preflight`: every fault of the list is caught by its own check, and clean scripts pass."""

import json
import re

import pytest

from tests.faults import BUILT, FAULTS, HANGS, Fault, after, run_preflight
from utils.preflight.world import judge_devices

CHECKS = (
    "world devices data random model unused batchnorm gradient schedule evaluation".split()
)  # in this order


def results_of(answer: dict) -> dict[str, str]:
    return {entry["check"]: entry["result"] for entry in answer["report"]["checks"]}


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_fault_is_caught_by_its_check_alone(pool, tmp_path, fault):
    answer = pool.run(fault.processes, run_preflight, fault, str(tmp_path), init=False)[0]
    assert answer["report"] is not None, answer
    caught = {name: r for name, r in results_of(answer).items() if r in ("warn", "fail")}
    assert list(caught) == [fault.check], answer["report"]["checks"]
    assert caught[fault.check] in fault.results
    entry = next(e for e in answer["report"]["checks"] if e["check"] == fault.check)
    assert fault.remedy in f"{entry['seen']} {entry['remedy']}" and entry["remedy"]
    assert answer["code"] == (1 if "fail" in caught.values() else 0)


CLEAN = [
    Fault("one process", "", "", processes=1),
    Fault("two processes", "", ""),
    Fault("four processes, synchronised", "", "", processes=4),
    Fault("one process, ghost split", "", "", processes=1, config={"global_batch_size": 32}),
    Fault("accumulation", "", "", processes=1, config={"micro_batch_size": 8}),
    Fault(
        "accumulation, synchronised",
        "",
        "",
        config={"micro_batch_size": 4, "bn_group": 8, "max_grad_norm": 0.1},
    ),
    Fault("micro-batches of two", "", "", processes=4, config={"micro_batch_size": 2}),
    Fault("bf16", "", "", environment={"ACCELERATE_MIXED_PRECISION": "bf16"}),
    Fault(
        "bf16, four processes, accumulation",
        "",
        "",
        processes=4,
        config={"micro_batch_size": 2},
        environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
    ),
    Fault("bf16 hook", "", "", config={"comm_hook": "bf16"}),
    Fault("some without a label", "", "", data={"unlabelled": 0.3}),
    Fault("one epoch", "", "", config={"epochs": 1}),
    Fault("no smoothing", "", "", config={"label_smoothing": 0.0}),
    Fault(
        "dropout",
        "",
        "",
        [after(BUILT, "model.fc = torch.nn.Sequential(torch.nn.Dropout(0.5), model.fc)")],
    ),
    Fault(
        "functional dropout",
        "",
        "",
        [after(BUILT, "model.fc.register_forward_hook(lambda *a: F.dropout(a[-1], 0.3))")],
    ),
    Fault(
        "no augmentation",
        "",
        "",
        [('    return to_input({**batch, "image": images})', "    return to_input(batch)")],
    ),
    Fault(
        "no BatchNorm, bias in front of none",
        "",
        "",
        [after(BUILT, "model.bn1 = torch.nn.GroupNorm(4, 64)")],
    ),
    Fault(
        "a frozen layer",
        "",
        "",
        [after(BUILT, "model.layer1.requires_grad_(False)")],
    ),
    Fault(
        "workers and learning rate as it is",
        "",
        "",
        config={"num_workers": 1, "warmup_fraction": 0.0},
    ),
    Fault(
        "unused head, searched for",
        "",
        "",
        [after(BUILT, "model.auxiliary = torch.nn.Linear(64, 4)")],
        config={"find_unused_parameters": True},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CLEAN])
def test_no_false_alarm(pool, tmp_path, case):
    answer = pool.run(case.processes, run_preflight, case, str(tmp_path), init=False)[0]
    assert answer["report"] is not None, answer
    results = results_of(answer)
    assert list(results) == CHECKS
    assert set(results.values()) == {"pass"}, answer["report"]["checks"]
    assert answer["code"] == 0
    assert len(answer["report"]["ranks"]) == case.processes


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in HANGS])
def test_a_hang_is_reported_and_the_job_ended(pool, tmp_path, fault):
    with pytest.raises(AssertionError, match="the worker process died"):
        pool.run(fault.processes, run_preflight, fault, str(tmp_path), init=False)
    report = json.loads((tmp_path / "run" / "preflight.json").read_text())
    results = {entry["check"]: entry["result"] for entry in report["checks"]}
    assert results[fault.check] == "fail" and list(results) == CHECKS
    entry = next(e for e in report["checks"] if e["check"] == fault.check)
    assert fault.remedy in entry["remedy"] and "rank 0 at work; rank 1 waiting" in entry["seen"]
    assert set(list(results.values())[CHECKS.index(fault.check) + 1 :]) <= {"not run"}
    assert not report["ok"]


def device(**changes) -> dict:
    """What a rank of a machine with two GPUs has to say of its device."""
    facts = dict(host="a", device="cuda:0", index=0, count=2, uuid="u0", name="G", free=9, total=10)
    return facts | dict(parameters_on=["cuda:0"], elsewhere=[], threads=1, cores=2) | changes


SECOND = dict(device="cuda:1", index=1, uuid="u1", parameters_on=["cuda:1"])


@pytest.mark.parametrize(
    ("second", "result", "words"),
    [
        (SECOND, "pass", ""),
        ({**SECOND, "host": "b", "uuid": "u0"}, "pass", ""),
        ({**SECOND, "device": "cuda:2", "index": 2}, "fail", "ordinal.*num_processes"),
        ({}, "fail", "ranks 0, 1 share.*num_processes"),
        ({**SECOND, "parameters_on": ["cuda:0"]}, "fail", "parameters on cuda:0.*prepare"),
        ({**SECOND, "elsewhere": [0]}, "fail", "memory on GPU 0.*accelerator.device"),
        ({**SECOND, "free": 0}, "warn", "0%.*nvidia-smi"),
        ({**SECOND, "name": "H"}, "warn", "G and H.*slowest"),
    ],
)
def test_devices(monkeypatch, second, result, words):
    monkeypatch.setattr("utils.preflight.runner.world_size", lambda: 3)
    finding = judge_devices([device(), device(**second)])
    assert finding.result == result
    assert re.search(words, f"{finding.seen} {finding.remedy}")
