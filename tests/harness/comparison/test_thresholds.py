"""Thresholds of a comparison: how they are written, and what crosses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main as cli
from harness.comparison.measures import measures_of
from harness.comparison.thresholds import CROSSED, Threshold, crossed, read_thresholds
from harness.config import ConfigError
from tests.support.fabricated_cells import Made, make_cell, make_run

BEFORE = Made("fully_async")
SLOWER = replace(BEFORE, step_s=1.1, draw=1)


def test_a_threshold_is_a_measure_a_sign_and_a_number() -> None:
    assert read_thresholds("samples_per_s < 0.95, eval/sampled<=-.02,idle/actor > 0.1,") == (
        Threshold("samples_per_s", "<", 0.95),
        Threshold("eval/sampled", "<=", -0.02),
        Threshold("idle/actor", ">", 0.1),
    )
    for wrong, why in (("samples_per_s = 1", "cannot be read"), ("speed < 1", "there is no measure speed"), ("5%", "")):
        with pytest.raises(ConfigError, match=f"^fail-if {wrong}.*{why}"):
            read_thresholds(wrong)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("samples_per_s < 0.85", []),
        ("samples_per_s < 0.95, seconds > 1.05", ["cell: samples_per_s < 0.95: it is 0.9", "cell: seconds > 1.05: it"]),
        ("mean > 1", ["cell: fail-if mean > 1 cannot be judged: "]),
        ("custom/none > 1", ["cell: fail-if custom/none > 1 cannot be judged: no value"]),
    ],
)
def test_a_cell_beyond_a_threshold_is_named_as_is_one_of_which_that_cannot_be_said(
    text: str, lines: list[str], tmp_path: Path
) -> None:
    cells = [make_cell(tmp_path / name, "cell", made) for name, made in (("a", BEFORE), ("b", SLOWER))]
    found = crossed(read_thresholds(text), [("cell", measures_of(cells, 0), 1)])
    assert len(found) == len(lines) and all(map(str.startswith, found, lines))


def test_a_command_beyond_a_threshold_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    for seeds, experiment, made in ((3, "before", BEFORE), (3, "same", BEFORE), (2, "few", BEFORE)):
        for seed in range(seeds):
            make_run(tmp_path, "cell", made, seed)
        (tmp_path / "made_up").rename(tmp_path / experiment)
    assert cli.main(["diff", "before", "same", "--fail-if", "samples_per_s < 0.95"]) == 0
    assert cli.main(["diff", "before", "same", "--fail-if=samples_per_s < 1.05"]) == CROSSED == 3
    assert cli.main(["diff", "before", "few", "--fail-if=samples_per_s < 0.95"]) == CROSSED
    assert "cannot be judged of 1.00x: fewer than three seeds" in capsys.readouterr().out
    assert cli.main(["compare", "--fail-if", "fast"]) == 2 == cli.main(["compare", "--margin", "2"])
