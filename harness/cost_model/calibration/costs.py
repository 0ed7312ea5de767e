"""A cost model from what a synchronous job did in turn: each cost a fixed part and a part per unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from harness.config import CostConfig, LengthsConfig
from harness.cost_model.calibration.fitting import Fitted, Phase, fit_undisturbed, relative_error

ATTENTION_FROM = 512
"""Tokens of a mean sequence from which attention is told apart: below, it is a few hundredths of the work."""
_MOST_LENGTHS = 800  # of a trace; more become as many quantiles


@dataclass(frozen=True)
class Measured:
    """Pieces of work of devices that took turns, and the seconds that each took.

    Seconds count from the end of the piece before, so that a call's way there and back is part of what it costs. All
    arrays are float64. Batches of one engine, [n]: generate_s, steps (decode steps), sampled (tokens of all responses),
    cached (tokens in the KV caches, over all steps), prompts and prompt_pairs (tokens of all prompts, and the squares
    of their lengths). Where devices are shared: wake_s, from the end of the iteration before to the first request, and
    sleep_s, from the last response until the device is free.
    Calls (of one micro-batch): log_prob_s with log_prob_tokens and log_prob_pairs, and train_s with its own, prompts
    and responses together. step_s: optimizer steps. host_copy_s: each way of weights through host memory;
    broadcast_s: of weights from pool to pool. lengths int64: tokens of every response, any order.
    """

    generate_s: np.ndarray
    steps: np.ndarray
    sampled: np.ndarray
    cached: np.ndarray
    prompts: np.ndarray
    prompt_pairs: np.ndarray
    wake_s: np.ndarray
    sleep_s: np.ndarray
    log_prob_s: np.ndarray
    log_prob_tokens: np.ndarray
    log_prob_pairs: np.ndarray
    train_s: np.ndarray
    train_tokens: np.ndarray
    train_pairs: np.ndarray
    step_s: np.ndarray
    host_copy_s: np.ndarray
    broadcast_s: np.ndarray
    lengths: np.ndarray
    prompt_tokens: float

    @property
    def attention(self) -> bool:
        """Whether sequences are so long that attention shows."""
        return self.prompt_tokens + float(self.lengths.mean()) >= ATTENTION_FROM


def together(runs: Sequence[Measured]) -> Measured:
    """What several runs did, as if one had. Micro-batches of different sizes tell fixed parts from growing ones."""
    values = {field.name: [getattr(run, field.name) for run in runs] for field in fields(Measured)}
    samples = [len(run.lengths) for run in runs]
    prompt_tokens = float(np.average(values.pop("prompt_tokens"), weights=samples))
    return Measured(**{name: np.concatenate(arrays) for name, arrays in values.items()}, prompt_tokens=prompt_tokens)


def calibrate(measured: Measured, base: CostConfig) -> Fitted:
    """`base` with what `measured` tells: all but the speed of the network and of the host's memory.

    A prompt's prefill is taken to cost what its log-probs would, but never more than half of generating. What a call
    costs besides its tokens is one setting for scoring and training: the fixed part that fits both best. Reading the
    weights is part of `decode_step_s`: batches of one size do not tell it from the rest of a step.
    """
    passes, of_passes = _calls(measured)
    prefill = _prefill(measured, passes)
    decode, of_decoding = _decoding(measured, prefill)
    sync_s, of_sync = _transfers(measured, base)
    shared = _sharing(measured, base)
    costs: dict[str, Any] = {**dict.fromkeys(_WHEN_GIVEN, 0.0), **passes, **prefill, **decode, **shared}
    cost = replace(
        base,
        **costs,
        train_step_s=float(np.median(measured.step_s)),
        sync_s=sync_s,
        prompt_tokens=max(1, round(measured.prompt_tokens)),
        lengths=trace(measured.lengths),
    )
    phases = [*of_decoding, *of_passes, _median("optimizer", ("train_step_s",), measured.step_s, "steps"), of_sync]
    unseen = ["network_bytes_per_s", "host_bytes_per_s", "kv_tokens", "reward_s_per_sample"]
    if shared:
        phases.append(_median("taking the device", ("reload_s",), measured.wake_s, "turns, beyond the bytes"))
        phases.append(_median("giving it back", ("offload_s",), measured.sleep_s, "turns, beyond the bytes"))
    else:
        unseen += ["offload_s", "reload_s"]
    return Fitted(cost, tuple(phases), tuple(unseen), base.name)


def trace(lengths: np.ndarray) -> LengthsConfig:
    """Lengths, int64 [n], to draw from; the longest is the cap."""
    values = np.sort(lengths)
    if len(values) > _MOST_LENGTHS:
        quantiles = (np.arange(_MOST_LENGTHS) + 0.5) / _MOST_LENGTHS
        values = np.quantile(values, quantiles, method="inverted_cdf").astype(np.int64)
    return LengthsConfig(kind="trace", cap=int(lengths.max()), values=tuple(values.tolist()))


_WHEN_GIVEN = (
    "decode_weights_s",
    "decode_s_per_cached_token",
    "prefill_s_per_pair",
    "log_prob_s_per_pair",
    "train_s_per_pair",
    "log_prob_call_s",
    "train_call_s",
)
"""Costs that are nothing where nothing is fitted to them."""


def _calls(measured: Measured) -> tuple[dict[str, float], list[Phase]]:
    """Scoring and training, fitted at once. Where calls of nearly one size do not tell what is fixed, a forward pass
    is taken to cost a third of forward and backward, as it does in operations."""
    seconds = np.concatenate([measured.log_prob_s, measured.train_s])
    scored = slice(len(measured.log_prob_s))
    trained = slice(len(measured.log_prob_s), None)
    kinds = ("token", "pair") if measured.attention else ("token",)
    units = np.zeros((len(seconds), 1 + 2 * len(kinds)))
    units[:, 0] = 1.0
    for number, kind in enumerate(kinds):
        units[scored, 1 + 2 * number] = getattr(measured, f"log_prob_{kind}s")
        units[trained, 2 + 2 * number] = getattr(measured, f"train_{kind}s")
    found, rule = fit_undisturbed(seconds, units), ""
    costs = found.costs
    if found.doubtful.any():
        found = fit_undisturbed(seconds, np.column_stack([units[:, :1], units[:, 1::2] / 3 + units[:, 2::2]]))
        costs, rule = np.append(found.costs[:1], np.repeat(found.costs[1:], 2)), "; a forward as a third of training"
        costs[1::2] /= 3
    fitted = units @ costs
    names = ["call_s", *(f"{work}_s_per_{kind}" for kind in kinds for work in ("log_prob", "train"))]
    phases = []
    for phase, work, part in (("scoring", "log_prob", scored), ("training", "train", trained)):
        own = tuple(name for name in names if name.startswith(("call", work)))
        told = Phase.of(phase, own, found, f"calls, scoring and training{rule}")
        error = relative_error(fitted[part], seconds[part]) if len(seconds[part]) else None
        phases.append(replace(told, error=error))
    return dict(zip(names, costs.tolist(), strict=True)), phases


def _prefill(measured: Measured, passes: dict[str, float]) -> dict[str, float]:
    prefill = {"prefill_s_per_token": passes["log_prob_s_per_token"]}
    if measured.attention:
        prefill["prefill_s_per_pair"] = passes["log_prob_s_per_pair"]
    share = float((_prefill_s(measured, prefill) / measured.generate_s).max())
    return {name: value * min(1.0, 0.5 / max(share, 1e-9)) for name, value in prefill.items()}


def _prefill_s(measured: Measured, prefill: dict[str, float]) -> np.ndarray:
    per_pair = prefill.get("prefill_s_per_pair", 0.0)
    return measured.prompts * prefill["prefill_s_per_token"] + measured.prompt_pairs * per_pair


def _decoding(measured: Measured, prefill: dict[str, float]) -> tuple[dict[str, float], list[Phase]]:
    names = ["decode_step_s", "decode_step_s_per_sample"]
    amounts = [measured.steps, measured.sampled]
    if measured.attention:
        names.append("decode_s_per_cached_token")
        amounts.append(measured.cached)
    before = _prefill_s(measured, prefill)
    found = fit_undisturbed(measured.generate_s - before, np.stack(amounts, axis=1))
    fitted = np.stack(amounts, axis=1) @ found.costs + before
    phase = Phase.of("generation", (*names, *prefill), found, "batches; prefill as scoring")
    costs = dict(zip(names, found.costs.tolist(), strict=True))
    costs["decode_step_s"] = max(costs["decode_step_s"], 1e-9)
    return costs, [replace(phase, error=relative_error(fitted, measured.generate_s))]


def _sharing(measured: Measured, base: CostConfig) -> dict[str, float]:
    if not measured.wake_s.size:
        return {}
    speed = base.host_bytes_per_s
    return {
        "reload_s": _beyond(measured.wake_s, speed, base),
        "offload_s": _beyond(measured.sleep_s, speed, base),
    }


def _transfers(measured: Measured, base: CostConfig) -> tuple[float, Phase]:
    through_host = _beyond(measured.host_copy_s, base.host_bytes_per_s, base)
    through_network = _beyond(measured.broadcast_s, base.network_bytes_per_s, base)
    seconds = measured.host_copy_s if measured.host_copy_s.size else measured.broadcast_s
    phase = _median("weights", ("sync_s",), seconds, "transfers, beyond what their bytes take")
    return (through_host if measured.host_copy_s.size else through_network), phase


def _median(name: str, costs: tuple[str, ...], seconds: np.ndarray, what: str) -> Phase:
    error = relative_error(np.full(len(seconds), np.median(seconds)), np.maximum(seconds, 1e-9))
    return Phase(name, costs, f"the median of {len(seconds)} {what}", error)


def _beyond(seconds: np.ndarray, bytes_per_s: float, base: CostConfig) -> float:
    """The fixed part of what moves the weights at this speed."""
    if not seconds.size:
        return 0.0
    return max(0.0, float(np.median(seconds)) - base.weight_bytes / bytes_per_s)
