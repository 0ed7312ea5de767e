"""A folder of a user's own code, from where jobs are composed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import make_lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, from which `my_lab` can be imported; forgotten afterwards."""
    folder = make_lab(tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
