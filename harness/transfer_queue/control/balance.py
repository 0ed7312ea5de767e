"""How a micro-batch is cut into shares for data-parallel ranks.

Whatever the cut, shares are of equal size where it divides, else as even as can be, the first ones longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.control.policies import Units, Weights

_EVEN_ENOUGH = 1e-3  # of the heaviest share: no rank notices less
_LIGHTEST = 4  # shares that the heaviest one tries to swap with
_TRIES_PER_SHARE = 4


@dataclass(frozen=True, slots=True)
class Split:
    """cut(weights int64 [n], shares) -> for each share the indices of what it gets, ascending."""

    cut: Callable[[Weights, int], list[NDArray[np.int64]]]
    weighs: bool

    def __call__(self, units: Units, shares: int, weights: Weights | None) -> list[Units]:
        """units: in the order in which they are handed out, which each share keeps; weights: one a unit, needed where
        the split weighs."""
        if shares == 1:
            return [units]
        weights = np.ones(units.size, np.int64) if weights is None else weights
        return [units[indices] for indices in self.cut(weights, shares)]


def contiguous(weights: Weights, shares: int) -> list[NDArray[np.int64]]:
    """One stretch after the other."""
    return np.array_split(np.arange(weights.size), shares)


def balanced(weights: Weights, shares: int) -> list[NDArray[np.int64]]:
    """Of nearly equal weight: dealt out heaviest first, there and back again, then evened out by exchanges between the
    heaviest share and the lightest ones (after Finn and Horowitz, "A linear time approximation algorithm for
    multiprocessor scheduling", BIT 19, 1979, with pairs exchanged so that sizes stay)."""
    order = np.argsort(-weights, kind="stable")
    deal = np.arange(weights.size) % (2 * shares)
    dealt = np.minimum(deal, 2 * shares - 1 - deal)  # 0 1 2 2 1 0 0 1 2 ...
    parts = sorted((order[dealt == share] for share in range(shares)), key=lambda part: -part.size)
    sums = [int(weights[part].sum()) for part in parts]
    tries = 0
    while tries < _TRIES_PER_SHARE * shares:
        *others, heavy = sorted(range(shares), key=sums.__getitem__)
        for light in others[:_LIGHTEST]:
            tries += 1
            moved = _exchange(parts[heavy], parts[light], weights, sums[heavy] - sums[light])
            sums[heavy] -= moved
            sums[light] += moved
            if moved:
                break
        else:
            break
    return [np.sort(part) for part in parts]


def _exchange(heavy: NDArray[np.int64], light: NDArray[np.int64], weights: Weights, gap: int) -> int:
    """Swap the one of a heavy share and the one of a light share, `gap` less heavy, that bring the two closest
    together; the weight that it moves, 0 where no swap does or it would not be noticed."""
    if not light.size or gap <= _EVEN_ENOUGH * weights[heavy].sum():
        return 0
    order = np.argsort(weights[light])
    ascending = weights[light[order]]
    wanted = weights[heavy] - gap / 2  # what would make them equal
    above = np.minimum(np.searchsorted(ascending, wanted), light.size - 1)
    candidates = np.stack((above, np.maximum(above - 1, 0)))
    off = np.abs(ascending[candidates] - wanted)
    side, i = np.unravel_index(int(off.argmin()), off.shape)
    j = order[candidates[side, i]]
    moved = int(weights[heavy[i]] - weights[light[j]])
    if not 0 < moved < gap:
        return 0
    heavy[i], light[j] = light[j], heavy[i]
    return moved


SPLITS: dict[str, Split] = {"contiguous": Split(contiguous, weighs=False), "balanced": Split(balanced, weighs=True)}
"""Name -> how ranks share a micro-batch."""
