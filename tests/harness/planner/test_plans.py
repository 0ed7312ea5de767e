"""What a plan says of itself: tables, reasons, the command, JSON and pictures; the plan that `make bench` makes of a
model that this machine cannot hold; and the page of the scaling study."""

import json
import re
import shlex
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from harness.checks.settle import Draft, SettledJob, settle
from harness.cli.front import settings_of
from harness.cli.plan import write_plan
from harness.cli.steps import StepsBar
from harness.config import ConfigError, JobConfig
from harness.config.compose import cell_name, compose_job, make_schedule
from harness.config.machine import Machine
from harness.config.registries import SCHEDULES
from harness.driver.session import simulate
from harness.planner.automatic import DEVICES, plan_split
from harness.planner.candidates import Candidate
from harness.planner.explore import Exploration, TrialResult
from harness.planner.judgement import Judgement, Judgements, judge
from harness.planner.memory import planned_memory
from harness.planner.plan import Choice, Plan, bench_command, fixed_by, plan_settings, variants
from harness.planner.report import print_plan, verdict, why_slower
from harness.planner.search import SearchResult
from harness.studies.scaling import Point, ScalingStudy, as_table, draw_scaling, efficiency, page
from tests.support.every_schedule import EVERY_SCHEDULE

OUTCOME = TrialResult(
    seconds=100.0, bound=90.0, samples_per_s=80.0, tokens_per_s_per_device=1000.0, lag_mean=0.0, lag_worst=0.0,
    rollout_idle=0.1, training_idle=0.1, exposed_s=1.0, longest_s=20.0, fraction_of_bound=0.9,
)  # fmt: skip
APART = Candidate(8, 8, 0, False, 2, 2, 1, False, 1)
SETTINGS = ["model=qwen7b", "cluster.devices=16"]


def exploration(schedule: str, **figures: float) -> Exploration:
    config = compose_job([f"schedule={schedule}", *SETTINGS])
    outcome = replace(OUTCOME, **figures)
    outcome = replace(outcome, samples_per_s=8000 / outcome.seconds)
    candidate = Candidate(16, 16, 0, True, 2, 2, 1, False, 1) if schedule == "colocate_sync" else APART
    return Exploration(config, 9, 2, SearchResult([(candidate, outcome)], pruned=6, left=None))


def choice(schedule: str, **figures: float) -> Choice:
    return Plan([exploration(schedule, **figures)]).best


PLAN = Plan(
    [
        exploration("colocate_sync", seconds=160.0),
        exploration("one_step_off", seconds=120.0, lag_mean=1.0, rollout_idle=0.3),
        exploration("half_step", seconds=110.0, lag_mean=0.5),
        exploration("fully_async", seconds=100.0, lag_mean=1.8),
    ]
)


def test_the_front_holds_what_nothing_beats_and_a_hundredth_is_worth_no_lag() -> None:
    assert [choice.schedule for choice in PLAN.front] == ["colocate_sync", "half_step", "fully_async"]
    assert PLAN.best.name == "fully_async (2)"
    assert PLAN.runner_up is not None and PLAN.runner_up.schedule == "half_step"
    plan = Plan([exploration("half_step", seconds=100.5, lag_mean=0.5), exploration("fully_async", lag_mean=1.8)])
    assert plan.best.schedule == "half_step"
    assert [choice.schedule for choice in plan.front] == ["half_step", "fully_async"], (
        "the fastest is not beaten either"
    )
    assert plan.best_of_each[0].schedule == "fully_async" and plan.runner_up is plan.best_of_each[0]


def judged(plan: Plan, **centres: float) -> Judgements:
    """Speed-ups over the first, 10 % up and down around these, all of common draws."""
    spread = np.linspace(0.9, 1.1, 64)
    its = {choice.schedule: choice for choice in plan.best_of_each}
    return Judgements([Judgement(its[name], centre * spread) for name, centre in centres.items()], "as of any system")


def test_the_verdict_says_what_ties_with_the_fastest_and_whether_the_proposal_is_faster() -> None:
    close = Plan(
        [
            exploration("colocate_sync", seconds=160.0),
            exploration("one_step_off", seconds=108.0, lag_mean=1.0),
            exploration("half_step", seconds=100.5, lag_mean=0.5),
            exploration("fully_async", lag_mean=1.8),
        ]
    )
    sure = judged(close, colocate_sync=1.0, one_step_off=1.3, half_step=1.55, fully_async=1.6)
    baseline, one, *others = sure.of
    unsure = replace(sure, of=[baseline, replace(one, speedup=one.speedup[::-1] * 1.2), *others])
    assert verdict(close, unsure) == (
        "Simulated: on 16 x h100, with 16 prompts x 8 responses = 128 samples, fully_async (2) trains most samples per "
        "second; ties with it, within 5 % in 80 % of systems: half_step (−0.5 %); cannot be told from it: one_step_off "
        "(−7.4 %). Proposed: half_step, which lags least of those within 1 % of it. half_step beside colocate_sync: "
        "1.55 times as fast (1.42 to 1.68, P 100%): faster."
    )
    assert "one_step_off" not in verdict(close, sure), "it is slower in most systems"


def test_a_plan_says_time_left_costs_schedules_and_batches_it_took() -> None:
    output = StringIO()
    times = iter([100.0, 160.0, 190.0])
    with StepsBar("planning", Console(file=output, width=120), clock=lambda: next(times)) as steps:
        steps.done(1, 3, "half_step")
        steps.done(3, 3, "fully_async (2)")
    assert output.getvalue() == "[1/3] half_step; about 2 min left\n[3/3] fully_async (2); a moment left\n"
    config = compose_job(["schedule=fully_async", *SETTINGS, "cost=tiny_cpu"])
    output = StringIO()
    plan = Plan([replace(exploration("fully_async"), config=config)])
    print_plan(plan, SETTINGS, Console(file=output, width=120), judge(plan, ()))
    assert "Not judged, how sure that is: colocate_sync" in output.getvalue()
    assert "costs profile-backed (cost=tiny_cpu, one layout)" in output.getvalue()
    assert plan_settings([])[0] == plan_settings(["schedule=all"])[0] == list(SCHEDULES)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_every_job_that_is_searched_can_be_run(schedule: str) -> None:
    for job in variants(compose_job([f"schedule={schedule}", *SETTINGS]), frozenset()):
        make_schedule(job)
    schedules, settings = plan_settings(["schedule=half_step", "model=tiny"])
    assert schedules == ["half_step"] and "model=tiny" in settings and "model=qwen7b" not in settings
    with pytest.raises(ConfigError, match=r"schedule\.split\.rollout is what a plan chooses"):
        fixed_by(["schedule.split.rollout=2"])
    job = planned("schedule=separated_sync", "model=qwen7b", "cost.lengths.mean=64")
    algorithm = job.config.algorithm
    assert (algorithm.batch_groups, algorithm.group_size, job.config.iterations) == (512, 16, 10)
    assert "A batch as published (DAPO" in job.messages[1] and "64 tokens in the mean" in job.messages[1]
    assert cell_name(job.config) == cell_name(from_command(job.messages[2]))


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"seconds": 100.2}, "no difference worth its lag"),
        ({"seconds": 150.0, "rollout_idle": 0.4}, "rollout devices do nothing for 40% of the time (against 10%), "),
        ({"seconds": 150.0, "training_idle": 0.4}, "training devices do nothing for 40% .*waiting for samples"),
        ({"seconds": 150.0, "training_idle": 0.4, "longest_s": 90.0}, "longest response alone takes 90 s"),
        ({"seconds": 105.0, "exposed_s": 6.0}, "stand still for weights for 6 s"),
        ({"seconds": 120.0, "rollout_idle": 0.05, "training_idle": 0.05}, "the busiest has more to do"),
    ],
)
def test_what_costs_the_slower_one_most_is_why_it_lost(figures: dict[str, float], expected: str) -> None:
    sentence = why_slower(choice("one_step_off", **figures), choice("fully_async"))
    assert re.search(expected.replace("(", r"\(").replace(")", r"\)"), sentence), sentence


def test_everything_that_is_printed_and_written_says_that_it_is_simulated(tmp_path: Path) -> None:
    output = StringIO()
    sure = judged(PLAN, colocate_sync=1.0, one_step_off=1.3, half_step=1.05, fully_async=1.6)
    print_plan(PLAN, SETTINGS, Console(file=output, width=80), sure)
    text = output.getvalue()
    assert max(len(line) for line in text.splitlines() if "─" in line) <= 80
    assert re.search(r"half_step +1.45 +1.05 +0.96 to 1.14 +73% +cannot be told", text)
    assert text.startswith("SIMULATED plan: qwen7b on 16 x h100, costs analytical (cost=roofline on device=h100)")
    assert "\n16 prompts x 8 responses = 128 samples an iteration" in text and verdict(PLAN, sure) in text
    for name in ("colocate_sync", "one_step_off", "half_step", "fully_async (2)", "Runner-up: half_step needs 110 s"):
        assert name in text
    assert "cadence bench model=qwen7b cluster.devices=16 schedule=fully_async" in text
    write_plan(PLAN, SETTINGS, 1.0, tmp_path / "plan", sure)
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert written["verdict"] == verdict(PLAN, sure)
    assert [one["verdict"] for one in written["speedups"]][1:] == ["faster", "cannot be told", "faster"]
    assert written["simulated"] is True and written["job"]["schedule"]["split"]["rollout"] == 8
    assert (tmp_path / "plan" / "plan.png").stat().st_size > 10_000


def test_the_command_holds_everything_that_was_chosen() -> None:
    command = bench_command(choice("fully_async"), ["model=qwen7b", "engine.slots=64"])
    assert command.startswith(
        "cadence bench model=qwen7b engine.slots=64 schedule=fully_async cluster.devices=16 iterations=20 "
    )
    for setting in (
        "engine.slots=64",
        "schedule.max_staleness=2",
        "schedule.split.rollout=8",
        "schedule.split.actor=8",
    ):
        assert setting in command
    assert "model='my models/a'" in bench_command(choice("fully_async"), ["model=my models/a"])


def test_scaling_is_held_against_the_smallest_size_that_fits() -> None:
    rates = {64: 10.0, 128: 18.0, 256: 24.0}
    points = [Point("m", "half_step", n, rate, 0.5, 0.1, 0.2, "a", "b") for n, rate in rates.items()]
    points.append(Point("m", "one_step_off", 256, 30.0, 1.0, 0.1, 0.2, "a", "b"))
    assert efficiency(points[:3]) == pytest.approx([1.0, 0.9, 0.6])
    study = ScalingStudy(sorted(points, key=lambda point: point.devices), 512, 16, "analytical")
    text = page(study, 60.0)
    assert "| one_step_off | - | - | 30.0 (100%) | 1.00 |" in text
    assert "| half_step | 10.0 (100%) | 18.0 (90%) | 24.0 (60%) | 0.50 |" in text
    table = as_table(study)
    draw_scaling(figure := Figure(), table.assign(median=1.2, low=1.1, high=1.5))
    rates, shares, gains = figure.axes
    assert [line.get_ydata().tolist() for line in rates.lines] == [[30.0], [10.0, 18.0, 24.0]]
    assert shares.lines[1].get_ydata() == pytest.approx([1.0, 0.9, 0.6])
    assert [bar.get_segments()[0][:, 1].tolist() for bar in gains.collections] == [[1.1, 1.5]] * 2
    assert [text.get_text() for text in figure.legends[0].texts] == ["one_step_off", "half_step"]


LAPTOP = Machine(cores=2, gpus=0, gpu_bytes=0)
LARGE = ("model=qwen7b", "algorithm.batch_groups=8", "algorithm.group_size=4", "cost.lengths.mean=64")


@pytest.fixture(autouse=True)
def one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.planner.automatic.SAMPLES", 1)
    monkeypatch.setattr("harness.planner.automatic.TRIALS", 1)
    monkeypatch.setattr("harness.planner.explore._LEAST_SAMPLES", 1)


def planned(*arguments: str) -> SettledJob:
    return settle(arguments, LAPTOP, plan_split)


def refuse_to_plan(draft: Draft, why: str) -> NoReturn:
    raise AssertionError("it was planned")


def from_command(command: str) -> JobConfig:
    """The job of a `cadence bench` command, which refuses what it does not read."""
    return settle([*settings_of("bench", shlex.split(command)[2:]), "backend=virtual"], LAPTOP, refuse_to_plan).config


@pytest.mark.parametrize("schedule", ["fully_async", "half_step", "colocate_sync"])
def test_the_command_that_it_says_makes_the_same_job(schedule: str) -> None:
    job = planned(f"schedule={schedule}", *LARGE)
    why, what, command = job.messages
    assert job.planned
    assert why.startswith("Why: model=qwen7b needs ") and what.startswith(
        f"Planned for {DEVICES} x h100, with 8 prompts x 4 responses = 32 samples an iteration: "
    )
    assert cell_name(job.config) == cell_name(from_command(command))
    assert job.config.backend == "virtual" and job.config.cluster.devices == DEVICES
    assert job == planned(f"schedule={schedule}", *LARGE), "the same every time"


def test_what_the_user_says_stays_and_a_mistake_is_still_told() -> None:
    job = planned("schedule=fully_async", *LARGE, "cluster.devices=8", "schedule.max_staleness=1").config
    assert job.cluster.devices == 8 and job.schedule.options["max_staleness"] == 1
    with pytest.raises(ConfigError, match="half_step needs 2 rollout engines"):
        planned("model=tiny", "schedule=half_step")
    with pytest.raises(
        ConfigError, match=r"fits no split of 2 devices of device=h100; give it more of them by cluster\.devices="
    ):
        planned("model=qwen32b", "cluster.devices=2")


@pytest.mark.parametrize(
    "settings",
    [
        ("model=qwen7b", "schedule.split.rollout=1", "backend=virtual"),
        ("model=qwen7b", "engine.tensor_parallel=2"),
        ("model=qwen7b", "training.pipeline_parallel=2"),
        ("model=qwen7b", "algorithm.micro_batch_groups=2"),
        ("model=tiny",),
        ("model=tiny", "backend=real"),
        ("model=tiny", "backend=paced"),
        ("model=tiny", "backend=virtual", "cost=tiny_cpu"),
    ],
)
def test_a_job_with_a_split_or_a_real_one_is_left_as_it_is(settings: tuple[str, ...]) -> None:
    with suppress(ConfigError):  # not every one of them can run
        assert not settle(settings, LAPTOP, refuse_to_plan).planned


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fully_async", "colocate_sync"])
def test_32b_is_split_fits_and_starts_on_machines_that_are_described(schedule: str) -> None:
    described = (f"schedule={schedule}", "model=qwen32b", "device=h100", "cluster.devices=16")
    assert planned_memory((*described, "max_tokens=20")).plan.fits
    job = planned(*described, *LARGE[1:], "iterations=3", "backend=virtual")
    assert job.planned
    counts = simulate(job.config, seed=0).ledger.counts()
    assert counts["admitted"] == counts["trained"] == 3 * 8 * 4
