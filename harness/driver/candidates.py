"""The choice of the groups of a batch that are trained where more are admitted at first than it needs: a pure state
machine.

The candidates of a batch are numbered in the queue's order: its places, then its spares. As many as there are spares
may be refused, and are replaced by those behind them; beyond that, the place of a refused one is dealt another group.
What becomes of a candidate follows from what a filter says of those before it and of itself, and from nothing else: it
is decided as soon as it cannot come otherwise, and does not depend on which verdict came first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

Decision = Literal["kept", "refused", "again", "spare"]
"""Trained; refused, and a spare takes its part; refused, and its place is dealt another; not needed."""


class Candidates:
    """The candidates of one batch, which needs so many places. decided: what is certain of whom; given by a checkpoint,
    which need not know of those that were kept: they are judged again."""

    def __init__(self, places: int, spares: int, decided: Iterable[tuple[int, Decision]] = ()) -> None:
        self.places, self.spares = places, spares
        self.decided: dict[int, Decision] = {}
        self._judged = np.zeros(places + spares, bool)
        self._refused = np.zeros(places + spares, bool)
        for candidate, decision in decided:
            self.remember(candidate, decision)

    def remember(self, candidate: int, decision: Decision) -> None:
        """Take over what was decided before."""
        self.decided[candidate] = decision
        if decision != "spare":
            self.judged(candidate, passed=decision == "kept")

    def judged(self, candidate: int, passed: bool) -> None:
        """Note what the filter said of the group that it was first."""
        self._judged[candidate], self._refused[candidate] = True, not passed

    def decide(self) -> dict[int, Decision]:
        """Decisions that are certain now, and were not before."""
        refused = np.cumsum(self._refused) - self._refused  # before each
        at_most = refused + np.cumsum(~self._judged) - ~self._judged
        # How many before each are kept, or are once their places were dealt others: all but those that spares replace.
        order = np.arange(len(refused))
        ahead = (order - np.minimum(self.spares, at_most), order - np.minimum(self.spares, refused))
        found: dict[int, Decision] = {}
        for candidate in order[[number not in self.decided for number in order.tolist()]].tolist():
            least, most = ahead[0][candidate], ahead[1][candidate]
            if least >= self.places:
                found[candidate] = "spare"
            elif not self._judged[candidate] or most >= self.places:
                continue
            elif not self._refused[candidate]:
                found[candidate] = "kept"
            elif refused[candidate] >= self.spares:
                found[candidate] = "again"
            elif at_most[candidate] < self.spares:
                found[candidate] = "refused"
        self.decided |= found
        return found
