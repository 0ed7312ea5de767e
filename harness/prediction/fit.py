"""The workload of a table, fitted to its synchronous rows: how many tokens, and how long a tail."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
from scipy.optimize import brentq

from engines.simulated.decoding import decoded_s
from harness.config import ConfigError, CostConfig, JobConfig, LengthsConfig
from harness.cost_model.cost import DecodeCost
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.cost_model.shape import forward_flops_per_token
from harness.prediction.phases import UPDATE, PhaseScaling
from harness.prediction.table import Row, factors_of, nearest

SHORTEST_TAIL, LONGEST_TAIL = 0.05, 1.5
"""Bounds of a log-normal's sigma. Longer tails have half of their tokens in a few capped responses."""

_STEPS = 4096  # in which what is fitted is looked for

WARMUP = 2
"""Iterations before a schedule is in its stride: their batches do not count."""

_NORMAL = NormalDist()


@dataclass(frozen=True)
class WorkloadFit:
    """The workload fitted to the synchronous rows of one engine. They are runs of one job, so that they share its
    workload.

    tokens: prompts and responses of a batch; tokens_from: the phase that they were read off, or "settings" where no row
    has one. step_s: seconds added to every decode step; scale: of all costs of an engine. generated_s: seconds that a
    batch takes to generate with what was fitted, by row, of those that say how long it took.
    """

    rows: tuple[Row, ...]
    tokens: float
    tokens_from: str
    lengths: LengthsConfig
    step_s: float = 0.0
    scale: float = 1.0
    generated_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds by the line of the row."""

    def applied(self, cost: CostConfig) -> CostConfig:
        """A cost model of the same engines with what was fitted."""
        return replace(
            cost,
            decode_step_s=self.scale * cost.decode_step_s + self.step_s,
            decode_weights_s=self.scale * cost.decode_weights_s,
            decode_experts_s=self.scale * cost.decode_experts_s,
            decode_step_s_per_sample=self.scale * cost.decode_step_s_per_sample,
            decode_s_per_cached_token=self.scale * cost.decode_s_per_cached_token,
            prefill_s_per_token=self.scale * cost.prefill_s_per_token,
            prefill_s_per_pair=self.scale * cost.prefill_s_per_pair,
            lengths=self.lengths,
        )

    def nearest(self, row: Row) -> Row:
        """The synchronous row that is nearest in devices."""
        return nearest(self.rows, row.gpus, lambda other: other.gpus)


def fit(rows: Sequence[Row], config: JobConfig, sync: Mapping[str, PhaseScaling], *, batches: int) -> WorkloadFit:
    """WorkloadFit the synchronous rows of one engine. config: of any of them; sync: how their phases scale.

    1. Tokens of a batch: those whose forward pass takes the device time of old_log_prob at `forward_share` of the
       device's peak. Decoding at `decode_share` does the same products, so only the ratio of the shares matters.
    2. The tail: the log-normal of this mean, under the cap, whose batches take as long to generate as published; of
       several rows, the one for which the mean of log(fitted / published) is 0.
    3. What the longest tail does not explain is added to every decode step; where even the shortest takes too long,
       all costs of an engine shrink.
    """
    factors = factors_of(config)
    tokens, tokens_from = _tokens(rows[0], config, sync)
    mean, cap = tokens / config.algorithm.batch_samples - factors.prompt_tokens, factors.lengths.cap
    if not 1 <= mean < cap:
        raise ConfigError(
            f"line {rows[0].number}, {rows[0]}: {tokens_from} speaks for responses of {mean:,.0f} tokens in the mean, "
            f"in {config.algorithm.batch_samples} samples with prompts of {factors.prompt_tokens}; "
            f"check cost.lengths.cap={cap}, cost.prompt_tokens, algorithm.batch_groups, algorithm.group_size, model "
            "and device"
        )
    start = WorkloadFit(
        tuple(rows), tokens, tokens_from, lognormal(mean, factors.lengths.sigma, cap, factors.lengths.common)
    )
    timed = {row: seconds for row in rows if (seconds := generated_s(row))}
    return _fit_tail(start, mean, timed, config, batches) if timed else start


def engine_cost(config: JobConfig, *, colocated: bool) -> CostConfig:
    """Costs of one rollout engine of the job, by the roofline."""
    layout = JobLayout(engine_devices=config.engine.tensor_parallel, colocated=colocated)
    return roofline(config.model, config.device, factors_of(config), layout)


def engines_of(row: Row, config: JobConfig) -> int:
    """Rollout engines of a row. Raises ConfigError where its devices do not make whole ones."""
    together = config.engine.tensor_parallel
    if row.rollout_gpus % together:
        raise ConfigError(f"line {row.number}, {row}: engine.tensor_parallel={together} does not divide its devices")
    return row.rollout_gpus // together


def drawn(lengths: LengthsConfig, config: JobConfig, batches: int) -> np.ndarray:
    """Lengths of the responses of the batches that figures are a mean over: int64 [batches, samples]."""
    algorithm = config.algorithm
    return ResponseLengths(lengths, 0, algorithm.group_size, algorithm.batch_samples).batches(
        WARMUP, batches, algorithm.batch_samples
    )


def _tokens(anchor: Row, config: JobConfig, sync: Mapping[str, PhaseScaling]) -> tuple[float, str]:
    factors, operations = factors_of(config), forward_flops_per_token(config.model)
    for phase in ("old_log_prob_s", "ref_log_prob_s"):
        if phase in anchor.phases:
            return sync[phase].device_s * config.device.flops * factors.forward_share / operations, phase
    if UPDATE in anchor.phases:
        share = factors.train_share / (factors.colocated_train_factor if anchor.colocated else 1.0)
        return sync[UPDATE].device_s * config.device.flops * share / (3 * operations), UPDATE
    if factors.lengths.mean is None:
        raise ConfigError(f"line {anchor.number}, {anchor} has no phase to read tokens off; set cost.lengths.mean")
    return config.algorithm.batch_samples * (factors.prompt_tokens + factors.lengths.mean), "settings"


def generated_s(row: Row) -> float | None:
    """Seconds that a synchronous row took to generate its sequences, as published."""
    return row.gen_s if row.generate_sequences_s is None else row.generate_sequences_s


def around_s(row: Row) -> float:
    """Seconds of a synchronous row's phase of generation besides generating sequences."""
    if row.gen_s is None or row.generate_sequences_s is None:
        return 0.0
    return max(0.0, row.gen_s - row.generate_sequences_s)


def host_s(row: Row) -> float:
    """Seconds of a synchronous row's step besides its phases: rewards, advantages, moving data."""
    if row.step_s is None or row.gen_s is None:
        return 0.0
    return max(0.0, row.step_s - row.gen_s - sum(row.phases.values()))


def _fit_tail(
    start: WorkloadFit, mean: float, timed: Mapping[Row, float], config: JobConfig, batches: int
) -> WorkloadFit:
    def generate(fitted: WorkloadFit) -> dict[int, float]:
        return {row.number: _generate(row, fitted, config, batches) for row in timed}

    def error(fitted: WorkloadFit) -> float:
        made = generate(fitted)
        return float(np.mean([math.log(made[row.number] / seconds) for row, seconds in timed.items()]))

    def with_tail(sigma: float) -> WorkloadFit:
        return replace(start, lengths=lognormal(mean, sigma, start.lengths.cap, start.lengths.common))

    shortest, longest = with_tail(SHORTEST_TAIL), with_tail(LONGEST_TAIL)
    if (over := error(shortest)) >= 0:
        fitted = replace(shortest, scale=math.exp(-over))
    elif error(longest) <= 0:
        most = 2 * max(timed.values()) / start.lengths.cap
        fitted = _fit_one(lambda step_s: replace(longest, step_s=step_s), error, 0.0, most)
    else:
        fitted = _fit_one(with_tail, error, SHORTEST_TAIL, LONGEST_TAIL)
    return replace(fitted, generated_s=generate(fitted))


def _generate(row: Row, fitted: WorkloadFit, config: JobConfig, batches: int) -> float:
    """Seconds of a batch of this row, the mean of several."""
    cost = fitted.applied(engine_cost(config, colocated=row.colocated))
    engines, slots = engines_of(row, config), config.engine.slots
    return float(
        np.mean(
            [
                batch_seconds(cost, batch, engines=engines, slots=slots)
                for batch in drawn(fitted.lengths, config, batches)
            ]
        )
    )


def _fit_one(
    make: Callable[[float], WorkloadFit], error: Callable[[WorkloadFit], float], low: float, high: float
) -> WorkloadFit:
    """The least of so many steps from `low`, where the error is below 0, to `high` at which it is not. (A root to more
    digits would say nothing: lengths are whole tokens.)"""
    values = np.linspace(low, high, _STEPS + 1)
    return make(float(values[bisect_left(values, 0.0, 1, _STEPS, key=lambda value: error(make(float(value))))]))


def batch_seconds(cost: CostConfig, lengths: np.ndarray, *, engines: int, slots: int) -> float:
    """Seconds until all responses are there: int64 lengths [samples], dealt out to engines in equal runs."""
    decode, prompt = DecodeCost.of(cost), cost.prompt_tokens
    parts = [part.tolist() for part in np.array_split(lengths, engines) if len(part)]
    return max(decoded_s(decode, part, prompt=prompt, slots=slots) for part in parts)


def capped_mean(mean: float, sigma: float, cap: int) -> float:
    """E[min(X, cap)] of a log-normal X of this mean: m F(z - s) + cap (1 - F(z)), with m = E[X], s = sigma,
    z = (ln(cap / m) + s^2 / 2) / s and F the normal distribution function (Johnson, Kotz and Balakrishnan, "Continuous
    univariate distributions", volume 1, chapter 14)."""
    if sigma == 0:
        return min(mean, float(cap))
    z = (math.log(cap / mean) + sigma**2 / 2) / sigma
    return mean * _NORMAL.cdf(z - sigma) + cap * (1 - _NORMAL.cdf(z))


def lognormal(mean: float, sigma: float, cap: int, common: float = 0.0) -> LengthsConfig:
    """A log-normal whose mean *under* the cap is `mean`. Raises ValueError where no mean before the cap gives it."""
    if not 1 <= mean < cap:
        raise ValueError(f"no responses of at most {cap} tokens have a mean of {mean:g}")
    most = mean
    while capped_mean(most, sigma, cap) < mean:
        most *= 2
    if most > mean:  # the cap takes something off
        most = brentq(lambda value: capped_mean(value, sigma, cap) - mean, mean, most, xtol=1e-12 * mean)
    return LengthsConfig(kind="lognormal", mean=most, sigma=sigma, common=common, cap=cap)
