"""Where real runs are written, and what makes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.forked_runs import ForkedRuns
from tests.support.forked_drivers import Drivers


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One results folder for all tests of a process: the warm start and MLflow's database are made once."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="session")
def drivers() -> Iterator[Drivers]:
    """Imports once for all runs of a process; nothing before the first of them."""
    with ForkedRuns() as runs:
        yield Drivers(runs)
