import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve other processes

import pytest

from tests.pool import WorkerPool

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items):
    import torch

    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no accelerator"))


@pytest.fixture(scope="session")
def pool():
    """Worker processes for `pool.run(world_size, function, ...)`; see tests/pool.py."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def real_data():
    """Folder of real data sets (REAL_DATA_DIR); tests that need it are skipped without."""
    folder = os.environ.get("REAL_DATA_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("REAL_DATA_DIR is not set")
    return Path(folder)
