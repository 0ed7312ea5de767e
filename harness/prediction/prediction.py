"""`make predict`: the asynchronous rows of a table, each by its schedule's own file on the virtual clock, at costs that
were fitted to the synchronous rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.config import ConfigError, CostConfig, JobConfig
from harness.driver.recorder import Recorder
from harness.driver.session import simulate
from harness.metrics.timeline import Interval, Timeline, clip, length
from harness.prediction.fit import WARMUP, WorkloadFit, around_s, drawn, engine_cost, engines_of, fit, host_s
from harness.prediction.phases import UPDATE, Given, PhaseScaling, scalings, training_phases
from harness.prediction.table import Row, TableSettings, factors_of, read_table, read_table_settings
from harness.rpc.children import parallel_map

END = 2
"""Iterations at the end, while no more is generated."""

_TIMEOUT_S = 3600.0  # longest wait for all rows

_TRAINING_SIDE = frozenset({"actor", "actor_fwd", "reference", "reward", "advantages"})


@dataclass(frozen=True)
class Prediction:
    """Seconds of a training step, means over the simulated ones. phases: those that the simulation was given.

    generation_s: some engine generated; wait_s: the training side did nothing but take samples, or had none.
    dropped: share of the groups that went out of training as stale.
    """

    row: Row
    fit: WorkloadFit
    phases: Mapping[str, float]
    step_s: float
    generation_s: float
    wait_s: float
    dropped: float

    @property
    def step_error(self) -> float | None:
        """Predicted over published, less 1."""
        return self.step_s / self.row.step_s - 1 if self.row.step_s else None

    @property
    def wait_error_s(self) -> float | None:
        """Predicted less published wait; None where none is published."""
        return None if self.row.wait_s is None else self.wait_s - self.row.wait_s

    @property
    def speedup(self) -> float | None:
        """Speedup over the published step of the nearest synchronous row."""
        step_s = self.fit.nearest(self.row).step_s
        return step_s / self.step_s if step_s else None

    @property
    def published_speedup(self) -> float | None:
        """The same of the published step; None where one of them is missing."""
        anchor, own = self.fit.nearest(self.row).step_s, self.row.step_s
        return anchor / own if anchor and own else None


@dataclass(frozen=True)
class Case:
    """A row and all that its prediction is made of. phases: seconds that its training pool takes for each, for a batch;
    config: its job, devices and costs aside."""

    row: Row
    fit: WorkloadFit
    config: JobConfig
    phases: Mapping[str, float]
    settings: TableSettings

    @property
    def fetch_s(self) -> float:
        """Seconds of a batch that the trainer spends on taking its samples from the queue, and waits meanwhile."""
        return self.settings.fetch_s_per_sample.get(self.row.mode, 0.0) * self.config.algorithm.batch_samples


@dataclass(frozen=True)
class Predicted:
    """A table, as it was predicted."""

    fits: list[WorkloadFit]
    predictions: list[Prediction]


def predict_table(
    path: Path,
    given: Given,
    arguments: Sequence[str] = (),
    *,
    processes: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Predicted:
    """Calibrate on the synchronous rows of a table, predict the others.

    arguments: settings of the job, over those of the table. processes: how many simulate rows side by side. progress:
    is called with what is being done. Raises ConfigError where the table, or a job of it, cannot be.
    """
    settings, rows = read_table_settings(path), read_table(path)
    synchronous = _synchronous(path, rows)
    others = [row for row in rows if row not in synchronous]
    if not others:
        raise ConfigError(f"{path} has no row to predict: all of them are synchronous, and calibrate")
    by_engine: dict[str, tuple[WorkloadFit, dict[str, PhaseScaling]]] = {}
    for engine in dict.fromkeys(row.engine for row in synchronous):
        alike = [row for row in synchronous if row.engine == engine]
        progress(f"fitting {', '.join(map(str, alike))}")
        config = settings.job(alike[0], arguments)
        sync = scalings(alike, settings.scoring_fixed_s_per_sample * config.algorithm.batch_samples)
        by_engine[engine] = fit(alike, config, sync, batches=settings.batches), sync
    progress(f"simulating {len(others)} rows")
    cases = [_case(row, others, by_engine, settings, given, arguments) for row in others]
    made = parallel_map(predict, cases, processes=processes, timeout_s=_TIMEOUT_S, what="rows to be simulated")
    return Predicted([fitted for fitted, _ in by_engine.values()], made)


def _synchronous(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Rows to calibrate on: colocated ones, or, where there are none, separate pools that never overlap."""
    colocated = [row for row in rows if row.colocated]
    separated = [row for row in rows if row.mode == "separated_sync" and row.options.get("streaming") == "false"]
    if not colocated and not separated:
        raise ConfigError(
            f"{path} has no synchronous row to calibrate on; add one of mode colocate_sync, or separated_sync with a "
            "column `streaming` that says false"
        )
    return colocated or separated


def _case(
    row: Row,
    others: Sequence[Row],
    by_engine: Mapping[str, tuple[WorkloadFit, Mapping[str, PhaseScaling]]],
    settings: TableSettings,
    given: Given,
    arguments: Sequence[str],
) -> Case:
    """A row, calibrated on the rows of its engine, or, where it has none, of the first engine."""
    fitted, sync = by_engine.get(row.engine) or next(iter(by_engine.values()))
    config = settings.job(row, arguments)
    scores, shared = config.algorithm.recompute_log_probs, fitted.rows[0].colocated
    phases = training_phases(row, others, sync, settings, given, scores=scores, shared=shared)
    return Case(row, fitted, config, phases, settings)


def predict(case: Case) -> Prediction:
    """Run the row's schedule.

    A pool of devices that work together is one device of the simulation, at the pool's costs; each rollout engine is
    one. Raises ConfigError where the row's job cannot be.
    """
    batches = case.settings.batches
    recorder = simulate(job(case), seed=0)
    timeline = recorder.timeline
    window = (timeline.iteration_ends[WARMUP - 1], timeline.iteration_ends[WARMUP + batches - 1])
    step_s = (window[1] - window[0]) / batches
    return Prediction(
        row=case.row,
        fit=case.fit,
        phases=case.phases,
        step_s=step_s,
        generation_s=_covered(timeline, {"rollout"}, {"generate"}, window) / batches,
        wait_s=step_s - _covered(timeline, _TRAINING_SIDE, None, window) / batches + case.fetch_s,
        dropped=_dropped(recorder),
    )


def job(case: Case) -> JobConfig:
    """The row's job as it is simulated."""
    config, algorithm, chunks = case.config, case.config.algorithm, case.settings.chunks
    engines = engines_of(case.row, config)
    if algorithm.batch_groups % chunks:
        raise ConfigError(f"chunks={chunks} does not divide algorithm.batch_groups={algorithm.batch_groups}")
    split: dict[str, int | str] = {"rollout": engines, "actor": 1, "actor_fwd": "actor", "reference": "actor"}
    return replace(
        one_device_each(config, split),
        iterations=WARMUP + case.settings.batches + END,
        warmup_iterations=WARMUP,
        algorithm=replace(
            algorithm,
            micro_batch_groups=algorithm.batch_groups // chunks,
            recompute_log_probs="old_log_prob_s" in case.phases,
            reference="ref_log_prob_s" in case.phases,
        ),
        cost=cost(case),
    )


def cost(case: Case) -> CostConfig:
    """Costs of the row's engines by the fitted roofline, and of its training pool by the phases, spread over tokens.

    What surrounds the phases is taken to be what it is in the nearest synchronous row.
    """
    fit, phases, like = case.fit, case.phases, case.fit.nearest(case.row)
    old, reference = phases.get("old_log_prob_s"), phases.get("ref_log_prob_s")
    scoring = [seconds for seconds in (old, reference) if seconds is not None]
    responses = drawn(fit.lengths, case.config, case.settings.batches)
    prompts = case.config.algorithm.batch_samples * factors_of(case.config).prompt_tokens
    tokens = responses.sum() / len(responses) + prompts
    pools = by_token_alone(
        fit.applied(engine_cost(case.config, colocated=False)),
        train_s_per_token=(phases.get(UPDATE, 0.0) + case.fetch_s) / tokens,
        log_prob_s_per_token=sum(scoring) / max(1, len(scoring)) / tokens,  # they share one setting
    )
    return replace(
        pools,
        reward_s_per_sample=host_s(like) / case.config.algorithm.batch_samples,
        generate_s=around_s(like),
    )


def _covered(timeline: Timeline, roles: set[str] | frozenset[str], kinds: set[str] | None, window: Interval) -> float:
    """Seconds of the window in which some of these roles worked, once however many."""
    spans: Sequence[Interval] = [
        (span.start, span.end)
        for span in timeline.spans
        if span.role in roles and span.kind != "wait_for_samples" and (kinds is None or span.kind in kinds)
    ]
    return length(clip(spans, window))


def _dropped(recorder: Recorder) -> float:
    metrics = recorder.ledger.metrics()
    done = metrics["ledger/trained"] + metrics["ledger/dropped_stale"]
    return metrics["ledger/dropped_stale"] / done if done else 0.0


def one_device_each(config: JobConfig, split: Mapping[str, int | str]) -> JobConfig:
    """The job in which every rollout engine, and every other pool, is one device; split: as `schedule.split`.

    How the devices of a worker share its work is in the costs then, not in the layout.
    """
    return replace(
        config,
        schedule=replace(config.schedule, split=dict(split)),
        cluster=replace(config.cluster, devices=sum(count for count in split.values() if isinstance(count, int))),
        engine=replace(config.engine, tensor_parallel=1),
        training=replace(config.training, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1),
    )


def by_token_alone(cost: CostConfig, train_s_per_token: float, log_prob_s_per_token: float) -> CostConfig:
    """Costs whose training and scoring are a time per token and nothing else; what generation costs stays."""
    return replace(
        cost,
        log_prob_s_per_token=log_prob_s_per_token,
        log_prob_s_per_pair=0.0,
        log_prob_call_s=0.0,
        train_s_per_token=train_s_per_token,
        train_s_per_pair=0.0,
        train_call_s=0.0,
        train_step_s=0.0,
        call_s=0.0,
    )
