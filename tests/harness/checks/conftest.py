"""A folder of a user's own code, from where jobs are composed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import make_lab


def forget_lab() -> None:
    """Its modules, of whichever folder they were imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, from which `my_lab` can be imported: not one that another test left, and forgotten
    afterwards."""
    folder = make_lab(tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    forget_lab()
    yield folder
    forget_lab()
