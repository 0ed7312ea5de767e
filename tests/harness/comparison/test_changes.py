"""What changed between two experiments of made-up runs whose truth is known, and what the command says of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main as cli
from harness.comparison.changes import Changes, changes_between
from harness.comparison.equivalence import GATE_RUNS
from harness.comparison.measures import SPEED, measures_of
from harness.comparison.thresholds import CROSSED, Threshold, crossed, read_thresholds
from harness.config import ConfigError
from tests.support.fabricated_cells import Made, make_cell, make_run

BEFORE = Made("fully_async")
SLOWER = replace(BEFORE, step_s=1.3, draw=1)


def changes(tmp_path: Path, before: Made, after: Made) -> Changes:
    return changes_between([make_cell(tmp_path / "a", "cell", before)], [make_cell(tmp_path / "b", "cell", after)])


def test_a_job_that_became_slower_is_worse_and_noise_is_no_change(tmp_path: Path) -> None:
    found = changes(tmp_path, replace(BEFORE, settings=("engine.slots=32",)), SLOWER)
    assert found.worse == [line for line in found.worse if line.startswith("cell: samples per second 0.7")] != []
    assert [line for line in found.unlike if line.startswith("engine")] == ["engine.slots: 32 before, 128 after"]
    same = changes(tmp_path / "same", BEFORE, replace(BEFORE, draw=1))
    assert same.worse == [] and same.unlike == ()
    assert changes(tmp_path / "faster", SLOWER, BEFORE).worse == []


def test_a_setting_that_may_differ_is_named_and_one_that_decides_nothing_is_not(tmp_path: Path) -> None:
    after = replace(BEFORE, settings=("algorithm.micro_batch_groups=1", "eval.every=5", "seeds=3", "force=true"))
    before = replace(BEFORE, settings=("algorithm.micro_batch_groups=2", "eval.every=4"))
    assert changes(tmp_path, before, after).unlike == (
        "algorithm.micro_batch_groups: 2 before, 1 after",
        "eval.every: 4 before, 5 after",
    )


@pytest.mark.slow
def test_the_more_cells_the_more_it_takes_to_call_one_of_them(tmp_path: Path) -> None:
    """One that is alone called worse; beside 12 that are the same it is not."""
    draws = (("a", BEFORE, 2), ("b", replace(BEFORE, step_s=1.03, draw=1), 50))
    alone = [make_cell(tmp_path / side, "slower", made, range(4)) for side, made, _ in draws]
    same = [make_cell(tmp_path / side, "same", replace(BEFORE, draw=draw), range(4)) for side, _, draw in draws]
    beside = [[replace(one, label=f"c{n}") for n in range(12)] for one in same]
    assert changes_between(alone[:1], alone[1:]).worse
    assert not changes_between([alone[0], *beside[0]], [alone[1], *beside[1]]).worse


def test_seeds_that_only_one_has_are_left_out_and_cells_are_named(tmp_path: Path) -> None:
    before = [make_cell(tmp_path / "a", "x", BEFORE, range(3)), make_cell(tmp_path / "a", "old", BEFORE, range(3))]
    found = changes_between(before, [make_cell(tmp_path / "b", "x", BEFORE, range(1, 5))])
    (speed,) = [measure for measure in found.cells[0].measures if measure.key == SPEED]
    assert [sorted(cell.per_seed) for cell in speed.cells] == [[1, 2]] * 2
    assert found.unmatched == (
        "old is only in the first",
        "x is without seed 0, which only the first has",
        "x is without seeds 3, 4, which only the second has",
    )


def test_what_is_unlike_in_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cell has backend=real before and virtual after"):
        changes(tmp_path, BEFORE, replace(BEFORE, backend="virtual"))
    with pytest.raises(ConfigError, match="no cell in common: a before, b after"):
        changes_between([make_cell(tmp_path, "a", BEFORE)], [make_cell(tmp_path, "b", BEFORE)])


def test_a_commit_has_the_runs_of_its_experiments_and_not_those_of_their_gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    make_run(tmp_path, "cell", BEFORE, 0, manifest={"smoke": True})
    (tmp_path / "made_up").rename(tmp_path / f"made_up{GATE_RUNS}")
    make_run(tmp_path, "cell", BEFORE, 0)
    assert cli.main(["diff", "aaaaaaa", "made_up"]) == 0, capsys.readouterr().err


def test_the_command_takes_experiments_and_commits_and_fails_where_a_result_got_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    for seed in range(4):
        make_run(tmp_path, "cell", BEFORE, seed)
    (tmp_path / "made_up").rename(tmp_path / "before")
    for seed in range(4):
        make_run(tmp_path, "cell", SLOWER, seed, manifest={"git": {"commit": "b" * 40, "dirty": True}})
    (tmp_path / "made_up").rename(tmp_path / "after")
    assert cli.main(["diff", "before", "after"]) == 1
    told = capsys.readouterr().out
    assert "code: commit aaaaaaaaaaaa before, commit bbbbbbbbbbbb with changes after" in told and "worse: " in told
    assert cli.main(["diff", "b" * 9, "aaaaaaa", "--margin", "0.5"]) == 0
    told = capsys.readouterr().out
    assert "no result is called worse" in told and "= equal within 50 %" in told and " =\n" in told
    assert cli.main(["diff", "before", "nope"]) == 2
    assert capsys.readouterr().err.startswith("nope is no experiment in ")
    assert cli.main(["diff", "before"]) == 2
    assert capsys.readouterr().err.startswith("diff takes two: ")


SLOWER_THRESHOLDS = replace(BEFORE, step_s=1.1, draw=1)


def test_a_threshold_is_a_measure_a_sign_and_a_number() -> None:
    assert read_thresholds("samples_per_s < 0.95, eval/sampled<=-.02,idle/actor > 0.1,") == (
        Threshold("samples_per_s", "<", 0.95),
        Threshold("eval/sampled", "<=", -0.02),
        Threshold("idle/actor", ">", 0.1),
    )
    for wrong, why in (("samples_per_s = 1", "cannot be read"), ("speed < 1", "there is no measure speed"), ("5%", "")):
        with pytest.raises(ConfigError, match=f"^fail_if={wrong}.*{why}"):
            read_thresholds(wrong)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("samples_per_s < 0.85", []),
        ("samples_per_s < 0.95, seconds > 1.05", ["cell: samples_per_s < 0.95: it is 0.9", "cell: seconds > 1.05: it"]),
        ("mean > 1", ["cell: fail_if=mean > 1 cannot be judged: "]),
        ("custom/none > 1", ["cell: fail_if=custom/none > 1 cannot be judged: no value"]),
    ],
)
def test_a_cell_beyond_a_threshold_or_not_to_be_judged_is_named(text: str, lines: list[str], tmp_path: Path) -> None:
    cells = [make_cell(tmp_path / name, "cell", made) for name, made in (("a", BEFORE), ("b", SLOWER_THRESHOLDS))]
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
