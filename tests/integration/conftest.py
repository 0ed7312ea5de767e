"""Where real runs are written."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One results folder for all tests of a process: the warm start and MLflow's database are made once."""
    return tmp_path_factory.mktemp("results")
