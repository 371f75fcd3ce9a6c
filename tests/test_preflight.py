"""`--preflight`: every fault of the list is caught by its own check, and clean scripts pass."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.preflight_faults import BUILT, FAULTS, HANGS, Fault, after, run_preflight
from utils.preflight.gradient import _errors
from utils.preflight.model import judge_unused
from utils.preflight.speed import judge_network, judge_speed
from utils.preflight.state import checksum
from utils.preflight.world import judge_devices

CHECKS = (  # in this order
    "world devices data random model memory unused batchnorm gradient schedule evaluation "
    "network speed checkpoint tracker"
).split()


def results_of(answer: dict) -> dict[str, str]:
    return {entry["check"]: entry["result"] for entry in answer["report"]["checks"]}


def cases(faults: list[Fault], fast: int) -> list:
    """Parameters of a test; of each check the first `fast` cases, the slow tier runs all."""
    seen: Counter[str] = Counter()
    parameters = []
    for fault in faults:
        seen[fault.check] += 1
        marks = [pytest.mark.slow] if seen[fault.check] > fast else []
        parameters.append(pytest.param(fault, id=fault.name, marks=marks))
    return parameters


@pytest.mark.parametrize("fault", cases(FAULTS, fast=1))
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
        [('to_input(data, {**batch, "image": images})', "to_input(data, batch)")],
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
        "torchvision's frozen BatchNorm",
        "",
        "",
        [after(BUILT, "model.bn1 = __import__('torchvision').ops.FrozenBatchNorm2d(64)")],
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


@pytest.mark.parametrize("case", cases(CLEAN, fast=4))
def test_no_false_alarm(pool, tmp_path, case):
    answer = pool.run(case.processes, run_preflight, case, str(tmp_path), init=False)[0]
    assert answer["report"] is not None, answer
    results = results_of(answer)
    assert list(results) == CHECKS
    assert set(results.values()) == {"pass"}, answer["report"]["checks"]
    assert answer["code"] == 0
    assert len(answer["report"]["ranks"]) == case.processes


@pytest.mark.slow
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


def test_unused_parameters():
    names = ["head.weight"]
    assert judge_unused([names], 9, False, in_ddp=False).result == "warn"
    assert judge_unused([names], 9, False, in_ddp=True).result == "fail"
    assert judge_unused([names, names], 9, True, in_ddp=True).result == "pass"
    searched = judge_unused([[], []], 9, True, in_ddp=True)
    assert searched.result == "warn" and "leave out" in searched.remedy
    partly = judge_unused([names, []], 9, False, in_ddp=True)
    assert partly.result == "fail" and "head.weight" in partly.seen and "rank 0" in partly.seen


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


def test_checksum_is_of_the_content_alone():
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ):
        values = torch.arange(12).to(dtype)
        rows = values.repeat(3).view(3, 12)
        assert {checksum(row) for row in rows} == {checksum(values)}
        assert checksum(rows[:, :5].t()) == checksum(rows[:, :5].t().contiguous())
        assert checksum(values.view(3, 4)) != checksum(values)
        assert checksum(values.flip(0)) != checksum(values) or dtype == torch.bool
    assert checksum(torch.ones(4)) != checksum(torch.ones(4, dtype=torch.int32))
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(-1.0))


def network_facts(link: float, bandwidth: float = 1e9) -> dict:
    return {"round_trip": 1e-4, "bandwidth": bandwidth, "link": link}


def test_network_names_one_slow_link():
    links = [1e9, 1.1e9, 0.3e9, 0.9e9]
    finding = judge_network([network_facts(link) for link in links])
    assert finding.result == "warn" and "machine of rank 2" in finding.seen
    assert "NCCL_SOCKET_IFNAME" in finding.remedy
    assert judge_network([network_facts(link) for link in (1e9, 0.6e9, 0.9e9)]).result == "pass"
    assert judge_network([network_facts(0.0)] * 2).result == "pass"


@pytest.mark.parametrize(
    ("second", "result", "words"),
    [
        ({}, "pass", "5% communicating"),
        ({"alone": 1.4}, "warn", "rank 1 computes 1.5.*straggler"),
        ({"wait": 0.6}, "warn", "bottleneck"),
        (
            {"seconds": 2.0},
            "warn",
            "communication-bound: about 5.%.*larger batch.*accum.*comm hook",
        ),
        ({"grows": "4x10"}, "fail", "rank 1.*4x10.*graph"),
    ],
)
def test_speed_on_accelerators(second, result, words):
    facts = dict(processes=2, threads=0, cores=8, updates=10, seconds=1.0, alone=0.95, wait=0.0)
    facts |= dict(grows="", peak=1)
    job = SimpleNamespace(
        plan=SimpleNamespace(global_batch_size=8), total_steps=9, device=torch.device("cuda")
    )
    finding = judge_speed([facts, facts | second], job)
    assert finding.result == result
    assert re.search(words, f"{finding.seen} {finding.remedy}")


@pytest.mark.parametrize(("processes", "result"), [(2, "pass"), (1, "warn")])
def test_communication_on_cpus_is_judged_between_machines(processes, result):
    facts = dict(processes=processes, threads=2, cores=8, updates=10, seconds=1.0, alone=0.1)
    facts |= dict(wait=0.0, grows="", peak=1)
    job = SimpleNamespace(
        plan=SimpleNamespace(global_batch_size=8), total_steps=9, device=torch.device("cpu")
    )
    slower = judge_speed([facts, facts | {"alone": 0.2}], job)
    assert slower.result == result and ("about 80%" in slower.seen) == (result == "warn")


def state_after_preflight(directory: str, config: dict) -> list[str]:
    """What of the script's state is another one after its preflight than before."""
    from utils.preflight import checks
    from utils.preflight.state import fingerprint, generator_states

    states = []

    def state(job) -> dict:
        values = {f"weights {k}": v for k, v in fingerprint(job.plain_model).items()}
        values |= {f"generator {k}": repr(v) for k, v in generator_states().items()}
        values["optimizer"] = repr(job.optimizer.state_dict())
        values["windows"] = [
            layer.bn_window.total().sum().item() for _, layer in job.bn_plan.layers
        ]
        values["counters"] = (job.accelerator.step, job.sampler.start_step)
        values["modes"] = [module.training for module in job.plain_model.modules()]
        values["gradients"] = [p.grad is None for p in job.plain_model.parameters()]
        values["loader"] = job.train_loader.loader.generator.get_state().tolist()
        return values

    def check_all(job) -> int:
        states.append(state(job))
        entries = checks.run_checks(job, checks.ALL)
        states.append(state(job))
        return int(any(entry.finding.result != "pass" for entry in entries))

    with mock.patch("utils.preflight.check_all", check_all):
        answer = run_preflight(Fault("", "", "", config=config), directory)
    assert answer["code"] == 0, answer
    before, after = states
    return [key for key in before if before[key] != after[key]]


@pytest.mark.parametrize("processes", [1, 2])
def test_training_state_is_as_before(pool, tmp_path, processes):
    config = {"micro_batch_size": 8 // processes}
    changed = pool.run(processes, state_after_preflight, str(tmp_path), config, init=False)
    assert changed == [[]] * processes


def start_in_this_process(fault: Fault, directory: str, dtype) -> dict:
    """A normal run of the edited script, of two updates."""
    config = {**fault.config, "preflight": False, "max_steps": 2}
    return run_preflight(replace(fault, config=config), directory, dtype)


@pytest.mark.parametrize(
    "name", ["same shard twice", "NaN pixels", "one rank loaded other weights"]
)
def test_a_normal_start_is_stopped_by_a_fail(pool, tmp_path, name):
    fault = next(fault for fault in FAULTS if fault.name == name)
    answers = pool.run(2, start_in_this_process, fault, str(tmp_path), torch.float32, init=False)
    for answer in answers:
        assert answer["error"].startswith(f"ExplainedError: {fault.check}:"), answer
        assert fault.remedy in answer["error"]


def test_a_clean_start_says_nothing_and_trains(pool, tmp_path):
    clean = Fault("", "", "", config={"bn_group": 16})
    answers = pool.run(2, start_in_this_process, clean, str(tmp_path), torch.float64, init=False)
    assert [answer["code"] for answer in answers] == [0, 0], answers


def test_in_float64(pool, tmp_path):
    clean = Fault("", "", "", config={"bn_group": 16})
    answer = pool.run(2, run_preflight, clean, str(tmp_path), torch.float64, init=False)[0]
    assert set(results_of(answer).values()) == {"pass"}, answer


@pytest.mark.slow
def test_launched(tmp_path):
    """As a user starts it: the report fits 100 columns, the exit code is 0."""
    command = "accelerate.commands.launch --config_file accelerate_configs/cpu_2.yaml".split()
    flags = "--dataset digits --subset 300 --global-batch-size 32 --bn-group 16 --tracker none"
    done = subprocess.run(
        [sys.executable, "-m", *command, "train/cifar.py", "--preflight", *flags.split()]
        + ["--output-dir", str(tmp_path / "run")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert report["ok"] and len(report["ranks"]) == 2
    table = done.stdout[done.stdout.index("rank  local") : done.stdout.index("preflight passed")]
    assert max(map(len, table.splitlines())) <= 100
    assert not list((tmp_path / "run").glob("check*"))  # nothing was trained


def test_what_rounding_excuses_in_the_gradient():
    generator = torch.Generator().manual_seed(0)

    def noisy(gradients, share):
        noise = {n: torch.randn(g.shape, generator=generator) for n, g in gradients.items()}
        return {n: g + share * g.norm() * noise[n] / noise[n].norm() for n, g in gradients.items()}

    exact = {f"p{i}": torch.randn(50, generator=generator) for i in range(6)}
    names = list(exact)
    plain = noisy(exact, 2e-2)  # rounding alone, in one process

    def figures(ours, plain=plain):
        found = _errors(ours, plain, exact, names, measured=True)
        return found["excess"] > 1, found["noisy"], found["left_out"]

    assert figures(noisy(exact, 1e-5)) == (False, 0, 0)  # better than the excuse: nothing hides
    assert figures(noisy(exact, 2e-2)) == (False, 6, 0)
    wrong = {name: 0.68 * gradient for name, gradient in exact.items()}
    assert figures(wrong) == (True, 6, 0)
    assert figures(wrong, noisy(exact, 5e-2)) == (False, 6, 6)  # it might be rounding
    assert figures(noisy(exact, 1e-5), noisy(exact, 5e-2)) == (False, 0, 0)
