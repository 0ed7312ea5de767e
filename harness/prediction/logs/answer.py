"""Whether the run of a log would gain by another schedule, split or staleness on its own devices, and how surely."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.config import ConfigError
from harness.config.compose import as_arguments, compose_job
from harness.cost_model.shape import weight_bytes
from harness.metrics.formatting import markdown_table, number
from harness.metrics.tables import Table
from harness.prediction.evidence import SHARED, Evidence, StepRow, Workload
from harness.prediction.forecast import Forecast, figures_of
from harness.prediction.logs.read import PHASES, ReadLog
from harness.prediction.prediction import predict

SCHEDULES: tuple[tuple[str, str], ...] = (
    ("one_step_off", ""),
    ("delayed_update", ""),
    ("half_step", ""),
    ("fully_async", "0.5"),
    ("fully_async", "1"),
    ("fully_async", "2"),
)
"""Schedules that are tried, with their `max_staleness`."""

SHARES = (0.25, 0.5, 0.75)  # shares of the devices that generate, which are tried
_DRAWS, _SCREEN, _BEST = 100, 12, 3  # draws of the best schedules; a draw in so many of all others; how many are best
_STATE = 8  # bytes of training for one of weights in bfloat16
_USABLE = 0.8  # of a device's memory
_OWN = 0.1  # standard deviation of the logarithm of an asynchronous run's own step around what is predicted of it


@dataclass(frozen=True)
class Answer:
    """Forecasts, the fastest first, beside the run of the log. own: of that run itself, where it was asynchronous."""

    read: ReadLog
    forecasts: tuple[Forecast, ...]
    own: Forecast | None = None

    @property
    def best(self) -> Forecast:
        """The fastest."""
        return self.forecasts[0]

    @property
    def command(self) -> str:
        """Simulates the fastest, or the run itself where nothing is surely faster."""
        row = self.best.row if self.best.verdict == "faster" else self.read.row
        workload = self.read.evidence.workload
        settings = {
            "schedule": row.schedule,
            "model": workload.model,
            "device": workload.device,
            "cluster.devices": row.devices,
            **{f"schedule.{name}": value for name, value in row.options.items()},
            "schedule.split.rollout": row.rollout_devices if row.schedule != SHARED else None,
            "algorithm.batch_groups": workload.batch_groups,
            "algorithm.group_size": workload.group_size,
            "engine.tensor_parallel": workload.tensor_parallel,
            "cost.lengths.cap": workload.cap,
            "cost.lengths.mean": workload.response_mean and round(workload.response_mean),
            "backend": "virtual",
        }
        return f"cadence bench {as_arguments({name: value for name, value in settings.items() if value is not None})}"


def answer(
    read: ReadLog,
    *,
    draws: int = _DRAWS,
    seed: int = 0,
    processes: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Predict what else the run's devices could do. draws: of the best; of others there are fewer. Raises ConfigError
    where the log, or a job of it, cannot be."""
    run, said = read.row, read.evidence
    evidence = replace(said, rows=(in_turn(run),), settings=read.arguments)
    own = () if run.synchronous else (run,)
    asked = [row for row in candidates(run, said.workload.tensor_parallel or 1) if _fits(row, said.workload)]
    if not asked:
        raise ConfigError(
            f"{said.source}: {run.devices} devices cannot be split into two pools; say more in cluster.devices="
        )
    screened = _forecasts(evidence, (*own, *asked), max(2, draws // _SCREEN), seed, processes, progress)[len(own) :]
    best: dict[str, StepRow] = {}
    for forecast in sorted(screened, key=lambda one: one.median):
        best.setdefault(forecast.row.schedule, forecast.row)
    forecasts = _forecasts(evidence, (*own, *list(best.values())[:_BEST]), draws, seed, processes, progress)
    mine = forecasts[0] if own else None
    if mine is not None:
        forecasts = _as_observed(mine, forecasts[1:], run, seed)
    return Answer(read, tuple(sorted(forecasts, key=lambda one: one.median)), mine)


def candidates(run: StepRow, together: int) -> tuple[StepRow, ...]:
    """Rows that the devices of a run could be: rows without times. together: devices of one engine."""
    rollouts = sorted({together * round(share * run.devices / together) for share in SHARES})
    return tuple(
        StepRow(
            label=f"{schedule} {rollout}+{run.devices - rollout}",
            schedule=schedule,
            rollout_devices=rollout,
            train_devices=run.devices - rollout,
            options={"max_staleness": staleness} if staleness else {},
        )
        for schedule, staleness in SCHEDULES
        for rollout in rollouts
        if together <= rollout < run.devices
        and (schedule, rollout, staleness or None)
        != (run.schedule, run.rollout_devices, run.options.get("max_staleness"))
        and not (schedule == "half_step" and rollout < 2 * together)
    )


def _fits(row: StepRow, workload: Workload) -> bool:
    """Whether pools hold their models: weights in an engine; weights, gradients and Adam's state in the trainer."""
    job = compose_job([f"model={workload.model}", f"device={workload.device}"])
    weights, memory = weight_bytes(job.model), _USABLE * job.device.memory_bytes
    state = weights * _STATE if job.model.dtype == "bfloat16" else weights * _STATE / 2
    return weights <= memory * (workload.tensor_parallel or 1) and state <= memory * row.train_devices


def in_turn(run: StepRow) -> StepRow:
    """The row itself where it is synchronous; of an asynchronous one what its devices would take for a batch if they
    took turns: its phases, without its step."""
    if run.synchronous:
        return run
    kept = {name: getattr(run, name) for name in PHASES if name not in ("rollout_s", "wait_s")}
    return StepRow(
        label=f"{run.label} in turn",
        schedule="separated_sync",
        options={"streaming": "false"},
        rollout_devices=run.rollout_devices,
        train_devices=run.train_devices,
        generate_s=run.generate_s,
        steps=run.steps,
        **kept,
    )


def _forecasts(
    evidence: Evidence, asked: Sequence[StepRow], draws: int, seed: int, processes: int, progress: Callable[[str], None]
) -> list[Forecast]:
    wanted = replace(evidence, asked=tuple(asked))
    return list(predict(wanted, draws, seed, processes=processes, progress=progress).forecasts)


def _as_observed(own: Forecast, others: Sequence[Forecast], run: StepRow, seed: int) -> list[Forecast]:
    """Forecasts in those draws that predict the asynchronous run itself as it was, beside its own step."""
    assert run.step_s is not None
    weights = (1 + (np.log(own.step_s / run.step_s) / _OWN) ** 2 / 4) ** -2.5  # Student's t, four degrees of freedom
    chosen = np.random.default_rng(seed).choice(len(weights), len(weights), p=weights / weights.sum())
    step_s = np.full(len(weights), run.step_s)
    return [
        replace(
            one,
            reference=run,
            reference_s=step_s,
            step_s=one.step_s[chosen],
            wait_s=one.wait_s[chosen],
            generation_s=one.generation_s[chosen],
            settles="",  # of the draws as they were
        )
        for one in others
    ]


def forecasts_table(found: Answer) -> Table:
    """The forecasts, a row each."""
    columns = ("schedule", "devices", "step, s", "step, 80 %", "speed-up", "speed-up, 80 %", "P(faster)", "verdict")
    rows = []
    for one in found.forecasts:
        step = (number(one.median), " to ".join(map(number, one.interval())))
        devices = f"{one.row.rollout_devices} + {one.row.train_devices}"
        rows.append((one.row.schedule + _options(one.row), devices, *step, *figures_of(one.speedup), one.verdict))
    return Table("simulated from the log of one run; intervals hold 80 % of the draws", columns, rows)


def what_it_stands_on(found: Answer) -> list[str]:
    """Lines: what would settle it, what is off, what was read, and what that left open."""
    read, best = found.read, found.best
    workload = read.evidence.workload
    said = {name: value for name, value in vars(workload).items() if value is not None}
    known = [f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in said.items()]
    unknown = [name for name, value in vars(workload).items() if value is None]
    lines = [f"settled most by: {best.settles}"] * bool(best.settles and best.verdict == "cannot be told")
    lines += [best.implausible] * bool(best.implausible)
    if found.own is not None:
        lines += [f"of the run itself {number(found.own.median)} s a step are predicted; draws weigh by that"]
    lines += [f"read: {read.row}, {_seconds(read.row)}", *read.notes]
    lines += [f"given: {', '.join(known)}"]
    lines += [f"not said, and drawn or assumed (experiments/priors.yaml): {', '.join(unknown)}"] * bool(unknown)
    return lines


def as_markdown(found: Answer) -> str:
    """A page: the answer, the forecasts, what they stand on, and what runs the best."""
    table = forecasts_table(found)
    parts = [f"# {found.read.evidence.source}", f"**{sentence(found)}**", f"{table.title}:"]
    parts += [markdown_table(table.columns, table.rows), f"    {found.command}"]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in what_it_stands_on(found))]) + "\n"


def sentence(found: Answer) -> str:
    """The answer in one sentence."""
    best, run = found.best, found.read.row
    median, between, sure = figures_of(best.speedup)
    what = f"{best.row.schedule}{_options(best.row)} on {best.row.rollout_devices} + {best.row.train_devices} devices"
    gain = f"{median} times as fast as {run} ({between}, 80 %)"
    if best.verdict == "faster":
        return f"{what} is {gain}"
    if best.verdict == "slower":
        return f"Stay with {run.schedule}: the best of others, {what}, is {gain}"
    return f"{'A tie' if best.verdict == 'tie' else 'Cannot tell'}: {what} is {gain}; P(faster) {sure}"


def _options(row: StepRow) -> str:
    return "".join(f" {name}={value}" for name, value in row.options.items())


def _seconds(row: StepRow) -> str:
    fields = ("step_s", *PHASES, "generate_s")
    return ", ".join(f"{name} {number(value)}" for name in fields if (value := getattr(row, name)) is not None)
