"""Staleness x correction x schedule: which jobs, and what is shown of them."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from harness.campaigns.cells import correction_axes, read_bundles, resolve_cells
from harness.cli.compare import matrix_request
from harness.comparison.comparison import compare
from harness.comparison.correction_matrix import (
    as_frame,
    as_latex,
    as_markdown,
    has_matrix,
    matrix_of,
    significant_pairs,
    write_matrix,
)
from harness.comparison.fairness import fairness_key
from harness.comparison.runs import Cell
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.config.machine import Machine
from harness.report.page.pictures import draw_matrix
from tests.support.fabricated_cells import Made, make_cell

AXES = ("schedule", *correction_axes())
TWO_CORES = Machine(cores=2, gpus=0, gpu_bytes=0)


def test_the_matrix_is_of_all_or_of_what_is_asked_for() -> None:
    request = matrix_request([], TWO_CORES)
    labels = [cell.label for cell in request.cells]
    corrections = ("none", "clip", "decoupled", "tis", "mis")
    assert len(labels) == len(set(labels)) == 6 * len(corrections)
    assert labels[:5] == [f"fully_async 0, {correction}" for correction in corrections], "on-policy is the baseline"
    rows = list(dict.fromkeys(label.rpartition(", ")[0] for label in labels))
    assert rows == ["fully_async 0", "half_step", "fully_async 1", "one_step_off", "fully_async 2", "fully_async 4"]
    jobs = [compose_job(cell.settings) for cell in request.cells[::7]]
    assert request.seeds == (0, 1, 2) and {job.cluster.devices for job in jobs} == {3}
    assert all(job.algorithm.recompute_log_probs for job in jobs), "decoupled needs them, so all have them"
    assert len({job.experiment for job in jobs}) == 1
    asked = ["schedules=fully_async", "staleness=0.5,3", "corrections=tis,clip", "seeds=2", "dry=true", "iterations=6"]
    request = matrix_request(asked, TWO_CORES)
    assert [cell.label for cell in request.cells] == [
        f"fully_async {staleness}, {correction}" for staleness in ("0.5", "3") for correction in ("tis", "clip")
    ]
    assert request.dry and request.axes == AXES and request.seeds == (0, 1)
    job = compose_job(request.cells[0].settings)
    assert (job.iterations, job.algorithm.correction) == (6, "tis")
    assert job.schedule.options["max_staleness"] == 0.5


@pytest.mark.parametrize("asked", ["schedules=magic", "corrections=none,magic"])
def test_names_that_are_none_are_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"=magic is unknown; choose (one|some) of .*(half_step|decoupled)"):
        matrix_request([asked], TWO_CORES)


def test_a_bundle_is_settings_of_one_name_and_may_have_a_rate_of_its_own() -> None:
    asked = "corrections=clip,clip_4,decoupled_4@2e-4,sequence_mis,gspo,m2po"
    request = matrix_request([asked, "schedules=fully_async", "staleness=8"], TWO_CORES)
    clip, clip_4, decoupled, sequence, gspo, m2po = (compose_job(cell.settings).algorithm for cell in request.cells)
    assert (clip.mini_batches, clip_4.mini_batches, decoupled.mini_batches) == (1, 4, 4)
    assert (decoupled.proximal, decoupled.learning_rate) == ("trainer", 2e-4) and clip.learning_rate == "auto"
    assert (sequence.correction, sequence.options) == ("mis", {"level": "sequence"})
    assert gspo.aggregation == "sequence_mean_token_mean" and m2po.micro_batch_groups == m2po.batch_groups
    keys = [fairness_key(plain(compose_job(cell.settings)), (), request.axes) for cell in request.cells]
    assert all(key == keys[0] for key in keys), "what bundles set is what differs on purpose"


def test_bundles_run_as_they_are_and_name_a_correction_that_nothing_else_sets(tmp_path: Path) -> None:
    asked = [f"corrections={','.join(read_bundles())}", "schedules=fully_async", "staleness=2"]
    cells, skipped = resolve_cells(matrix_request(asked, TWO_CORES).cells, {}, TWO_CORES)
    assert len(cells) == len(read_bundles()) and not skipped
    with pytest.raises(ConfigError, match=r"mini_batches=2 is for all cells, but corrections=clip_4 sets"):
        matrix_request(["corrections=clip,clip_4", "algorithm.mini_batches=2"], TWO_CORES)
    matrix_request(["corrections=clip,clip_4", "algorithm.micro_batch_groups=2"], TWO_CORES)
    path = tmp_path / "corrections.yaml"
    path.write_text("mine: {mini_batches: 4}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="mine names no correction; give it"):
        read_bundles(path)


def test_a_cell_that_cannot_be_is_left_out_by_name_before_anything_runs() -> None:
    asked = "corrections=decoupled,clip schedules=fully_async staleness=2 algorithm.recompute_log_probs=false".split()
    cells, skipped = resolve_cells(matrix_request(asked, TWO_CORES).cells, {}, TWO_CORES)
    assert [cell.label for cell in cells] == ["fully_async 2, clip"]
    assert [(label, "recompute_log_probs=true" in why) for label, why in skipped.items()] == [
        ("fully_async 2, decoupled", True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def made(folder: Path, staleness: int, correction: str, exact_match: float, seeds: int = 4) -> Cell:
    settings = (f"schedule.max_staleness={staleness}", f"algorithm.correction={correction}")
    wanted = Made(exact_match=exact_match, lag=staleness, settings=settings, noise=(0.0, 0.01))
    return make_cell(folder, f"fully_async {staleness}, {correction}", wanted, range(seeds))


def test_a_comparison_becomes_a_table_a_file_and_a_picture(folder: Path) -> None:
    cells = [made(folder, 0, "none", 0.9), made(folder, 0, "tis", 0.9), made(folder, 2, "none", 0.4)]
    matrix = matrix_of(compare(cells, AXES))
    assert matrix.rows == ("fully_async 0", "fully_async 2") and matrix.columns == ("none", "tis")
    lost = matrix.entries["fully_async 2", "none"]
    assert lost.distinguishable and not lost.baseline and lost.lag == pytest.approx(1.85)
    assert matrix.entries["fully_async 0", "none"].baseline
    assert not matrix.entries["fully_async 0", "tis"].distinguishable
    table = as_markdown(matrix)
    assert "| schedule | mean lag | none | tis |" in table
    last = [line for line in table.splitlines() if line.startswith("|")][-1]
    assert last == "| `fully_async 2` | 1.85 | **0.399**\\* [0.388, 0.409] (0.402 0.391 0.396 0.406) | not run |"
    rows = as_frame(matrix).to_dict("records")
    assert [(row["schedule"], row["correction"], row["differs"]) for row in rows] == [
        ("fully_async 0", "none", "baseline"),
        ("fully_async 0", "tis", "false"),
        ("fully_async 2", "none", "true"),
    ]
    measured = lost.measured
    last_row = rows[2]
    assert [float(last_row[name]) for name in ("mean", "low", "high", "seed 3")] == pytest.approx(
        [measured.value, measured.interval.low, measured.interval.high, measured.per_seed[3]]
    )
    written = {path.name: path.read_bytes() for path in (*write_matrix(folder, matrix), *draw_matrix(folder, matrix))}
    assert {*written} == {f"matrix{end}" for end in (".csv", ".md", ".tex", ".png", ".svg", ".pdf", "-column.pdf")}
    assert "0.399 *" in (picture := written["matrix.svg"].decode()) and ">not run</text>" in picture
    assert "(baseline)" in picture and "*: significantly different from the baseline" in picture
    latex = written["matrix.tex"].decode()
    assert latex.split("\\toprule")[1].strip().startswith(r"schedule & \shortstack[r]{mean lag} & ")
    assert r"\textbf{0.399} {\scriptsize [0.388, 0.409]}" in latex and "not run" in latex and "*" not in latex
    assert "Bold: the difference to it" in latex and r"Baseline: fully\_async 0 under none." in latex


def test_one_seed_alone_has_no_interval_to_show(folder: Path) -> None:
    matrix = matrix_of(compare([made(folder / "alone", 0, "clip", 0.9, seeds=1)], AXES))
    assert "[" not in as_markdown(matrix).splitlines()[5]
    assert "of one seed" in as_latex(matrix) and "Of one seed" in as_markdown(matrix)
    assert "over seeds" not in as_latex(matrix) + as_markdown(matrix)
    draw_matrix(folder, matrix)


def test_what_learns_nothing_or_has_no_place_makes_no_matrix(folder: Path) -> None:
    simulated = Made(exact_match=None, backend="virtual", settings=("schedule.max_staleness=0",))
    with pytest.raises(ConfigError, match="simulated runs learn nothing; set backend=real"):
        matrix_of(compare([make_cell(folder, "simulated", simulated, range(2))], AXES))
    one = made(folder / "one", 0, "clip", 0.9)
    settings = ("schedule.max_staleness=0", "algorithm.correction=clip", "schedule.pause=wait")
    other = make_cell(folder, "drained", Made(settings=settings), range(4))
    with pytest.raises(ConfigError, match="two cells are fully_async 0 under clip"):
        matrix_of(compare([one, other], AXES))


def test_corrections_are_compared_in_pairs_of_three_seeds(folder: Path) -> None:
    learnt = {"clip": 0.9, "tis": 0.9, "none": 0.4}
    matrix = matrix_of(compare([made(folder / "pairs", 2, name, reached) for name, reached in learnt.items()], AXES))
    assert significant_pairs(matrix) == [
        "- `fully_async 2`, significant differences (by seed, Holm's correction over 3 pairs): "
        "clip above none; tis above none."
    ]
    two = [made(folder / "two", 2, name, reached, seeds=2) for name, reached in (("clip", 0.9), ("none", 0.4))]
    assert significant_pairs(matrix_of(compare(two, AXES))) == [
        "Fewer than 3 seeds, or one correction: no difference can be significant."
    ]


@pytest.mark.slow
def test_many_corrections_stand_below_each_other(folder: Path) -> None:
    names = ("none", "clip", "dual_clip", "tis", "mis", "cispo", "sapo")
    matrix = matrix_of(compare([made(folder / "many", 2, name, 0.9, seeds=2) for name in names], AXES))
    lines = as_markdown(matrix).splitlines()
    assert lines[3] == "| correction | `fully_async 2`, mean lag 1.85 |"
    assert [line.split(" | ")[0] for line in lines[5:12]] == [f"| `{name}`" for name in names]
    picture = draw_matrix(folder, matrix)[0].read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert height > 0.6 * width


def test_a_column_is_called_what_was_asked_for_and_a_sweep_of_more_is_no_matrix(folder: Path) -> None:
    asked = [made(folder / "named", 2, "clip", 0.9), made(folder / "named", 2, "tis", 0.9)]
    asked[1] = replace(asked[1], label="fully_async 2, tis@2e-4")
    assert matrix_of(compare(asked, AXES)).columns == ("clip", "tis@2e-4")
    swept = [
        replace(cell, label=f"learning_rate={rate}") for cell, rate in zip([asked[0], asked[0]], "12", strict=True)
    ]
    assert has_matrix(compare(asked, AXES)) and not has_matrix(compare(swept, AXES))
