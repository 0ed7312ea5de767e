"""From the timings of a profile to costs: relative least squares, so that short calls count as much as long ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.config import CostConfig
from harness.cost_model import shape
from harness.cost_model.calibration.fitting import Fit, Fitted, Phase, fit
from harness.cost_model.profile.rows import Profile, Row

_ROUNDS, _STEPS = 6, 33  # of the search for where a decode step begins to grow
_BETTER = 0.8  # of the squares: as much has to be left for a step's floor to be believed

_UNSEEN = ("call_s", "network_bytes_per_s", "kv_tokens", "reward_s_per_sample", "prompt_tokens", "lengths")


def fit_profile(profile: Profile, base: CostConfig, name: str) -> Fitted:
    """Costs called `name`, of one device that holds the whole model. `base` has what a profile does not show: the
    network, the way to a worker and back (`call_s`), and the workload.

    What a prefill takes besides its tokens is fitted and left out: costs have no place for it.
    """
    decode, of_decode = _decode(profile.of("decode"))
    prefill, of_prefill = _pass(profile.of("prefill"), "prefill", None)
    log_prob, of_log_prob = _pass(profile.of("log_prob"), "log_prob", "log_prob_call_s")
    train, of_train = _pass(profile.of("train"), "train", "train_call_s")
    (step,) = profile.of("optimizer")
    copies, of_copies = _copies(profile)
    costs: dict[str, Any] = {**decode, **prefill, **log_prob, **train, **copies, "train_step_s": step.seconds}
    cost = replace(base, name=name, weight_bytes=shape.weight_bytes(profile.model), **costs)
    of_step = Phase("optimizer", ("train_step_s",), "one timing", None)
    phases = (of_decode, of_prefill, of_log_prob, of_train, of_step, *of_copies)
    return Fitted(cost, tuple(_at_depths(phase, profile) for phase in phases), _UNSEEN, base.name)


def _decode(rows: Sequence[Row]) -> tuple[dict[str, float], Phase]:
    """A step is flat up to so many samples and grows from there: the number that explains the timings best."""
    seconds, samples = _seconds(rows), np.array([row.samples for row in rows], np.float64)
    cached = samples * np.array([row.length for row in rows], np.float64)

    def with_knee(knee: float) -> Fit:
        return fit(seconds, np.stack([np.ones(len(rows)), np.maximum(samples, knee), cached], axis=1), 1 / seconds)

    def squares(knee: float) -> float:
        amounts = np.stack([np.ones(len(rows)), np.maximum(samples, knee), cached], axis=1)
        return float(((amounts @ with_knee(knee).costs / seconds - 1) ** 2).sum())

    knee = _least(squares, 0.0, float(np.unique(samples)[-2:][0]))
    if squares(knee) > _BETTER * squares(0.0):
        knee = 0.0
    found = with_knee(knee)
    step_s, per_sample, per_cached = found.costs.tolist()
    names = ("decode_step_s", "decode_step_s_per_sample", "decode_s_per_cached_token", "decode_weights_s")
    costs = dict(zip(names, (max(step_s, 1e-9), per_sample, per_cached, knee * per_sample), strict=True))
    return costs, Phase.of("decode", names, found, f"steps of 1 to {samples.max():.0f} samples")


def _least(of: Callable[[float], float], low: float, high: float) -> float:
    """Where a function is least, by a grid that closes in."""
    for _ in range(_ROUNDS):
        places = np.linspace(low, high, _STEPS)
        best = int(np.argmin([of(float(place)) for place in places]))
        low, high = float(places[max(0, best - 1)]), float(places[min(_STEPS - 1, best + 1)])
    return float(places[best])


def _pass(rows: Sequence[Row], work: str, fixed: str | None) -> tuple[dict[str, float], Phase]:
    """A forward or training pass: a fixed part, a part per token, a part per pair of tokens of a sample."""
    seconds, samples = _seconds(rows), np.array([row.samples for row in rows], np.float64)
    lengths = np.array([row.length for row in rows], np.float64)
    found = fit(seconds, np.stack([np.ones(len(rows)), samples * lengths, samples * lengths**2], axis=1), 1 / seconds)
    call_s, per_token, per_pair = found.costs.tolist()
    costs = {f"{work}_s_per_token": per_token, f"{work}_s_per_pair": per_pair}
    longest = f"calls of {(samples * lengths).min():.0f} to {(samples * lengths).max():.0f} tokens"
    if fixed is None:
        longest += f", each {call_s:.3g} s besides, which is left out"
        found = replace(found, doubtful=found.doubtful[1:])
    else:
        costs = {fixed: call_s, **costs}
    return costs, Phase.of(work, tuple(costs), found, longest)


def _copies(profile: Profile) -> tuple[dict[str, float], list[Phase]]:
    """The host's memory, by the slower way; then what loading, giving the device back and taking it take beyond it."""
    found = [_bytes(profile.of(phase)) for phase in ("copy_to_host", "copy_to_device")]
    per_byte, of_copies = max(found, key=lambda each: each[0])
    costs = {"host_bytes_per_s": 1 / per_byte}
    phases = [of_copies]
    for phase, cost in (("load", "sync_s"), ("sleep", "offload_s"), ("wake", "reload_s")):
        (row,) = profile.of(phase)  # type: ignore[arg-type]
        costs[cost] = max(0.0, row.seconds - row.bytes * per_byte)
        phases.append(Phase(phase, (cost,), f"one timing, less {row.bytes / 1e6:.4g} MB at that speed", None))
    return costs, phases


def _bytes(rows: Sequence[Row]) -> tuple[float, Phase]:
    """Seconds of a byte."""
    seconds, moved = _seconds(rows), np.array([row.bytes for row in rows], np.float64)
    found = fit(seconds, np.stack([np.ones(len(rows)), moved], axis=1), 1 / seconds)
    per_byte = float(found.costs[1]) or float(np.median(seconds / moved))
    what = f"copies of {moved.min() / 1e6:.3g} to {moved.max() / 1e6:.4g} MB, the slower way"
    return per_byte, Phase.of("copies", ("host_bytes_per_s",), replace(found, doubtful=found.doubtful[1:]), what)


def _at_depths(phase: Phase, profile: Profile) -> Phase:
    """Say where fewer layers than all were timed."""
    depths = profile.depths(phase.name) if phase.name != "copies" else []  # type: ignore[arg-type]
    if depths in ([], [profile.model.layers]):
        return phase
    return replace(phase, timings=f"{phase.timings}; timed with {depths[0]} and {depths[1]} layers")


def _seconds(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row.seconds for row in rows], np.float64)
