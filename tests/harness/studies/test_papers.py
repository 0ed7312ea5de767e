"""Paper experiments: their files, what is printed and written, and fits that see what they are fitted to, no more."""

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.campaigns.process import RunProcess
from harness.cli.look import drawn_again
from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.planner.candidates import Candidate
from harness.planner.explore import TrialResult
from harness.planner.judgement import InTurn, systems
from harness.studies.papers import fits, measured
from harness.studies.papers.experiment import Context, PaperExperiment, names, parse, read_experiment
from harness.studies.papers.modes import Mode, composed, job_of, pooled, steps
from harness.studies.papers.report import show, write, write_overview
from harness.studies.papers.result import Result, ResultLine
from harness.studies.papers.run import KINDS, run_papers
from harness.studies.papers.scaling import ScalingStep, ScalingVariation, jobs_of, linearity
from harness.studies.papers.simulated import Gantt, run_gantt
from harness.studies.schedule_table import AGENTS, CONDITIONS, SIZES, ScheduleFigures, as_table, page

SMALL = (
    "model=qwen1.5b algorithm.batch_groups=8 algorithm.group_size=4 algorithm.micro_batch_groups=1 "
    "cost.prompt_tokens=50 cost.lengths.mean=50.0 cost.lengths.cap=200"
).split()
"""A batch that is simulated in a moment."""


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are means over 3 batches, however small, fits are near enough sooner, and systems few: it saves most of the
    time."""
    monkeypatch.setattr("harness.planner.judgement.DRAWS", 4)
    monkeypatch.setattr("harness.studies.papers.modes._LEAST_BATCHES", 3)
    monkeypatch.setattr("harness.studies.papers.modes._LEAST_SAMPLES", 1)
    monkeypatch.setattr("harness.studies.papers.fits._NEAR", 0.02)


def run_nothing(*arguments: object) -> RunProcess:
    raise AssertionError("a run was started")


def context(folder: Path) -> Context:
    return Context(folder, Console(file=io.StringIO(), width=200), run_nothing)


@pytest.mark.parametrize("name", names())
def test_every_experiment_can_be_read_and_says_where_each_setting_is_from(name: str) -> None:
    experiment = read_experiment(name)
    form, _ = KINDS[experiment.kind]
    assert experiment.read(form) and experiment.source and experiment.scale
    assert all(setting.source for setting in (*experiment.job.values(), *experiment.settings.values()))
    compose_job(experiment.overrides())


def test_unknown_papers_settings_and_ways_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="paper=asyncflow is unknown; choose all, or one of .*asyncflow_ablation"):
        run_papers("asyncflow", context(tmp_path))
    experiment = replace(read_experiment("asyncflow_gantt"), settings={})
    with pytest.raises(ConfigError, match="asyncflow_gantt.paper.yaml: settings"):
        experiment.read(Gantt)
    with pytest.raises(ConfigError, match="new.paper.yaml: kind=guess"):
        parse(
            {"name": "new", "kind": "guess", "title": "t", "source": "s", "compares": "c", "scale": "s", "settings": {}}
        )
    relax = read_experiment("relax")
    with pytest.raises(ConfigError, match=r"'delayed' is in no row of made.csv; there are \['in seq"):
        ablation({"in sequence": 1.0, "streamed": 1.8}, tmp_path, monkeypatch)
    monkeypatch.setattr(PaperExperiment, "published", lambda experiment: [{"mode": "another", "step_s": "1"}])
    with pytest.raises(ConfigError, match="relax.paper.yaml: 'colocate_sync' is in no row of relax.csv"):
        fits.run_calibrated(relax, context(tmp_path))


BASE = Mode("in sequence", ["schedule=separated_sync", "schedule.streaming=false"], "base")
STREAMED = Mode("streamed", ["schedule=fully_async", "schedule.max_staleness=0", "schedule.order=completion"], "fitted")
DELAYED = Mode("delayed", ["schedule=delayed_update"], "predicted")
SETUP = fits.RatioSetup(tuple(SMALL), 2, 1.0, 1.0, 6.0, (BASE, STREAMED, DELAYED))


def ablation(published: Mapping[str, float], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The experiment on a small job, with these published figures."""
    rows = "\n".join(f"ablation,7b,512,{label},{figure}" for label, figure in published.items())
    (folder / "made.csv").write_text(f"experiment,model,npus,configuration,relative_throughput\n{rows}\n")
    monkeypatch.setattr("harness.studies.papers.experiment.PAPERS", folder)
    settings = {
        "table": "ablation",
        "engines": 2,
        "reference_share": 1.0,
        "least": 1.0,
        "most": 6.0,
        "modes": [{"label": mode.label, "job": mode.job, "role": mode.role} for mode in (BASE, STREAMED, DELAYED)],
    }
    job = dict(line.split("=") for line in SMALL)
    tree = {
        **{"name": "made", "title": "t", "kind": "fitted_ratio", "source": "s", "compares": "c", "scale": "s"},
        "data": "made.csv",
        "job": {name: {"value": value, "source": "made"} for name, value in job.items()},
        "settings": {name: {"value": value, "source": "made"} for name, value in settings.items()},
    }
    return fits.run_fitted_ratio(parse(tree), context(folder))


def test_the_fit_does_not_see_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another published figure for the predicted row changes its error, and nothing else."""
    one = ablation({"in sequence": 1.0, "streamed": 1.8, "delayed": 2.74}, tmp_path, monkeypatch)
    other = ablation({"in sequence": 1.0, "streamed": 1.8, "delayed": 1.37}, tmp_path, monkeypatch)
    assert [line.simulated for line in one.lines] == [line.simulated for line in other.lines]
    assert one.notes == other.notes
    assert one.lines[1].simulated == pytest.approx(1.8, rel=0.03)
    last, changed = one.lines[2], other.lines[2]
    assert last.error is not None and changed.error is not None
    assert changed.error == pytest.approx(2 * (1 + last.error) - 1)


def test_a_prediction_is_drawn_in_systems_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ablation({"in sequence": 1.0, "streamed": 1.4, "delayed": 2.74}, tmp_path, monkeypatch)
    drawn, beside = [line for line in result.lines if "in systems drawn" in line.quantity]
    assert drawn.interval is not None and drawn.interval[0] < drawn.interval[1]
    assert (drawn.published, drawn.verdict) == (2.74, "faster") and beside.quantity.startswith("times as fast as stre")
    assert any("of 4 systems drawn reach 1.4" in note for note in result.notes)


@pytest.mark.parametrize("halve", [False, True])
def test_an_unknown_is_found_between_its_ends_or_not_at_all(halve: bool) -> None:
    found = fits.fit_unknown(lambda value: 3 / value, 1.0, 0.5, 100.0, halve=halve)
    assert found == pytest.approx(3.0, rel=0.03)
    assert fits.fit_unknown(lambda value: 3 / value, 1.0, 4.0, 100.0, halve=halve) is None


def test_ratios_and_unknowns_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    speedup = fits.RatioSimulation(SETUP).speedup(STREAMED, 2.0)
    found = fits.fit_ratio(speedup, SETUP)
    assert found.ratio == pytest.approx(2.0, rel=0.1)
    assert fits.fit_ratio(5.0, SETUP).ratio is None
    monkeypatch.setattr("harness.studies.papers.fits._NEAR", 0.003)
    mode = Mode("in turn", ["schedule=colocate_sync"], "base")
    job = [*SMALL, "cluster.devices=4", "training.recompute_activations=true"]
    form = fits.Calibrated("cost.lengths.mean", 20.0, 160.0, [mode], 0.1)
    wanted = steps(job_of(mode, [*job, "cost.lengths.mean=70.0"])).seconds
    assert fits.fit_workload(job, wanted, form).value == pytest.approx(70.0, rel=0.1)
    with pytest.raises(ConfigError, match="no cost.lengths.mean from 20 to 160"):
        fits.fit_workload(job, 100 * wanted, form)


def test_the_base_takes_what_its_tasks_take() -> None:
    """So that it need not be simulated at every ratio."""
    rollout_s = steps(fits.ratio_job(SETUP, BASE, 0.0)).seconds
    whole_s = steps(fits.ratio_job(SETUP, BASE, 3.0)).seconds
    assert whole_s == pytest.approx(rollout_s + 6.0, rel=0.01)
    q = systems(composed(BASE, SMALL))[0]
    setup = replace(SETUP, system=q)
    rollout_s = steps(fits.ratio_job(setup, BASE, 0.0)).seconds
    beside = InTurn.of(q, rollout_s + 6.0, rollout_s, devices=1)
    around_s = beside.before_s + beside.serial_s + beside.hidden_s
    whole_s = steps(fits.ratio_job(setup, BASE, 3.0, beside)).seconds
    assert whole_s == pytest.approx(rollout_s + 6.0 + around_s, rel=0.01)


def test_a_pool_is_one_device_as_fast_as_its_ranks() -> None:
    job = compose_job(["backend=virtual", "schedule=fully_async", "training.tensor_parallel=2", *SMALL])
    one = pooled(job, {"rollout": 4, "actor": 2, "actor_fwd": 2, "reference": 2})
    two = pooled(job, {"rollout": 4, "actor": 4, "actor_fwd": 4, "reference": 4})
    assert (one.cluster.devices, one.schedule.split["rollout"]) == (7, 4)
    assert two.cost.train_s_per_token == pytest.approx(one.cost.train_s_per_token / 2)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="actor=3 makes no whole workers of 2 devices"):
        pooled(job, {"rollout": 4, "actor": 3})
    with pytest.raises(ConfigError, match="score with different numbers"):
        pooled(job, {"rollout": 4, "actor": 2, "actor_fwd": 2, "reference": 4})


def test_errors_are_told_for_figures_and_bands_and_not_for_words() -> None:
    assert ResultLine("q", "l", "predicted", 2.0, 2.2, within=0.15).met
    assert ResultLine("q", "l", "predicted", 2.0, 2.2, within=0.05).met is False
    assert ResultLine("q", "l", "predicted", (30.0, 50.0), 45.0).error == 0.0
    assert ResultLine("q", "l", "predicted", (30.0, 50.0), 60.0).error == pytest.approx(0.2)
    assert ResultLine("q", "l", "predicted", "low", 1.0).error is None
    assert ResultLine("q", "l", "measured", 2.0, None, 1.0).met is None


@pytest.mark.slow
def test_a_result_is_printed_written_and_drawn(tmp_path: Path) -> None:
    experiment = read_experiment("relax")
    lines = [
        ResultLine("seconds", "one", "base", 2.0, 2.0),
        ResultLine("seconds", "two", "predicted", 1.0, 1.1, 1.3, within=0.2, seeds=(1.2, 1.4)),
        ResultLine("busy, %", "one", "predicted", (30.0, 50.0), 40.0),
        ResultLine("throughput", "one", "predicted", "low", 1.0),
    ]
    result = Result(experiment, lines, ["fitted to one"])
    console = Console(file=io.StringIO(), width=200)
    show(result, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "+10.0%" in shown and "inside" in shown and "measured on tiny" in shown and experiment.source in shown
    assert all(len(line) <= 80 for line in _printed(result, 80))
    table, page, latex, picture, *more = write(result, tmp_path)
    rows = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    assert [row["error"] for row in csv.DictReader(rows)] == ["+0.0%", "+10.0%", "inside", ""]
    text = page.read_text()
    assert "| two | 1.00 | 1.10 | 1.30 | +10.0% | 20%, kept |" in text.replace("| two |  |", "| two |")
    assert "cadence paper --paper relax" in text and "![" in text and "(relax.png)" in text
    tex = latex.read_text()
    assert "\\caption{seconds}" in tex and tex.count("\\end{tabular}") == 3
    assert "two &  & 1.00 & 1.10 & 1.30 & +10.0\\% & 20\\%, kept" in tex
    csv_file, page, latex = write_overview([result, result], tmp_path)
    assert (
        csv_file.read_text().count("relax,seconds,two,1.00,1.10,+10.0%")
        == latex.read_text().count("relax & seconds & two")
        == 2
    )
    overview = page.read_text()
    assert overview.count("| relax | seconds | two | 1.00 | 1.10 | +10.0% | 20%, kept |") == 2
    assert "| relax | seconds | one |" not in overview, "what is calibrated on is no prediction"
    assert picture.name == "relax.png" and picture.stat().st_size > 10_000
    assert [path.name for path in more] == ["relax.svg", "relax.pdf", "relax-column.pdf"]
    drawn = more[0].read_text()
    assert ">30.0 to 50.0</text>" in drawn and ">1.10 (+10.0%)</text>" in drawn and ">a seed</text>" in drawn
    assert len(drawn_again(tmp_path)) == 4 and ">1.10 (+10.0%)</text>" in more[0].read_text()


def _printed(result: Result, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show(result, console)
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return lines


@pytest.mark.slow
def test_charts_of_several_ways_of_working_stand_on_one_page(tmp_path: Path) -> None:
    modes = [
        Mode(mode.label, mode.job, mode.role, {"rollout": 2, "actor": 1, "actor_fwd": 1, "reference": 1})
        for mode in (BASE, DELAYED)
    ]
    experiment = read_experiment("asyncflow_gantt")
    small = dict(line.split("=") for line in SMALL)
    setting = type(next(iter(experiment.job.values())))
    experiment = replace(
        experiment,
        job={name: setting(value, "made") for name, value in small.items()},
        settings={"iterations": setting(2, "made"), "modes": setting([vars(mode) for mode in modes], "made")},
    )
    result = run_gantt(experiment, context(tmp_path))
    assert [line.quantity for line in result.lines].count("seconds per step") == 2
    (speedup,) = (line for line in result.lines if line.verdict)
    assert speedup.label == "delayed" and speedup.simulated is not None and speedup.simulated > 1
    picture = next(path for path in write(result, tmp_path) if path.suffix == ".svg").read_text()
    assert (
        all(f">{name}</text>" in picture for name in ("rollout 0", "update actor", "v2")) and "delayed; in" in picture
    )


FIGURE = measured.MeasuredFigure("accuracy", "reward/exact_match", 0.5, relative_to="fresh")


def metrics(*values: float) -> list[dict[str, float]]:
    return [{"reward/exact_match": value} for value in values]


def test_figures_are_means_of_the_last_iterations_relative_to_one_cell() -> None:
    assert measured.value_of(FIGURE, metrics(0.0, 0.0, 0.4, 0.6)) == pytest.approx(0.5)
    cells = [measured.MeasuredCell("fresh", []), measured.MeasuredCell("stale", [])]
    read = {"fresh": [metrics(0.8, 0.8), metrics(0.6, 0.6)], "stale": [metrics(0.3, 0.3), metrics(0.4, 0.4)]}
    published = {("fresh", "accuracy"): 90.0, ("stale", "accuracy"): 81.0}
    fresh, stale = measured.lines_of(FIGURE, cells, read, published)
    assert (fresh.measured, fresh.published) == (1.0, 1.0)
    assert stale.measured == pytest.approx(0.5) and stale.published == pytest.approx(0.9)
    assert fresh.seeds == (1.0, 1.0) and stale.seeds == pytest.approx((0.375, 2 / 3))
    assert stale.error is None  # what is published is of another model and task


def test_cells_with_batches_of_their_own_are_compared_by_samples(tmp_path: Path) -> None:
    halves = [one.replace("batch_groups=8", "batch_groups=4") for one in SMALL]
    job = ["schedule=colocate_sync", "cluster.devices=2", "cost.lengths.sigma=0", "cost.lengths.common=0"]
    cells = [
        measured.MeasuredCell(name, [], simulated=[*job, *its]) for name, its in (("whole", SMALL), ("halves", halves))
    ]
    figure = measured.MeasuredFigure("score", "reward", 1.0, relative_to="halves")
    lines = measured.simulated_lines(measured.MeasuredCells(1, [figure], cells), context(tmp_path))
    *_, speedup = lines
    assert speedup.label == "whole" and speedup.quantity.startswith("times as fast as halves")
    assert speedup.simulated == pytest.approx(2 * lines[1].simulated / lines[0].simulated, rel=0.15)  # type: ignore[operator]


def test_linearity_is_throughput_over_devices_with_which_a_batch_grows() -> None:
    candidate = Candidate(1, 1, 0, False, 1, 1, 1, False, 1)

    def outcome(samples_per_s: float) -> TrialResult:
        return TrialResult(1.0, 1.0, samples_per_s, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0)

    span = ScalingStep("7b", ["model=qwen1.5b"], (16, 64))
    assert linearity([(candidate, outcome(10.0)), (candidate, outcome(30.0))], span) == pytest.approx(0.75)
    span = ScalingStep("7b", ["model=qwen1.5b", "algorithm.batch_groups=32"], (16, 64))
    fixed = jobs_of(["schedule=delayed_update"], span, ScalingVariation("fixed"))
    grown = jobs_of(["schedule=delayed_update"], span, ScalingVariation("grown", grows=True))
    assert [(job.cluster.devices, job.algorithm.batch_groups) for job in fixed] == [(16, 32), (64, 32)]
    assert [(job.cluster.devices, job.algorithm.batch_groups) for job in grown] == [(16, 32), (64, 128)]


SLOW = ScheduleFigures(
    samples_per_s=10.0, lag_mean=0.5, lag_worst=1.0, rollout_idle=0.25, training_idle=-1e-17, exposed_s=0.1
)
FAST = replace(SLOW, samples_per_s=20.0, lag_mean=1.0)
STUDY = {each: {"half_step": SLOW, "delayed_update": FAST} for each in (*CONDITIONS, *AGENTS, *SIZES)}
LAST = {"half_step": replace(SLOW, samples_per_s=5.0), "delayed_update": FAST}


def test_a_page_says_what_each_schedule_reaches_of_the_best_and_what_tools_and_devices_leave() -> None:
    slow_transfer = {"half_step": FAST, "delayed_update": FAST}
    text = page(STUDY | {CONDITIONS[1]: slow_transfer, AGENTS[1]: LAST, SIZES[-1]: LAST}, minutes=7.2)
    assert "in 7 minutes of one core" in text.replace("\n", " ")
    assert "| half_step | 50% to 100% | 50% to 50% | 50% to 50% |" in text
    assert "keeps 50% to 100% where training is the bottleneck" in text and "1.00 instead of 0.50" in text
    assert "| half_step | 10.00 | 5.00 | 50% | 25% | 0.50 |" in text
    assert "| half_step | 0.312 | 0.039 | 0.005 | 2% | 0.50 |" in text


def test_all_figures_stand_in_the_table_by_condition_and_schedule() -> None:
    first, second, *_ = as_table(STUDY).to_dict("records")
    assert first["schedule"] == "half_step" and second["transfer"] == "fast transfer"
    assert (first["tools"], first["devices"]) == ("no tools", 16)
    assert first["rollout_idle"] == 0.25 and second["samples_per_s"] == 20
