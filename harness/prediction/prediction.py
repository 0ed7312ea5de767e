"""`make predict`: rows never run, by their schedules on the virtual clock, in each draw of what is unknown."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice
from operator import call
from typing import Any

import numpy as np
from scipy.stats import norm

from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.config.registries import find
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.shape import weight_bytes
from harness.driver.event_model import fast_steps
from harness.prediction.evidence import SETTINGS, Evidence, StepRow, Workload
from harness.prediction.forecast import Forecast, interval
from harness.prediction.generation import batch_seconds, uncapped_mean
from harness.prediction.posterior import (
    OLD,
    REFERENCE,
    UPDATE,
    Given,
    Narrowing,
    System,
    engine_cost,
    engines_of,
    factors_of,
    lengths_of,
    narrow,
    phase_of,
    slower,
)
from harness.prediction.priors import PRIORS, Draws, Priors, read_priors
from harness.prediction.simulation import (
    CHECKED,
    PART,
    DrawnCosts,
    SimulatedStep,
    by_token_alone,
    checked,
    one_device_each,
    row_job,
    samples_drawn,
    simulated,
    smaller,
    streams,
    uncovered,
)
from harness.rpc.children import parallel_map

DRAWS = 200  # draws of what is not known, of small jobs; of large ones fewer
_SAMPLES, _LEAST_DRAWS = 1_200_000, 32  # that all draws of a batch of all rows have together; draws at least
OWN_DRAWS = 10  # draws of a row that only its schedule's own file knows, which takes seconds for each
CHECKS = 2  # draws of a row in which the fast model is compared with the schedule's own file
SYNC_S = 0.1  # seconds that a transfer of weights takes at least
GIVEN_NOISE = 0.02
"""Standard deviation of the logarithm of a training phase that the row gives itself: of means over steps."""

_ENGINES, _SEEDS = 8, 16  # that `longer_by` simulates
_TIMEOUT_S = 3600.0  # longest wait for all draws of a row


@dataclass(frozen=True)
class Predicted:
    """Forecasts of what was asked, in that order, and the systems that they were drawn of, by the text in `engine`.
    checks: by row, how far the fast model is from the schedule's own file, of a step, at most."""

    evidence: Evidence
    given: Given
    systems: Mapping[str, System]
    forecasts: Sequence[Forecast]
    checks: Mapping[str, float] = field(default_factory=dict)

    def system(self, row: StepRow) -> System:
        """The system of a row: of its engine, or, where no synchronous row has it, the first."""
        return self.systems.get(row.engine) or next(iter(self.systems.values()))


def predict(
    evidence: Evidence,
    draws: int | None = None,
    seed: int = 0,
    *,
    given: Given = "train",
    priors: Priors | None = None,
    processes: int = 1,
    checks: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Predicted:
    """Predict what is asked. draws: as many as take some seconds, if None; given: rows that are read; priors: those of
    experiments/priors.yaml; processes: that simulate side by side; checks: draws of a row in which the fast model is
    compared with the schedule's own file. Raises ConfigError where the evidence, or a job of it, cannot be."""
    priors = priors or read_priors()
    jobs = [job_of(row, full_workload(row, (), evidence, priors), evidence) for row in evidence.asked]  # or refused
    if any(job.algorithm.has_critic for job in jobs):
        raise ConfigError("rows have no phase of a critic, whose work would be counted twice; predict them without one")
    if draws is None:
        samples = sum(map(samples_drawn, evidence.asked, jobs))
        draws = max(_LEAST_DRAWS, min(DRAWS, _SAMPLES // samples))
    systems = posteriors(evidence, draws, seed, given=given, priors=priors, progress=progress)
    predicted = Predicted(evidence, given, systems, [])
    rows = [RowDraws(row, predicted.system(row), evidence, given, priors, seed) for row in evidence.asked]
    steps, compared = [row.steps() for row in rows], [row.checks(checks) for row in rows]
    progress(f"{', '.join(map(str, evidence.asked))}: {draws} draws")
    tasks: list[Callable[[], Any]] = [*chain(*steps), *chain(*compared)]  # of all rows at once
    done = iter(parallel_map(call, tasks, processes=processes, timeout_s=_TIMEOUT_S, what=f"{len(tasks)} draws"))
    forecasts = [row.forecast(list(islice(done, len(its)))) for row, its in zip(rows, steps, strict=True)]
    differences = {row.row.label: max(islice(done, len(its))) for row, its in zip(rows, compared, strict=True) if its}
    return replace(predicted, forecasts=forecasts, checks=differences)


def posteriors(
    evidence: Evidence,
    draws: int = DRAWS,
    seed: int = 0,
    *,
    given: Given = "train",
    priors: Priors | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, System]:
    """Draws of each software, by the text in `engine`, narrowed by its synchronous rows."""
    priors, found = priors or read_priors(), {}
    engines = list(dict.fromkeys(row.engine for row in evidence.rows))
    for engine in engines:
        alike = [row for row in evidence.rows if row.engine == engine]
        progress(f"reading {', '.join(map(str, alike))}")
        workload, said = full_workload(alike[0], alike, evidence, priors), evidence.of(alike[0])
        job = job_of(alike[0], workload, evidence)
        narrowing = Narrowing(
            alike,
            workload,
            job,
            priors,
            evidence.quantities,
            wide=not (said.model and said.device),
            longer=longer_by(alike[0], job, workload, priors),
            seed=seed,
        )
        others = [row for row in evidence.asked if (row.engine if row.engine in engines else engines[0]) == engine]
        found[engine] = narrow(narrowing, others, given, draws)
    return found


def longer_by(row: StepRow, job: JobConfig, workload: Workload, priors: Priors) -> float:
    """How many times as long as `batch_seconds` says a batch of a synchronous row takes, where engines share prompts or
    prefill beside decoding, a filter refuses groups or an environment answers: of typical engines, `_ENGINES`
    at most with their part of the batch, by the schedule's own file (or the fast model, where that covers it)."""
    cost = factors_of(job)
    if not (cost.prefix_caching or cost.step_tokens or cost.turns or job.refills):
        return 1.0
    assert workload.cap is not None, "workloads are filled"
    typical = {name: np.array([one.typical]) for name, one in priors.quantities.items()}
    mean = np.array([workload.response_mean or workload.cap * typical["response_share"][0]])
    lengths = lengths_of(typical, uncapped_mean(mean, typical["tail"], workload.cap), workload.cap, 0)
    engine = by_token_alone(engine_cost(job, typical, 0, shared=row.shared), 0.0, 0.0)
    alone = replace(engine, lengths=lengths, offload_s=0.0, reload_s=0.0, sync_s=0.0, weight_bytes=0.0)
    engines = min(_ENGINES, engines_of(row, job))
    groups = max(1, job.algorithm.batch_groups * engines // engines_of(row, job))
    algorithm = replace(job.algorithm, batch_groups=groups, mini_batches=1, micro_batch_groups=1)
    split: dict[str, int | str] = {"rollout": engines, "actor": 1, "actor_fwd": "actor", "reference": "actor"}
    if row.shared:
        split |= {"rollout": "actor", "actor": engines}
    one = replace(one_device_each(job, split), iterations=1, warmup_iterations=0, algorithm=algorithm, cost=alone)
    logs = []
    for seed in range(CHECKS if uncovered(one) else _SEEDS):
        batch = ResponseLengths.of_job(one, seed).batches(0, 1, algorithm.batch_samples)[0]
        without = batch_seconds(alone, batch, engines=engines, slots=job.engine.slots)
        logs.append(np.log(fast_steps(one, seed).seconds[0] / without))
    return float(np.exp(np.mean(logs)))


def full_workload(row: StepRow, alike: Sequence[StepRow], evidence: Evidence, priors: Priors) -> Workload:
    """The workload of a row, and what it does not say as assumed. alike: synchronous rows of its software: what they
    time is there. Whether there is a scoring of which nobody says anything is as in a job's own defaults."""
    seen = Workload(
        recompute_log_probs=any(other.old_log_prob_s or other.log_probs_s for other in alike) or None,
        reference=any(other.ref_log_prob_s for other in alike) or None,
    )
    untimed = Workload(recompute_log_probs=True, reference=False)
    return evidence.of(row).over(seen).over(untimed).over(priors.assumed(evidence.system))


def job_of(row: StepRow, workload: Workload, evidence: Evidence) -> JobConfig:
    """The job of a row, its devices and costs aside. Settings of a schedule are of the rows that it has such an option
    in. Raises ConfigError, naming the setting."""
    names = {field: name for name, field in SETTINGS.items() if field not in ("prompt_mean", "response_mean")}
    said = {names[name]: value for name, value in dataclasses.asdict(workload).items() if name in names}
    if row.schedule == "fully_async" and workload.streamed_groups and workload.group_size:
        most = workload.streamed_groups * workload.group_size
        said["engine.slots"] = min(most, workload.slots or most)
    of_rows = {name for other in (*evidence.rows, *evidence.asked) for name in _options(other)}
    settings = [
        *evidence.settings,
        *evidence.of_engine.get(row.engine, ()),
        *evidence.of_schedule.get(row.schedule, ()),
    ]
    own = []
    for setting in settings:
        option = setting.partition("=")[0].removeprefix("schedule.")
        if not setting.startswith("schedule.") or option in _options(row):
            own.append(setting)
        elif option not in of_rows:
            raise ConfigError(f"{setting}: no schedule in {evidence.source} has such an option; take it out")
    return _composed(
        f"schedule={row.schedule}",
        "backend=virtual",
        *(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in said.items() if v is not None),
        *own,
        *(f"schedule.{name}={value}" for name, value in row.options.items()),
    )


@cache
def _composed(*settings: str) -> JobConfig:
    """Composing takes as long as a dozen draws of a small job, and every row asks several times."""
    return compose_job(list(settings))


def _options(row: StepRow) -> list[str]:
    return [option.name for option in dataclasses.fields(find("schedule", row.schedule))]


class RowDraws:
    """A row that is asked for, in each draw of its system. Its attributes are what its draws share."""

    def __init__(
        self, row: StepRow, system: System, evidence: Evidence, given: Given, priors: Priors, seed: int
    ) -> None:
        self.row, self.system, self.read = row, system, given
        self.said = evidence.of(row).over(evidence.of(system.rows[0]))
        self.workload = self.said.over(system.workload)
        self.job = job_of(row, self.workload, evidence)
        self.reference = system.nearest(row)
        self.around = system.around[self.reference.label]
        self.count = len(system.uncapped)
        self.random = np.random.default_rng(seed + 1)
        self.noise = priors.quantities["run_noise"].normal[1]
        self.drift = (
            self._noisy(0.0) if self.reference.devices == row.devices and row.shared else system.quantities["drift"]
        )
        self.told: list[str] = []
        self.scoring = {name: self._phase(name) for name in (OLD, REFERENCE) if self._runs(name)}
        self.update = self._phase(UPDATE)
        self.generate_noise = self._noisy(self.noise)

    def _noisy(self, deviation: float) -> Draws:
        noise: Draws = np.exp(deviation * self.random.standard_normal(self.count))
        return noise

    def _runs(self, name: str) -> bool:
        return bool(self.workload.recompute_log_probs if name == OLD else self.workload.reference)

    def _phase(self, name: str) -> Draws:
        """Seconds of a training phase: as the row gives it, where that is read; else the system's."""
        scorings = self._runs(OLD) + self._runs(REFERENCE)
        own = phase_of(self.row, name, max(1, scorings)) if self.read == "train" else None
        if own is not None:
            self.told.append(f"{name} {own:g}")
            return own * self._noisy(GIVEN_NOISE)
        if name not in self.system.work:  # the synchronous rows do without it
            like = OLD if name == REFERENCE else REFERENCE
            name = like if like in self.system.work else name
        seconds: Draws = self.system.phase_s(name, self.row.train_devices, self.row.shared)
        return seconds * self.drift * self._noisy(self.noise)

    def forecast(self, steps: Sequence[SimulatedStep] | None = None) -> Forecast:
        """The row's steps, beside those of the synchronous row that is nearest in devices. steps: what `steps` gives,
        where it was called elsewhere."""
        if self.row.shared:
            step, generation, wait = self._in_turn()
        else:
            found = [simulate() for simulate in self.steps()] if steps is None else steps
            step, generation, wait = np.array([(one.step_s, one.generation_s, one.wait_s) for one in found]).T
        simulated = len(step)
        quantities = {name: values[:simulated] for name, values in self.system.quantities.items()}
        reference = self.around.step_s[:simulated]
        return Forecast(
            row=self.row,
            reference=self.reference,
            step_s=step,
            reference_s=reference,
            wait_s=wait,
            generation_s=generation,
            given=self._given(),
            assumed=self._assumed(simulated),
            settles=settles(reference / step, quantities),
            implausible=self.system.implausible,
        )

    def _given(self) -> tuple[str, ...]:
        """Say of the job what the row stands on, the synchronous rows, and its own phases where they are read."""
        rows = ", ".join(str(row) for row in self.system.rows)
        return (*_listed(self.said), f"rows: {rows}", *self.told)

    def _assumed(self, simulated: int) -> tuple[str, ...]:
        """Assumptions: the job's, phases without a time, and the quantities that are drawn."""
        own = {name: value for name, value in vars(self.workload).items() if getattr(self.said, name) is None}
        texts = list(_listed(Workload(**own)))
        if self.said.response_mean is None:
            low, high = interval(self.system.quantities["response_mean"])
            texts.append(f"response_mean {low:,.0f} to {high:,.0f}")
        texts += [f"{name} by the roofline" for name in sorted(self.system.missing)]
        texts.append(f"quantities of {PRIORS.name}")
        if self.system.longer != 1:
            texts.append(f"synchronous batches take {self.system.longer:.2f} times as long as lengths alone say")
        if reason := self.only_own_file:
            texts.append(f"{simulated} draws, of a part of the devices: the fast model does not cover {reason}")
        elif not self.row.shared and streams(self.row):
            texts.append(f"a part of the devices and of the batch, of {PART:,} samples at least, stands for all")
        return tuple(texts)

    @property
    def only_own_file(self) -> str:
        """Parts of the row's job that the fast model does not cover."""
        return "" if self.row.shared else uncovered(row_job(self.row, self.job, self.costs(0)))

    def steps(self) -> list[Callable[[], SimulatedStep]]:
        """Calls that simulate the row's step in each draw; none where phases are added."""
        if self.row.shared:
            return []
        tasks: list[Callable[[], SimulatedStep]] = []
        own_file = bool(self.only_own_file)
        least = CHECKED if own_file else samples_drawn(self.row, self.job)
        for draw in range(min(self.count, OWN_DRAWS) if own_file else self.count):
            costs = self.costs(draw)
            tasks.append(partial(simulated, smaller(row_job(self.row, self.job, costs), least), draw, costs.fetch_s))
        return tasks

    def checks(self, count: int) -> list[Callable[[], float]]:
        """Calls that compare the fast model with the schedule's file in so many draws; none where one cannot."""
        if self.row.shared or self.only_own_file:
            return []
        draws = range(min(count, self.count))
        return [partial(checked, row_job(self.row, self.job, self.costs(draw)), draw) for draw in draws]

    def costs(self, draw: int) -> DrawnCosts:
        """The row's costs in one draw."""
        system, algorithm, around = self.system, self.job.algorithm, self.around
        q = {name: float(values[draw]) for name, values in system.quantities.items()}
        engine = slower(system.engine(self.job, draw, shared=self.row.shared), float(self.generate_noise[draw]))
        lengths = system.lengths(draw, float(self.drift[draw]))
        sync_s = max(SYNC_S, weight_bytes(self.job.model) / (1e9 * q["sync_gb_per_s"]))
        if self.row.sync_s and self.read == "train":
            sync_s = self.row.sync_s
        responses = ResponseLengths(lengths, draw, algorithm.group_size).batches(2, 1, algorithm.batch_samples)
        return DrawnCosts(
            engine=replace(engine, lengths=lengths),
            scoring_s={name: float(seconds[draw]) for name, seconds in self.scoring.items()},
            update_s=float(self.update[draw]),
            serial_s=float(around.serial[draw]),
            hidden_s=float(around.hidden[draw]),
            before_s=float(around.before[draw]),
            sync_s=sync_s,
            tokens=float(responses.sum() + algorithm.batch_samples * engine.prompt_tokens),
            fetch_s=q["fetch_s_per_sample"] * algorithm.batch_samples if streams(self.row) else 0.0,
        )

    def _in_turn(self) -> tuple[Draws, Draws, Draws]:
        """Add phases: on devices that are shared phase follows phase."""
        generation, algorithm = np.empty(self.count), self.job.algorithm
        for draw in range(self.count):
            costs = self.costs(draw)
            lengths = ResponseLengths(costs.engine.lengths, draw, algorithm.group_size)
            batch = lengths.batches(0, 1, algorithm.batch_samples)[0]
            generation[draw] = batch_seconds(
                costs.engine, batch, engines=engines_of(self.row, self.job), slots=self.job.engine.slots
            )
        generation *= self.system.longer
        around = self.around
        step = generation + self.update + around.before + around.serial + around.hidden + around.sharing
        step = sum(self.scoring.values(), step)
        if not self.reference.shared:
            step = step / (1 - self.system.quantities["switch_share"])
        return step, generation, np.zeros(self.count)


def _listed(workload: Workload) -> tuple[str, ...]:
    """Fields that a workload says, a text each."""
    said = {name: value for name, value in vars(workload).items() if value is not None}
    return tuple(f"{name} {v:,g}" if isinstance(v, float) else f"{name} {str(v).lower()}" for name, v in said.items())


MEASURES = {
    "response_mean": "mean length of responses",
    "tail": "share of responses that reach the cap, and the longest",
    "common": "lengths by prompt",
    "prompt_tokens": "mean length of prompts",
    "drift": "mean length of responses in the run asked for",
    "alone_over_shared": "a step of training on devices of its own",
    "scoring_alone": "a step of scoring on devices of its own",
    "scoring_fixed": "scoring on half of the devices",
    "update_fixed": "training on half of the devices",
    "train_share": "seconds of training a batch",
    "forward_share": "seconds of scoring a batch",
    "engine_time": "seconds of generating a batch",
    "decode_share": "seconds of generating a batch on half of the devices",
    "decode_step_s": "seconds of generating a few samples",
    "around_share": "generating sequences apart from the phase around it",
    "around_sharing": "sleep and wake of engines",
    "rest_share": "the step beside its phases",
    "rest_serial": "what of the step's rest is the trainer's",
    "rest_hidden": "what of the step's rest a schedule could hide",
    "switch_share": "offload, sleep and wake on shared devices",
    "sync_gb_per_s": "seconds of one transfer of weights to engines of their own",
    "fetch_s_per_sample": "seconds that a trainer takes for samples from a queue",
}
"""Measurements that make a quantity known."""


def settles(speedup: Draws, quantities: Mapping[str, Draws]) -> str:
    """The measurement that leaves least doubt about the sign of log(speed-up), by its regression on each quantity: with
    slope and rest of that, the mean probability of the less likely sign."""
    gain = np.log(speedup)
    p_faster = float(np.mean(gain > 0))
    best, least = "", min(p_faster, 1 - p_faster)
    before = least
    for name, text in MEASURES.items():
        values = np.log(quantities[name])
        if values.std() < 1e-6:
            continue
        slope, base = np.polyfit(values, gain, 1)
        line = base + slope * values
        rest = max(1e-9, float((gain - line).std()))
        doubt = float(norm.cdf(-np.abs(line) / rest).mean())
        if doubt < least - 0.005:
            best, least = text, doubt
    return f"{best} (doubt {before:.0%}, then {least:.0%})" if best else ""
