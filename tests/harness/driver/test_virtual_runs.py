"""Whole runs without a device: repeatable, told as simulated, and an error where they cannot go on."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.checks.job import plan_job
from harness.cli import main as cli
from harness.comparison.conservation import check_conservation
from harness.comparison.promises import FinishedRun, read_finished
from harness.config import CostConfig, JobConfig, LengthsConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.config.registries import SCHEDULES
from harness.driver.backends import RunBackend, RunSpec, open_backend
from harness.driver.recorder import Recorder
from harness.driver.session import Session, simulate
from harness.metrics.run_files import load_manifest, load_metrics
from harness.protocols import Span
from harness.runtime.runtime import RealClock, Stalled
from harness.runtime.virtual_runtime import Deadlock
from schedules.fully_async import FullyAsync
from schedules.protocol import Job
from tests.support.every_schedule import EVERY_SCHEDULE
from tests.support.invariants import check_run
from tests.support.random_jobs import play

GROUPS = ("algorithm.batch_groups=4", "algorithm.group_size=2", "algorithm.micro_batch_groups=1")
SMALL = ("cost=tiny_cpu", "iterations=4", "cluster.devices=4", *GROUPS)


def job(schedule: str = "fully_async", **options: Any) -> JobConfig:
    config = compose_job([*SMALL, "backend=virtual", f"schedule={schedule}"])
    return replace(config, schedule=replace(config.schedule, options=config.schedule.options | options))


# -- the same seed, the same run


def told(recorder: Recorder) -> tuple[Any, ...]:
    timeline = recorder.timeline
    return recorder.samples(), timeline.spans, timeline.iteration_ends, recorder.ledger.to_json()


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_a_run_is_the_same_for_the_same_seed_and_another_for_another(schedule: str) -> None:
    first, again, other = (told(simulate(job(schedule), seed)) for seed in (3, 3, 4))
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


# -- what is too old is dropped, or waited for


def overtaken(on_stale: str) -> FinishedRun:
    """Completion order under a heavy tail, with training so fast that versions fly past the long samples."""
    config = job(order="completion", max_staleness=1.0, on_stale=on_stale)
    lengths = LengthsConfig(kind="lognormal", mean=20.0, sigma=2.0, cap=400)
    cost = replace(config.cost, lengths=lengths, call_s=1e-3, train_s_per_token=1e-6, train_step_s=1e-3)
    config = replace(config, iterations=20, cost=cost)
    recorder = simulate(config, seed=0)
    return FinishedRun(config, recorder.samples(), recorder.ledger.counts(), recorder.timeline, tokens=recorder.tokens)


def test_what_would_lag_too_much_is_dropped_or_waited_for() -> None:
    run = overtaken("drop")
    check_run(run)  # among others: every batch is full, and nothing trained lags by more than 1
    assert run.counts["dropped_stale"] > 0
    assert run.counts["trained"] == 20 * 4 * 2
    dropped = [sample for sample in run.samples if sample.fate == "dropped_stale"]
    assert len(dropped) == run.counts["dropped_stale"]
    assert {sample.trained_iteration for sample in dropped} == {None}
    assert all(2 <= sample.lag_worst for sample in dropped if sample.lag_worst is not None)
    assert all(sample.finished_at is not None for sample in dropped), "engines end what they had begun, and that counts"
    run = overtaken("wait")
    check_run(run)
    assert {fate for fate, count in run.counts.items() if count} == {"admitted", "trained"}
    assert run.counts["admitted"] == 160
    order = [sample.trained_iteration for sample in run.samples]
    assert order != sorted(order), "nothing was overtaken: completion order made no difference"  # type: ignore[type-var]


@pytest.mark.parametrize("pause", ["keep", "wait", "carry", "abort"])
def test_a_token_is_counted_once_whatever_becomes_of_samples_as_weights_come(pause: str) -> None:
    """The same samples are trained: those that go on have no token twice, those that begin again threw some away."""
    config = replace(job(max_staleness=2.0, pause=pause), iterations=8)
    config = replace(config, engine=replace(config.engine, keep_cache=True))
    run = play(config)
    assert check_conservation([run.files]).problems == ()
    tokens, trained = run.files.ledger["tokens"], sum(sample.response_tokens for sample in run.finished.trained)
    assert tokens["trained"] == trained and tokens["generated"] - tokens["begun_again"] == trained
    assert (tokens["begun_again"] > 0) == (pause == "abort")
    spans = max(sample.span or 0 for sample in run.finished.samples)
    ages = max(metrics["staleness/cache_mean"] for metrics in run.metrics)
    assert (spans > 1) == (pause in ("keep", "carry")) and (ages > 0) == (pause == "keep"), "a carried cache is new"


# -- a run that cannot go on


class NeverAdmits(FullyAsync):
    async def _train(self, job: Job) -> None:
        await job.rollout.set_dispatch_limit(below=job.batch)
        await job.trainer.train(0)


class NeverPublishes(FullyAsync):
    async def _train(self, job: Job) -> None:
        await job.rollout.set_dispatch_limit(below=job.batch)
        for iteration in range(job.iterations):
            await job.prompts.admit(below=job.batch * (iteration + 1))
            await job.trainer.train(iteration)


class AdmitsAllAtOnce(FullyAsync):
    async def _train(self, job: Job) -> None:
        await job.prompts.admit(below=job.batch * job.iterations)
        await job.trainer.train(0)


STUCK = {
    NeverAdmits: (
        "rollout[0].feed waits for groups of any batch",
        "reward[0].work waits for rows of any batch",
        "actor[0].train waits for rows of batch 0",
        "of any partition: there is none",
    ),
    NeverPublishes: (
        "rollout[1].feed waits for groups of any batch",
        "actor[0].train waits for rows of batch 1",
        "with ids below 8 (the bound of consumer 'rollout[0]') of partition 'train_1'",
        "rows that lack a column: {'response': 8",
    ),
    AdmitsAllAtOnce: (
        "rollout[1].feed waits for groups of any batch",
        "room for the 8 rows of partition 'train_3': the slowest task is ",
    ),
}


def planted(schedule: type[FullyAsync], monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.setitem(SCHEDULES, "planted", f"{__name__}:{schedule.__name__}")
    config = job()
    return replace(config, schedule=replace(config.schedule, name="planted"))


@pytest.mark.parametrize("schedule", STUCK)
def test_a_schedule_that_forgets_something_is_a_deadlock_that_names_the_waiting_loops(
    schedule: type[FullyAsync], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(planted(schedule, monkeypatch), seed=0)
    message = str(caught.value)
    assert message.startswith("nothing can run and nothing is due at ")
    assert [part for part in STUCK[schedule] if part not in message] == []


class HandClock(RealClock):
    """Passes as fast as it is slept on."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def restart(self, now: float = 0.0) -> None:
        self.time = now

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


def test_on_a_clock_that_passes_by_itself_the_same_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of a paced run, with its workers in this process."""

    def open_near(run: RunSpec, clock: Any, stack: ExitStack) -> RunBackend:
        return open_backend(replace(run, plan=replace(run.plan, backend="virtual")), clock, stack)

    monkeypatch.setattr("harness.driver.session.open_backend", open_near)
    config = replace(planted(NeverAdmits, monkeypatch), backend="paced")
    plan = plan_job(config, make_schedule(config), NO_MACHINE)
    session = Session(RunSpec(config, make_schedule(config), plan, config.model, seed=0), HandClock(0.0))
    with ExitStack() as stack, pytest.raises(ExceptionGroup) as caught, asyncio.Runner() as runner:
        session.start(stack)
        runner.run(session.connect())
        runner.run(session.measure())
    stalled = caught.value.exceptions[0]
    assert isinstance(stalled, Stalled)
    assert str(stalled).startswith(f"nothing happened for {config.cluster.stall_timeout_s:g} s; waiting: ")
    assert [part for part in STUCK[NeverAdmits] if part not in str(stalled)] == []


# -- the command


def mirrored(test: Any) -> Any:
    """SQLAlchemy and MLflow warn of themselves while they make their tables."""
    for of_theirs in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning", "ResourceWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{of_theirs}")(test)
    return test


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all, since MLflow takes seconds to make its database."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("results")
        patch.setattr(cli, "RESULTS", folder)
        yield folder


def bench(capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    """What it printed, on one line."""
    assert cli.main(["bench", *SMALL, *settings]) == 0
    return " ".join(capsys.readouterr().out.split())


SIMULATED = "SIMULATED: every time below comes from a cost model; no model is trained and nothing is rewarded."


@pytest.mark.slow
@mirrored
def test_a_virtual_run_leaves_a_runs_files_without_a_model(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("experiment=virtual", "schedule=half_step", "backend=virtual")
    said = bench(capsys, *settings)
    assert said.startswith(f"{SIMULATED} Runs, rates after warm-up ")
    assert said.count("simulated") == 2, "both tables say so"
    (folder,) = (results / "virtual").glob("half_step-tiny-reverse-*/seed=0")
    left = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    files = {"config.yaml", "manifest.json", "metrics.jsonl", "system.jsonl", "samples.parquet", "trace.json"}
    files |= {"arrivals.jsonl", "summary.json"}
    files |= {f"{name}.{end}" for name in ("staleness", "gantt", "idle") for end in ("png", "csv")}
    assert left == files | {"ledger.json", "DONE"}
    assert load_manifest(folder)["backend"] == "virtual"
    assert len(load_metrics(folder)) == 4
    assert not [name for metrics in load_metrics(folder) for name in metrics if name.startswith(("reward", "policy"))]
    run = read_finished(folder)
    check_run(run)
    assert {(sample.reward, sample.exact_match) for sample in run.samples} == {(None, None)}

    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "seed 0 is done already; --force runs it again" in bench(capsys, *settings)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@mirrored
def test_a_model_too_large_is_simulated_and_it_is_said_why(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("cluster.kind=cpu", "cluster.memory_gib=8", "cluster.oversubscribe=true", "iterations=1", "cost=tiny_cpu")
    said = bench(capsys, "experiment=auto", "backend=auto", "model=qwen7b", *here)
    assert said.startswith(f"{SIMULATED} Why: model=qwen7b needs ")
    (folder,) = (results / "auto").glob("*/seed=0")
    assert load_manifest(folder)["backend"] == "virtual"
    assert "backend: virtual" in (folder / "config.yaml").read_text()


def test_a_paced_run_says_so_before_it_starts(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("harness.driver.run.run_seed", lambda config, plan, *rest: asked.append(plan.backend))
    monkeypatch.setattr("harness.report.summary.print_summary", lambda folders, console: None)
    split = ("cluster.devices=12", "schedule.split.rollout=8", "schedule.split.actor=4")
    said = bench(capsys, "backend=paced", *split)
    assert said.startswith("PACED: real processes, queue and weight transfers around engines that last as long as")
    assert asked == ["paced"]


@pytest.mark.parametrize("backend", ["virtual", "paced"])
def test_memory_no_cost_counts_is_refused(backend: str, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = ("schedule.split.reference=rollout", "algorithm.kl_coef=0.1")
    assert cli.main(["bench", *SMALL, f"backend={backend}", *beside]) == 2
    assert "no simulation counts that; give rollout devices of its own" in capsys.readouterr().err


# -- several optimizer steps a batch


STEPS = ("algorithm.mini_batches=2", "algorithm.epochs=3")


def stepping(*settings: str) -> tuple[JobConfig, Recorder]:
    config = compose_job([*SMALL, "backend=virtual", "schedule=fully_async", *settings])
    return config, simulate(config, 0)


def test_every_pass_and_every_step_costs_its_time_and_scoring_before_the_first_as_well() -> None:
    once, steps = "algorithm.recompute_log_probs=false", (*STEPS, "algorithm.recompute_log_probs=false")
    frozen = (*steps, "algorithm.correction=decoupled", "algorithm.proximal=trainer")
    spent = {}
    for settings in ((once,), steps, frozen):
        config, recorder = stepping(*settings)
        spans = [span for span in recorder.timeline.spans if span.role == "actor"]
        kinds = {kind: [s.end - s.start for s in spans if s.kind == kind] for kind in ("update_actor", "old_log_prob")}
        spent[settings] = (sum(kinds["update_actor"]), len(kinds["old_log_prob"]))
    assert isinstance(config.cost, CostConfig)
    step_s = config.cost.train_step_s * config.iterations
    passes_s = spent[once,][0] - step_s
    assert spent[steps][0] == pytest.approx(3 * passes_s + 6 * step_s)
    assert spent[frozen][0] == pytest.approx(3 * passes_s + 6 * step_s)
    assert (spent[steps][1], spent[frozen][1] > 0) == (0, True)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("proximal", ["trainer", "actor_fwd"])
def test_every_schedule_keeps_its_promises_with_several_steps_a_batch(schedule: str, proximal: str) -> None:
    loss = (*STEPS, "algorithm.correction=decoupled", f"algorithm.proximal={proximal}")
    config = compose_job([*SMALL, "algorithm.batch_groups=8", "backend=virtual", f"schedule={schedule}", *loss])
    recorder = simulate(config, 0)
    check_run(FinishedRun(config, recorder.samples(), recorder.ledger.counts(), recorder.timeline))


GROUP, SAMPLES = 2, 4 * 4 * 2


def spans(schedule: str, sample_s: float) -> list[Span]:
    """Of a run whose rewards take time: on the host, one sample after the other, while engines go on generating."""
    config = job(schedule)
    assert isinstance(config.cost, CostConfig)
    return list(simulate(replace(config, cost=replace(config.cost, reward_s_per_sample=sample_s)), 0).timeline.spans)


@pytest.mark.parametrize("schedule", ["separated_sync", "fully_async"])
def test_scoring_takes_its_time_in_turn_and_beside_generation(schedule: str) -> None:
    seen = spans(schedule, 0.002)
    scored = sorted((span.start, span.end) for span in seen if span.role == "reward")
    assert sum(end - start for start, end in scored) == pytest.approx(SAMPLES * 0.002)
    assert all(end - start <= GROUP * 0.002 + 1e-9 for start, end in scored), "who waits for a group gets it early"
    assert all(before[1] <= after[0] for before, after in zip(scored[:-1], scored[1:], strict=True))
    generated = [(span.start, span.end) for span in seen if span.kind == "generate"]
    assert any(start < till and end > since for start, end in generated for since, till in scored)


def test_slow_rewards_hold_up_training_and_free_ones_do_not() -> None:
    def trained_at(sample_s: float) -> float:
        return max(span.end for span in spans("separated_sync", sample_s) if span.role == "actor")

    free, slow = trained_at(0.0), trained_at(1.0)
    assert SAMPLES < slow < SAMPLES + free
