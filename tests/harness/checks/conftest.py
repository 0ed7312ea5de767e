"""A folder of a user's own code, from where jobs are composed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import forget_lab, make_lab


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
