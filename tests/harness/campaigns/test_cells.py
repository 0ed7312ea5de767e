"""Cells from settings: lists with commas, schedules by name, one device budget, folders that do not mix."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from harness.campaigns import pipeline
from harness.campaigns.cells import CellRequest, resolve_cell, resolve_cells, schedule_cells, swept_cells
from harness.campaigns.execution import RunOutcomes, Runs
from harness.campaigns.gate import gate_job
from harness.campaigns.pipeline import ComparisonRequest
from harness.cli import compare
from harness.cli.compare import compare_request, sweep, sweep_request
from harness.comparison.experiment import read_campaign
from harness.config import ConfigError
from harness.config.compose import cell_name, compose_job
from harness.config.machine import Machine
from harness.config.registries import SCHEDULES

LAPTOP = Machine(cores=2, gpus=0, gpu_bytes=0)


@pytest.mark.parametrize(
    ("settings", "labels", "last"),
    [
        (["schedule.max_staleness=0,1,2"], ["max_staleness=0", "max_staleness=1", "max_staleness=2"], "2"),
        (["schedule.max_staleness=range(0,3)"], ["max_staleness=0", "max_staleness=1", "max_staleness=2"], "2"),
        (["algorithm.betas=[0.9,0.95],[0.8,0.9]"], ["betas=[0.9,0.95]", "betas=[0.8,0.9]"], "[0.8,0.9]"),
        (["schedule=one_step_off,fully_async"], ["schedule=one_step_off", "schedule=fully_async"], "fully_async"),
        (["seeds=[0,1]", "iterations=3,4"], ["iterations=3", "iterations=4"], "4"),
        (["cost=a/b.yaml,c.yaml"], ["cost=a/b.yaml", "cost=c.yaml"], "c.yaml"),
    ],
)
def test_a_setting_with_commas_is_a_cell_per_value(settings: list[str], labels: list[str], last: str) -> None:
    _, cells = swept_cells(settings)
    assert [cell.label for cell in cells] == labels
    assert cells[-1].settings[-1] == f"{settings[-1].partition('=')[0]}={last}"
    assert all(cell.settings[:-1] == tuple(settings[:-1]) for cell in cells)


def test_several_lists_are_a_cell_per_combination() -> None:
    axes, cells = swept_cells(["schedule.k=1,2", "model=tiny", "algorithm.correction=none,tis"])
    assert axes == ("schedule.k", "algorithm.correction")
    assert [cell.label for cell in cells] == [
        "k=1, correction=none",
        "k=1, correction=tis",
        "k=2, correction=none",
        "k=2, correction=tis",
    ]
    assert cells[1].settings == ("model=tiny", "schedule.k=1", "algorithm.correction=tis")


@pytest.mark.parametrize("setting", ["seeds=[0,1]", "algorithm.betas=[0.9,0.95]", "task.path='a,b'", "model=tiny"])
def test_a_list_in_brackets_and_a_text_in_quotes_are_one_value(setting: str) -> None:
    axes, (cell,) = swept_cells([setting])
    assert axes == () and cell.settings == (setting,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seeds=1,2"], "seeds=1,2: seeds is nothing to sweep; which seeds to run is seeds=5"),
        (["backend=real,virtual"], "backend=real,virtual: backend is nothing to sweep"),
        (["schedule.k=1,1"], "schedule.k=1,1 has one value twice"),
        (["iterations"], "iterations cannot be read"),
    ],
)
def test_what_cannot_be_swept_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swept_cells(settings)


def test_schedules_are_all_or_those_that_are_named() -> None:
    assert [cell.label for cell in schedule_cells("all", [])] == list(SCHEDULES)
    one, four = schedule_cells("fully_async@1,fully_async@4", ["iterations=2"])
    assert one.label == "fully_async 1"
    assert four.settings == ("schedule=fully_async", "schedule.max_staleness=4", "iterations=2")
    assert [cell.settings for cell in schedule_cells("half_step,k_step_off", ["iterations=2"])] == [
        ("schedule=half_step", "iterations=2"),
        ("schedule=k_step_off", "iterations=2"),
    ]
    with pytest.raises(ConfigError, match="schedules=nope is unknown; choose one of colocate_sync, "):
        schedule_cells("one_step_off,nope", [])
    with pytest.raises(ConfigError, match="one of them twice"):
        schedule_cells("one_step_off,one_step_off", [])


def resolved(request: ComparisonRequest, machine: Machine) -> tuple[list[str], dict[str, str]]:
    cells, left_out = resolve_cells(request.cells, {}, machine)
    assert len({cell.config.cluster.devices for cell in cells}) == 1
    return [cell.label for cell in cells], left_out


@pytest.mark.slow
def test_two_cores_are_enough_for_all_but_one_which_is_named_with_what_it_needs() -> None:
    cells, left_out = resolved(compare_request(["model=tiny"], LAPTOP), LAPTOP)
    assert cells == [name for name in SCHEDULES if name != "half_step"]
    assert "needs 2 rollout engines, its split gives 1 of 2 devices; set cluster.devices=4" in left_out["half_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "machine"), [([], Machine(cores=4, gpus=0, gpu_bytes=0)), (["cluster.oversubscribe=true"], LAPTOP)]
)
def test_on_four_devices_all_schedules_share_one_device_budget(arguments: list[str], machine: Machine) -> None:
    request = compare_request(arguments, machine)
    assert request.shared[-2:] == ("cluster.devices=4", "algorithm.micro_batch_groups=4")
    assert resolved(request, machine) == (list(SCHEDULES), {})


def test_a_resolved_cell_is_complete_and_what_is_wrong_in_all_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs plan nothing and choose nothing: the same folder, on any machine."""
    monkeypatch.setattr("harness.planner.automatic.SAMPLES", 1)
    monkeypatch.setattr("harness.planner.automatic.TRIALS", 1)
    monkeypatch.setattr("harness.planner.explore._LEAST_SAMPLES", 1)
    large = ("model=qwen7b", "algorithm.batch_groups=8", "algorithm.group_size=4", "cost.lengths.mean=64")
    for settings in (("schedule=fully_async", *large), ("schedule=one_step_off",)):
        cell = resolve_cell(CellRequest("a cell", settings), LAPTOP)
        again = resolve_cell(CellRequest("a cell", cell.settings), Machine(cores=64, gpus=8, gpu_bytes=80 << 30))
        assert cell.name == again.name == cell_name(compose_job(cell.settings))
        assert again.settings == cell.settings and not again.planned
    with pytest.raises(ConfigError, match="^iterations=0 is too small"):
        resolve_cells(schedule_cells("all", ["iterations=0"]), {}, LAPTOP)
    with pytest.raises(ConfigError, match="one and other are the same job"):
        resolve_cells([CellRequest(label, ("schedule=one_step_off",)) for label in ("one", "other")], {}, LAPTOP)
    request = compare_request(["cluster.devices=3", "cluster.oversubscribe=true"], LAPTOP)
    assert [setting for setting in request.shared if "devices" in setting] == ["cluster.devices=3"]


def experiment(arguments: Sequence[str]) -> str:
    return compare_request(["cluster.devices=2", *arguments], LAPTOP).experiment


@pytest.mark.slow
def test_only_what_may_be_compared_shares_a_folder() -> None:
    name = experiment([])
    assert name.startswith("compare-tiny-reverse-")
    same = (["schedules=one_step_off"], ["seeds=5"], ["force=true"], ["dry=true"], ["iterations=120"])
    assert all(experiment(arguments) == name for arguments in same)
    other = (["iterations=6"], ["task=copy"], ["algorithm.learning_rate=0.1"], ["cluster.devices=3"])
    assert len({name, *map(experiment, other)}) == 1 + len(other)
    swept = sweep_request(["schedule.max_staleness=0,1", "cluster.devices=2"], LAPTOP).experiment
    assert swept.startswith("sweep-max_staleness-tiny-reverse-")


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cells(runs: Runs, *_: object) -> RunOutcomes:
        return RunOutcomes(tuple((cell.label, seed) for cell, seed in runs.all), ())

    monkeypatch.setattr(compare, "machine_of_runs", lambda: LAPTOP)
    monkeypatch.setattr(pipeline, "run_gate", lambda *_: None)
    monkeypatch.setattr(pipeline, "run_cells", run_cells)
    monkeypatch.setattr(pipeline, "conclude", lambda *_: 0)


@pytest.mark.usefixtures("nothing_runs")
def test_dry_says_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    said = io.StringIO()
    arguments = ["schedules=one_step_off,half_step", "seeds=2", "iterations=6", "dry=true"]
    assert compare.compare(arguments, tmp_path / "results", Console(file=said, width=200)) == 0
    assert not (tmp_path / "results").exists()
    shown = said.getvalue()
    assert "rollout 1, training 1" in shown and "0 1" in shown
    assert "half_step is left out: " in shown
    assert "2 of 2 runs to do, and the equivalence gate: unknown until a run is done" in shown


@pytest.mark.usefixtures("nothing_runs")
def test_a_folder_with_another_comparison_in_it_is_refused(tmp_path: Path) -> None:
    def run(*arguments: str) -> int:
        given = ["schedules=one_step_off,k_step_off", "experiment=mine", "cluster.devices=2", *arguments]
        return compare.compare(given, tmp_path, Console(file=io.StringIO()))

    assert run() == 0 and run("seeds=5", "schedules=half_step,one_step_off,k_step_off") == 0
    campaign = read_campaign(tmp_path / "mine")
    assert campaign is not None and campaign.seeds == (0, 1, 2, 3, 4) and len(campaign.cells) == 2
    assert list(campaign.left_out) == ["half_step"]
    with pytest.raises(ConfigError, match=r"mine holds a comparison with samples=15360, this one has samples=384; "):
        run("iterations=3")
    with pytest.raises(ConfigError, match="holds a comparison along schedule, this one is along schedule.k; "):
        swept = ["schedule=k_step_off", "schedule.k=1,2", "experiment=mine", "cluster.devices=2"]
        sweep(swept, tmp_path, Console(file=io.StringIO()))


@pytest.mark.usefixtures("nothing_runs")
def test_a_sweep_whose_cells_may_not_be_compared_is_refused_before_it_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="samples=15360 in the first, 7680 in the second"):
        sweep(["algorithm.batch_groups=16,8"], tmp_path, Console(file=io.StringIO()))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="nothing to sweep; give a setting several values"):
        sweep(["iterations=3"], tmp_path, Console(file=io.StringIO()))


def test_what_is_free_in_a_cell_stands_in_its_layout() -> None:
    settings = (
        "backend=virtual cluster.devices=4 training.tensor_parallel=2 training.recompute_activations=true"
    ).split()
    split = ("schedule=separated_sync", "schedule.split.rollout=2")
    cell = resolve_cell(CellRequest("a", (*settings, *split)), LAPTOP)
    assert cell.pools == "rollout 2, training 2 (TP2 recompute)"


CORES = Machine(cores=8, gpus=0, gpu_bytes=0)


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.mini_batches=4", "algorithm.micro_batch_groups=4", "algorithm.epochs=2"),
        ("algorithm.mini_batches=3", "algorithm.batch_groups=24", "algorithm.micro_batch_groups=8"),
        ("algorithm.correction=m2po", "algorithm.micro_batch_groups=16"),
        ("algorithm.correction=decoupled",),
        ("algorithm.advantage=optimal_token_baseline",),
        ("algorithm.advantage=remax",),
    ],
)
def test_the_gate_of_any_algorithm_can_run(settings: tuple[str, ...]) -> None:
    cell = resolve_cell(CellRequest("one", ("backend=real", "cluster.kind=cpu", *settings)), CORES)
    for request in gate_job(cell, settings).cells:
        assert resolve_cell(request, CORES).config.algorithm.correction == cell.config.algorithm.correction
