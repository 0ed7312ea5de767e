"""A step that was predicted, as draws: its median, interval, and what can be said of its speed-up."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.prediction.evidence import StepRow

Verdict = Literal["faster", "slower", "tie", "cannot be told"]

SURE = 0.8  # probability at which a verdict is given, and share of the draws in an interval
TIE = 0.05  # two ways tie where `SURE` of the draws have them closer together than this share of throughput


@dataclass(frozen=True)
class Forecast:
    """Seconds of a training step of `row`: float64 [n], a figure for each draw of what is not known, all of the same
    draws in the same order. Fewer draws than asked for: those that the schedule's own file took (`assumed` says why).

    reference: the synchronous row that it is compared with; reference_s: its step. given, assumed: what the draws stand
    on, a line each. settles: the measurement that would tell most about the sign, and by how much. implausible: as of
    its system."""

    row: StepRow
    reference: StepRow
    step_s: NDArray[np.float64]
    reference_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    generation_s: NDArray[np.float64]
    given: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    settles: str = ""
    implausible: str = ""

    @property
    def speedup(self) -> NDArray[np.float64]:
        """How many times as fast as the reference: float64 [n]."""
        speedup: NDArray[np.float64] = self.reference_s / self.step_s
        return speedup

    @property
    def median(self) -> float:
        """Seconds of a step, in the middle of the draws."""
        return float(np.median(self.step_s))

    def interval(self, share: float = SURE) -> tuple[float, float]:
        """Seconds of a step between which this share of the draws lies, as much above as below."""
        return interval(self.step_s, share)

    @property
    def p_faster(self) -> float:
        """Probability that it is faster than the reference."""
        return p_faster(self.speedup)

    @property
    def verdict(self) -> Verdict:
        """Answer at `SURE`."""
        return verdict_of(self.speedup)


def p_faster(speedup: NDArray[np.float64]) -> float:
    """Share of the draws in which a speed-up is one; of equal ones half."""
    return float(np.mean(speedup > 1) + np.mean(speedup == 1) / 2)


def verdict_of(speedup: NDArray[np.float64]) -> Verdict:
    """Tie where the interval lies within `TIE` of 1; else the sign where `SURE` of the draws have it."""
    low, high = interval(speedup)
    if 1 / (1 + TIE) <= low and high <= 1 + TIE:
        return "tie"
    sure = p_faster(speedup)
    return "faster" if sure >= SURE else "slower" if sure <= 1 - SURE else "cannot be told"


def figures_of(speedup: NDArray[np.float64]) -> tuple[str, str, str]:
    """A speed-up's median, interval and probability, as they are written."""
    low, high = interval(speedup)
    return f"{np.median(speedup):.2f}", f"{low:.2f} to {high:.2f}", f"{p_faster(speedup):.0%}"


def words_of(speedup: NDArray[np.float64]) -> str:
    """A speed-up as its median, interval, probability and verdict."""
    median, between, sure = figures_of(speedup)
    return f"{median} times as fast ({between}, P {sure}): {verdict_of(speedup)}"


def interval(draws: NDArray[np.float64], share: float = SURE) -> tuple[float, float]:
    """Quantiles between which the next draw lies with this probability, as much above as below: at p (n + 1) of n draws
    in order (Hyndman and Fan, "Sample quantiles in statistical packages", 1996, definition 6)."""
    low, high = np.quantile(draws, [(1 - share) / 2, (1 + share) / 2], method="weibull").tolist()
    return low, high
