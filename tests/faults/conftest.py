"""Launchers for the tests of this folder."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.faults.job import PACE, SCRIPT, flags, wait_for
from tests.test_configs import ACCELERATE, launch_environment, shipped


class Launch:
    """A launcher with its output in a file; what it has started is gone after `close`."""

    def __init__(self, directory: Path, config: str, *launcher: str, fault: str = PACE, **changes):
        self.directory = directory
        self.log = directory.with_name(f"{directory.name}.log")
        command = [*ACCELERATE, *shipped(config), *launcher, str(SCRIPT)]
        self.process = subprocess.Popen(
            [*command, *flags(directory, **changes)],
            env=launch_environment(directory.parent, FAULT=fault),
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.family: list[psutil.Process] = []

    def find_family(self) -> None:
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def alive(self) -> list[psutil.Process]:
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def wait_until_all_are_gone(self, seconds: float) -> None:
        wait_for(lambda: not self.alive(), seconds, "end of all processes")

    def output(self) -> str:
        return self.log.read_text()

    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())

    def close(self) -> None:
        for process in self.alive():
            process.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def launch():
    started: list[Launch] = []

    def start(*args, **kwargs) -> Launch:
        started.append(Launch(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.close()
