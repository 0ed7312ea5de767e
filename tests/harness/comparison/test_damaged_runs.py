"""Folders of finished runs whose files are missing, cut off, or hold something else: one line, and none is believed."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.cli import report
from harness.cli.main import answered
from tests.support.fabricated_cells import Made, make_run

FILES = ("config.yaml", "ledger.json", "manifest.json", "metrics.jsonl", "samples.parquet", "trace.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3]),
    "random": lambda file: file.write_bytes(random.Random(0).randbytes(file.stat().st_size)),
    "other words": lambda file: file.write_text('["what", {"no": "run"}, "writes", null]\n'),
    "other names": lambda file: file.write_text('{"what": {"no": "run"}, "writes": null}\n'),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    made = Made("colocate_sync", lag=0, iterations=4)
    for label, wanted in {"sync": made, "fast": replace(made, schedule="fully_async", lag=1)}.items():
        make_run(root, label, wanted, 0)
    return root


def reported(results: Path) -> tuple[int, str]:
    """Exit code, and what was said of what went wrong."""
    said = io.StringIO()
    code = answered(
        lambda: report.run(["experiment=made_up"], results, Console(file=io.StringIO())),
        Console(file=said, width=1000),
    )
    return code, said.getvalue().strip()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_run_is_named_in_one_line(results: Path, tmp_path: Path, name: str, damage: str) -> None:
    copy = tmp_path / "results"
    shutil.copytree(results, copy)
    file = copy / "made_up" / "fast" / "seed=0" / name
    DAMAGES[damage](file)
    code, said = reported(copy)
    if (name, damage) == ("metrics.jsonl", "cut off"):  # as many lines as were whole: the ledger knows of more
        assert "No verdict: conservation FAILED" in (copy / "made_up" / "report.md").read_text()
        return
    assert code == 2 and "\n" not in said, said
    assert said.startswith(str(file)) and ("is damaged: " in said or "is missing; " in said), said
    assert said.endswith("; make the run again with FORCE=1, or take its folder away")
