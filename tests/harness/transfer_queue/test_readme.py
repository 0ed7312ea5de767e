"""What the folder's README shows runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.project import ROOT

README = ROOT / "harness/transfer_queue/README.md"


def test_the_examples_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for example in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        exec(example, names)
    printed = capsys.readouterr().out
    assert "Batch(partition='train_0', rows=array([0, 1, 2, 3]" in printed
    assert "{'tokens': 0, 'reward': 1}" in printed
