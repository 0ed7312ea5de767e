"""A cost model from what a job did in turn on one device: least squares, each cost a fixed part and a part per unit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from harness.config import CostConfig, LengthsConfig

_OUTLIER = 2.0  # times what was fitted


@dataclass(frozen=True)
class Measured:
    """Pieces of work of one device that did nothing else, and the seconds that each took.

    Seconds count from the end of the piece before, so that a call's way there and back is part of what it costs. All
    arrays are float64. Batches (generation, n of them): generate_s, longest (tokens of the longest response, which is
    how many decode steps there were), sampled (tokens of all responses), prompts (tokens of all prompts), and
    wake_s, from the end of the iteration before to the first request. Calls (of one micro-batch): log_prob_s with
    log_prob_tokens, and train_s with train_tokens, prompts and responses together. step_s: optimizer steps.
    transfer_s: each way of weights through host memory. lengths int64: tokens of every response, any order.
    """

    generate_s: np.ndarray
    longest: np.ndarray
    sampled: np.ndarray
    prompts: np.ndarray
    wake_s: np.ndarray
    log_prob_s: np.ndarray
    log_prob_tokens: np.ndarray
    train_s: np.ndarray
    train_tokens: np.ndarray
    step_s: np.ndarray
    transfer_s: np.ndarray
    lengths: np.ndarray
    prompt_tokens: float


def calibrate(measured: Measured, base: CostConfig) -> CostConfig:
    """`base` with what `measured` tells: all but the network, the host's memory, and the size of the weights.

    A prompt's prefill is taken to cost what its log-probs would. What a call costs besides its tokens is one setting
    for scoring and training, as the model has it: the fixed part that fits both best. Raises ValueError for a `base`
    per billion parameters, since one model says nothing of others.
    """
    if base.per_billion:
        raise ValueError(f"cost={base.name} is per billion parameters, and one model was measured; use cost=tiny_cpu")
    call_s, log_prob_s, train_s = calls(measured)
    decoding = measured.generate_s - measured.prompts * log_prob_s
    step_s, step_s_per_sample = fit(decoding, np.stack([measured.longest, measured.sampled], axis=1)).tolist()
    lengths = np.sort(measured.lengths)
    return replace(
        base,
        decode_step_s=max(step_s, 1e-9),
        decode_step_s_per_sample=step_s_per_sample,
        prefill_s_per_token=log_prob_s,
        log_prob_s_per_token=log_prob_s,
        train_s_per_token=train_s,
        train_step_s=float(np.median(measured.step_s)),
        call_s=call_s,
        sync_s=_beyond(measured.transfer_s, base),
        offload_s=0.0,
        reload_s=_beyond(measured.wake_s, base, copies=2),
        prompt_tokens=max(1, round(measured.prompt_tokens)),
        lengths=LengthsConfig(kind="trace", cap=int(lengths[-1]), values=tuple(lengths.tolist())),
    )


def calls(measured: Measured) -> tuple[float, float, float]:
    """Seconds of a call, of a token of scoring, and of a token of training."""
    scored, trained = len(measured.log_prob_s), len(measured.train_s)
    amounts = np.zeros((scored + trained, 3))
    amounts[:, 0] = 1.0
    amounts[:scored, 1] = measured.log_prob_tokens
    amounts[scored:, 2] = measured.train_tokens
    call_s, log_prob_s, train_s = fit(np.concatenate([measured.log_prob_s, measured.train_s]), amounts).tolist()
    return call_s, log_prob_s, train_s


def fit(seconds: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """What each unit costs, none less than nothing: float64 [k] for seconds [n] and amounts [n, k].

    Least squares; what took more than twice as long as fitted was disturbed, and is left out of a second fit. Where a
    cost would be negative, it is zero, and the others are fitted without it.
    """
    first = _not_negative(seconds, amounts)
    kept = seconds <= _OUTLIER * (amounts @ first)
    return _not_negative(seconds[kept], amounts[kept])


def _not_negative(seconds: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    costs = np.zeros(amounts.shape[1])
    used = np.arange(amounts.shape[1])
    while used.size:
        found = np.linalg.lstsq(amounts[:, used], seconds, rcond=None)[0]
        if (found >= 0).all():
            costs[used] = found
            break
        used = np.delete(used, found.argmin())
    return costs


def _beyond(seconds: np.ndarray, base: CostConfig, copies: int = 1) -> float:
    """The fixed part of what moves the weights so many times between device and host."""
    return max(0.0, float(np.median(seconds)) - copies * base.weight_bytes / base.host_bytes_per_s)
