"""Values far from the others, by the modified z-score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FAR = 10.0
"""Standard deviations: as hyperfine (github.com/sharkdp/hyperfine) has it. Of few values, the usual 3.5 calls many."""


def modified_z(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """float64 [n]: 0.6745 (x - median) / MAD, about standard deviations for normal values (Iglewicz and Hoaglin, How to
    Detect and Handle Outliers, 1993). Where MAD is 0, more than half of the values being equal: 0 and infinities."""
    listed = np.asarray(values, dtype=np.float64)
    away = listed - np.median(listed)
    spread = float(np.median(np.abs(away)))
    if spread == 0:
        return np.where(away == 0, 0.0, np.copysign(np.inf, away))
    return 0.6745 * away / spread


def outliers(values: Sequence[float] | np.ndarray, least: float = 0.0) -> list[int]:
    """Indices of values beyond FAR that also differ from the median by more than `least` of it; none of fewer than four
    values."""
    listed = np.asarray(values, dtype=np.float64)
    if listed.size < 4:
        return []
    median = float(np.median(listed))
    far = (np.abs(modified_z(listed)) > FAR) & (np.abs(listed - median) > least * abs(median))
    return [int(index) for index in np.flatnonzero(far)]
