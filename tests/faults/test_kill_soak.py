"""The kill soak (kill_soak.py), short here: 50 kills are run by hand."""

import pytest

from tests.faults.kill_soak import soak


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_again_and_again(tmp_path, kills):
    figures = soak(tmp_path, kills)
    assert figures["kills"] == kills and figures["inside"] >= kills // 4
