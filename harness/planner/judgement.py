"""Proposals of a plan in systems that differ in all that nobody has measured: how much faster than the best colocated
choice, and how sure.

Every proposal goes through the event model once for each draw of experiments/priors.yaml, the same draws for all, of a
part of its devices and batch. What the part leaves out is taken from the plan's own trial of the whole, by the ratio of
both at the plan's costs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from harness.checks.layout import device_roles
from harness.config import CostConfig, JobConfig
from harness.config.compose import changed, make_schedule
from harness.config.placement import resolve_split
from harness.cost_model.job_cost import simulated_cost
from harness.driver.event_model import fast_steps, not_covered
from harness.planner.explore import part_of, parts_of, pool_layout, scoring_roles, window
from harness.planner.period import period
from harness.planner.plan import SEED, Choice, Plan
from harness.planner.work import LengthSamples, least_work
from harness.prediction.evidence import SHARED, Evidence
from harness.prediction.forecast import Verdict, verdict_of
from harness.prediction.generation import uncapped_mean
from harness.prediction.posterior import slower
from harness.prediction.prediction import posteriors
from harness.prediction.priors import Draws, read_priors
from harness.prediction.simulation import WHOLE

DRAWS = 64

PART = 512
"""Samples of a batch, at least, that a draw simulates. Of 7B on 64 devices, in five draws and two schedules, speed-ups
of parts differ from those of all 8,192 samples by 7 % in one draw and .3 % in the mean; systems differ by 25 %."""

_OWN = ("forward_share", "train_share", "decode_share", "decode_step_s")  # quantities that cost=roofline has as such


@dataclass(frozen=True)
class Judgement:
    """A choice, and how many times as fast as the baseline it is: float64 [DRAWS]."""

    choice: Choice
    speedup: Draws

    @property
    def verdict(self) -> Verdict:
        """Answer at `SURE`."""
        return verdict_of(self.speedup)


@dataclass(frozen=True)
class Judgements:
    """Judgements of the best of every schedule. stands_on: origin of the draws; why_none: why nothing was judged, ""
    where it was; baseline_s: seconds of an iteration of the baseline in each draw."""

    of: Sequence[Judgement] = ()
    stands_on: str = ""
    why_none: str = ""
    baseline_s: Draws | None = None

    def beside(self, choice: Choice, other: Choice) -> Draws | None:
        """How many times as fast as another a choice is, in each draw; None where one of them was not judged."""
        found = {id(one.choice): one.speedup for one in self.of}
        if id(choice) not in found or id(other) not in found:
            return None
        return found[id(choice)] / found[id(other)]


def judge(plan: Plan, given: Collection[str], evidence: Evidence | None = None) -> Judgements:
    """Judge the best of every schedule, and the proposal. given: settings that the user chose, which are not drawn;
    evidence: a synchronous row that narrows the draws."""
    baseline = next((one for one in plan.best_of_each if one.schedule == SHARED), None)
    if baseline is None:
        return Judgements(why_none=f"{SHARED}, which they would be beside, was not planned, or fits no devices")
    choices = list({id(choice): choice for choice in (baseline, *plan.best_of_each, plan.best)}.values())
    for choice in choices:
        if reason := _uncovered(choice):
            return Judgements(why_none=reason)
    drawn = systems(baseline.config, evidence)
    first = _Part(baseline, given)
    own = [first.in_turn(system) for system in drawn]
    step_s = np.array([one.step_s for one in own])
    found = [Judgement(baseline, np.ones(DRAWS))]
    for choice in choices[1:]:
        part = _Part(choice, given)
        its = [part.step_s(system, beside) for system, beside in zip(drawn, own, strict=True)]
        found.append(Judgement(choice, step_s / np.array(its)))
    origin = f"narrowed by {evidence.source}" if evidence else "as of any system: nothing of yours was measured"
    return Judgements(found, origin, baseline_s=step_s)


def _uncovered(choice: Choice) -> str:
    """Why a choice cannot be judged."""
    config = choice.config
    if isinstance(config.cost, CostConfig):
        return f"cost={config.cost.name} is given, of one system: nothing of it is drawn"
    job = choice.candidate.apply(config, device_roles(config))
    placement = resolve_split(job.schedule.split, job.cluster.devices, device_roles(config))
    reason = not_covered(job, make_schedule(job), placement)
    return f"the event model does not cover {reason}" if reason else ""


def systems(config: JobConfig, evidence: Evidence | None = None) -> list[Mapping[str, float]]:
    """Draws, each of all quantities; uncapped: mean of lengths before the cap."""
    if evidence is not None:
        (system,) = posteriors(evidence, DRAWS, SEED, given="sync").values()
        drawn = {**system.quantities, "uncapped": system.uncapped}
    else:
        drawn = read_priors().draw(DRAWS, SEED, {}, {})
        cap = config.cost.lengths.cap
        drawn["uncapped"] = uncapped_mean(cap * drawn["response_share"], drawn["tail"], cap)
    return [{name: float(values[draw]) for name, values in drawn.items()} for draw in range(DRAWS)]


@dataclass(frozen=True)
class InTurn:
    """A way of working in turn in a system, in seconds: its step; of that what sets a generation up on any devices, and
    what is the trainer's or is hidden where schedules overlap; devices: that train."""

    step_s: float
    before_s: float
    serial_s: float
    hidden_s: float
    devices: int

    @classmethod
    def of(cls, q: Mapping[str, float], step_s: float, generation_s: float, devices: int) -> Self:
        """Return what surrounds a simulated step, and generating in it, by the quantities of a system."""
        around_s = q["around_share"] / (1 - q["around_share"]) * generation_s
        step_s = (step_s + around_s) / (1 - q["rest_share"])
        rest_s = q["rest_share"] * step_s
        serial_s = q["rest_serial"] * rest_s
        before_s = around_s * (1 - q["around_sharing"])
        return cls(step_s, before_s, serial_s, q["rest_hidden"] * (rest_s - serial_s), devices)

    def of_part(self, share: float) -> Self:
        """The same around batches that are this share of its own."""
        before_s, serial_s, hidden_s = (share * one for one in (self.before_s, self.serial_s, self.hidden_s))
        return replace(self, step_s=share * self.step_s, before_s=before_s, serial_s=serial_s, hidden_s=hidden_s)

    def around(self, job: JobConfig, cost: CostConfig, q: Mapping[str, float], times: float = 1.0) -> CostConfig:
        """Costs of another way of working in the same system, with what surrounds it; times: as large as its simulated
        part is all of it."""
        algorithm = job.algorithm
        fetch_s = q["fetch_s_per_sample"] * algorithm.batch_samples if job.schedule.name not in WHOLE else 0.0
        return replace(
            cost,
            generate_s=cost.generate_s + self.before_s,
            train_step_s=cost.train_step_s + (self.serial_s + fetch_s) / algorithm.steps_per_version,
            reward_s_per_sample=cost.reward_s_per_sample + times * self.hidden_s / algorithm.batch_samples,
            network_bytes_per_s=1e9 * q["sync_gb_per_s"],
        )


def in_system(job: JobConfig, q: Mapping[str, float], given: Collection[str]) -> JobConfig:
    """The job with the roofline and the lengths of a system, but for settings that the user chose."""
    lengths = job.cost.lengths
    drawn: dict[str, Any] = {f"cost.{name}": q[name] for name in _OWN}
    drawn["cost.colocated_train_factor"] = 1 / q["alone_over_shared"]
    if lengths.kind == "lognormal":
        own: dict[str, Any] = {"mean": max(1.0, q["uncapped"]), "sigma": q["tail"], "common": q["common"]}
        its = {name: value for name, value in own.items() if not _said(f"cost.lengths.{name}", given)}
        drawn["cost.lengths"] = replace(lengths, **its)
    return changed(job, {path: value for path, value in drawn.items() if not _said(path, given)})


def _said(path: str, given: Collection[str]) -> bool:
    """Whether the user chose a setting, or a group that it is in."""
    return any(path == its or path.startswith(f"{its}.") for its in given)


def costs_in(
    cost: CostConfig, q: Mapping[str, float], trainers: int, scorers: int, shared: bool, beside: int
) -> CostConfig:
    """Costs in a system. trainers, scorers: devices; shared: with rollout; beside: on which the baseline trains, whose
    work is as much. What does not shrink with devices, a part `fixed` of the baseline's seconds, is less here, for each
    of fewer ones."""
    train = 1 - q["update_fixed"] * (1 - trainers / beside)
    score = 1 - q["scoring_fixed"] * (1 - scorers / beside)
    score *= 1.0 if shared else q["scoring_alone"]
    return replace(
        slower(cost, q["engine_time"]),
        train_s_per_token=train * cost.train_s_per_token,
        train_s_per_pair=train * cost.train_s_per_pair,
        log_prob_s_per_token=score * cost.log_prob_s_per_token,
        log_prob_s_per_pair=score * cost.log_prob_s_per_pair,
    )


class _Part:
    """A choice on a part of its devices, with as large a part of its batch, at the costs of the whole."""

    def __init__(self, choice: Choice, given: Collection[str]) -> None:
        self._given, self._candidate = given, choice.candidate
        self._roles = device_roles(choice.config)
        self._job = choice.candidate.apply(choice.config, self._roles)
        self._schedule = make_schedule(self._job)
        self._times = parts_of(self._job, choice.candidate, PART)
        self._of_whole = choice.outcome.seconds / self._run(self._job, self._cost(self._job))[0]

    def in_turn(self, q: Mapping[str, float]) -> InTurn:
        """The baseline in a system: what the simulator has of it, and what surrounds generation and the step."""
        devices = self._candidate.actor
        step_s, generation_s = (self._of_whole * seconds for seconds in self._run(*self._drawn(q, devices)))
        return InTurn.of(q, step_s, generation_s, devices)

    def step_s(self, q: Mapping[str, float], beside: InTurn) -> float:
        """Seconds of an iteration in a system whose baseline takes this."""
        job, cost = self._drawn(q, beside.devices)
        return self._of_whole * self._run(job, beside.around(job, cost, q, self._times))[0]

    def _drawn(self, q: Mapping[str, float], devices: int) -> tuple[JobConfig, CostConfig]:
        """The job in a system, and its costs; devices: on which the baseline trains."""
        job, one = in_system(self._job, q, self._given), self._candidate
        return job, costs_in(self._cost(job), q, one.actor, one.scoring or one.actor, one.shared, devices)

    def _cost(self, job: JobConfig) -> CostConfig:
        """Costs on all devices."""
        return simulated_cost(job, resolve_split(job.schedule.split, job.cluster.devices, self._roles))

    def _run(self, job: JobConfig, cost: CostConfig) -> tuple[float, float]:
        """Seconds of an iteration of the part, in the long run as `explore.trial` has them, and of generating in it."""
        part, job = part_of(job, self._candidate, PART, cost)
        its = window(self._schedule, job.algorithm.batch_samples)
        job = replace(job, iterations=its.iterations, warmup_iterations=its.warmup)
        pools = pool_layout(job, self._schedule, part, len(scoring_roles(self._roles)))
        bound = period(self._schedule, least_work(cost, pools, LengthSamples.of(job, SEED, its.iterations)))
        end = its.warmup + its.measured
        found, measured = fast_steps(job, SEED, end), slice(its.warmup, end)
        return max(bound, float(found.seconds[measured].mean())), float(found.generate_s[measured].mean())
