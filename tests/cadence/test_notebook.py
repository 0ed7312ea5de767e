"""The notebook in examples/, whose cells are run in their order as Jupyter would."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.pyplot import close

from tests.support.project import ROOT


def test_the_notebook_runs_and_draws_what_it_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CADENCE_RESULTS", raising=False)
    matplotlib.use("agg")
    names: dict[str, Any] = {}
    cells = json.loads((ROOT / "examples/notebook/schedules.ipynb").read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        assert cell["source"] and (cell["cell_type"] != "code" or not cell["outputs"]), "as it is before it is run"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    close("all")
    compared = names["found"].comparison
    speed = compared[compared.measure == "throughput/samples_per_s"].set_index("label")
    assert list(speed.index) == ["colocate_sync", "fully_async"] and speed.against["fully_async"] > 1
    assert len(names["speed"]) == 6 and set(names["trained"].schedule) == set(speed.index)
