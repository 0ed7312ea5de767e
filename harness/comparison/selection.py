"""Trained samples of a run against completed ones: tokens by fate, length and difficulty. A schedule that drops samples
may be fast because they were long."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.comparison.runs import Cell, Run
from harness.metrics.formatting import number
from harness.metrics.samples import FATES

SHORTER = 0.05
"""Relative: by more than this the mean trained response has to be shorter than the mean completed one to be named."""


def sampled_tokens(samples: pa.Table) -> dict[str, int]:
    """Tokens that the policy sampled in the responses of a samples.parquet, by what became of them."""
    fates, tokens = samples["fate"], samples["response_tokens"]
    found = {fate: pc.sum(tokens.filter(pc.equal(fates, fate))).as_py() or 0 for fate in FATES}
    return {fate: count for fate, count in found.items() if count or fate == "trained"}


def selects(run: Run) -> bool:
    """Whether it completed samples and did not train them, but for those that others are compared with."""
    trained, completed = _of_both(run, "response_tokens")
    return trained.size < completed.size


def discarded_tokens(run: Run) -> float:
    """The share of the tokens in completed responses that was not trained."""
    found = sampled_tokens(run.samples)
    return 1 - found["trained"] / sum(found.values())


def length_ratio(run: Run) -> float:
    """Mean length of trained responses over that of completed ones."""
    trained, completed = _of_both(run, "response_tokens")
    return float(trained.mean() / completed.mean())


def length_distance(run: Run) -> float:
    """The Kolmogorov-Smirnov distance of trained lengths from completed ones, of their distribution functions."""
    return _distance(*_of_both(run, "response_tokens"))


def reward_distance(run: Run) -> float:
    """The same distance of rewards, of those that were scored."""
    return _distance(*(values[~np.isnan(values)] for values in _of_both(run, "reward")))


def _distance(trained: np.ndarray, completed: np.ndarray) -> float:
    below = (np.searchsorted(np.sort(one), completed, side="right") / one.size for one in (trained, completed))
    return float(np.abs(np.subtract(*below)).max())


def discarded_lag(run: Run) -> float:
    """Mean lag of the tokens in samples that were dropped; 0 without any, NaN where one has none."""
    samples = run.samples
    lags, tokens = (samples[name].to_numpy().astype(np.float64) for name in ("lag_mean", "response_tokens"))
    fates = samples["fate"].to_numpy()
    of = np.isin(fates, ("trained", "in_flight", "dropped_baseline"), invert=True) & (tokens > 0)
    return float(np.average(lags[of], weights=tokens[of])) if of.any() else 0.0


def reward_gap(run: Run) -> float:
    """Mean reward of trained samples less that of completed ones; NaN where one that was dropped was never judged."""
    trained, completed = _of_both(run, "reward")
    failed = int(pc.sum(run.samples["reward_failed"].fill_null(False)).as_py() or 0)
    if np.isnan(completed).sum() > failed or np.isnan(trained).all():
        return float("nan")
    return float(np.nanmean(trained) - np.nanmean(completed))


def selection_sentence(cells: Sequence[Cell]) -> str:
    """Words for cells whose trained responses are shorter than the completed ones by more than `SHORTER`, if any."""
    told = []
    for cell in cells:
        ratio = float(np.mean([length_ratio(run) for run in cell.runs]))
        if ratio < 1 - SHORTER:
            distance = number(float(np.mean([length_distance(run) for run in cell.runs])))
            gap = float(np.mean([reward_gap(run) for run in cell.runs]))
            difficulty = "unknown" if np.isnan(gap) else f"their mean reward is {gap:+.3f} beside it"
            told.append(
                f"{cell.label} drops long answers: trained responses are {1 - ratio:.0%} shorter than completed ones "
                f"(KS distance {distance}; difficulty: {difficulty}), which is part of its speed."
            )
    return " ".join(told)


def _of_both(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """float64: a column of trained samples, and of completed ones, without those that others are compared with."""
    samples, values = run.samples, run.samples[name]
    completed = pc.and_(samples["finished_at"].is_valid(), pc.not_equal(samples["fate"], "dropped_baseline"))
    of_both = values.filter(pc.equal(samples["fate"], "trained")), values.filter(completed)
    trained, finished = (found.to_numpy().astype(np.float64) for found in of_both)
    return trained, finished
