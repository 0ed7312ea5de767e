"""What statistics return: a value with its interval, and a difference that is called one or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval. One value alone has no interval: its bounds are infinite."""

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def bounded(self) -> bool:
        """Whether both bounds are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def within(self, low: float, high: float) -> Interval:
        """The part of it that is possible, which covers just as often. One without bounds stays without."""
        if not self.bounded:
            return self
        return replace(self, low=max(low, self.low), high=min(high, self.high))

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Difference:
    """Ours against theirs: `ours - theirs`, or `ours / theirs` for a ratio; `none` is what no difference would be.

    per_seed: by seed, for pairs; empty where the two have no seed in common and were compared as groups.
    p: of the two-sided test that belongs to the interval. distinguishable: called a difference.
    """

    interval: Interval
    p: float
    distinguishable: bool
    none: float = 0.0
    per_seed: Mapping[int, float] = field(default_factory=dict)

    @property
    def paired(self) -> bool:
        return bool(self.per_seed)
