"""The two rules that all schedules share, as arithmetic on group numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """How far ahead of a policy version groups may be, for a batch of `batch` groups and staleness `eta` (iterations).

    Group N belongs to batch N // batch, which is trained at version N // batch. With v the version last published and
    u the version an engine runs:

    - admission: N may enter the queue when N < limit(v)   (AReaL, arXiv 2505.24298, eq. 3: its capacity)
    - dispatch: an engine may start N when N < limit(u)

    Dispatch bounds the lag: N < (u + 1 + eta) * batch gives N // batch - u <= ceil(eta), which is `worst_lag`.
    Admission alone does not, since an engine may start a group with old weights long after newer ones were published.
    """

    batch: int
    eta: float

    def limit(self, version: int) -> int:
        """The first group that version `version` may not touch: the least integer >= (version + 1 + eta) * batch."""
        # Rounding first: (1 + 1 + 0.2) * 25 is 55.00000000000001 in floating point, and would let a 56th group slip in.
        return math.ceil(round((version + 1 + self.eta) * self.batch, 9))

    @property
    def worst_lag(self) -> int:
        """The largest lag, in iterations, of any sample at its first token under first-in first-out training."""
        return math.ceil(self.eta)
