"""The rules that bound staleness, as arithmetic on group numbers."""

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


class CompletionOrder:
    """A record of what was started under which version, where groups are trained as they are completed: training in the
    order of admission bounds the lag by itself, here what a version started has to be trained, or dropped, in time.

    It keeps the dispatch limit of every version so far; each tells which groups were started under it or before. Of a
    version that engines never get, that is the limit of the one that they have.
    """

    def __init__(self, capacity: Capacity, worst_lag: int | None = None) -> None:
        """worst_lag: iterations within which what a version started has to be trained; the capacity's if None."""
        self._capacity, self._limits, self._dropped = capacity, [capacity.limit(0)], 0
        self._worst_lag = capacity.worst_lag if worst_lag is None else worst_lag
        self._published = 0  # the version that engines have

    @property
    def limit(self) -> int:
        """The dispatch limit of the newest version."""
        return self._limits[-1]

    def record_published(self) -> int:
        """Record a new version; returns its dispatch limit, which makes up for what was dropped before."""
        self._published = len(self._limits)
        self._limits.append(self._capacity.limit(self._published) + self._dropped)
        return self.limit

    def record_marked(self) -> None:
        """Record a new version that engines do not get."""
        self._limits.append(self.limit)

    def widen(self, dropped: int) -> int:
        """Count so many groups as dropped; returns the limit under which as many more may be started."""
        self._dropped += dropped
        self._limits[self._published :] = [limit + dropped for limit in self._limits[self._published :]]
        return self.limit

    def due(self) -> list[tuple[int, int]]:
        """(limit, groups) for `Trainer.train`: what version u started is trained in iteration u + worst lag at the
        latest, so it is among the next `groups` groups."""
        batch, worst, now = self._capacity.batch, self._worst_lag, len(self._limits) - 1
        return [
            (self._limits[u], (u + worst + 1 - now) * batch)
            for u in range(max(0, now - worst), now)
            if u == 0 or self._limits[u - 1] < self._limits[u]  # started under u - 1, it is due before
        ]

    def overdue(self) -> int:
        """The limit below which groups would lag too much in the next iteration that is trained; 0: none would."""
        newest = len(self._limits) - 1 - self._worst_lag - 1
        return self._limits[newest] if newest >= 0 else 0
