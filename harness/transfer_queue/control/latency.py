"""How long units waited from being ready to being handed out."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

KEPT = 1024


class Latency:
    """The latest KEPT waits, in seconds, and how many there were in all."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: deque[float] = deque(maxlen=KEPT)

    def add(self, waited: NDArray[np.float64]) -> None:
        """float64 [any], seconds."""
        self._latest.extend(waited.tolist())
        self._count += waited.size

    def describe(self) -> dict[str, float]:
        """`count` of all; p50_s, p99_s and max_s of the latest. 0 where there were none."""
        p50, p99, most = np.quantile(self._latest or [0.0], (0.5, 0.99, 1)).tolist()
        return {"count": self._count, "p50_s": p50, "p99_s": p99, "max_s": most}
