"""Where real runs are written, and what makes them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked_drivers import Drivers, forked_drivers


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One results folder for all tests of a process: the warm start and MLflow's database are made once."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="session")
def drivers() -> Iterator[Drivers]:
    """For all runs of a process."""
    with forked_drivers() as drivers:
        yield drivers
