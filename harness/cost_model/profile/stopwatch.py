"""How long work on a device takes: the median of several times, after some that do not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_FEWEST = 3  # timings behind a median
_MORE_UNTIL_S = 0.1  # what is short is timed more often


@dataclass(frozen=True)
class Stopwatch:
    """Takes `repeats` timings: fewer (but three) once they took `at_most_s` together, four times as many where they are
    so short that a neighbour's turn shows. Warm-up calls are not timed."""

    device: torch.device
    repeats: int = 7
    warmup: int = 2
    at_most_s: float = 3.0

    def time(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Seconds of `work`, from an idle device to an idle device, and their spread, as of `rows.Row`. before: is
        called each time, untimed."""
        for _ in range(self.warmup):
            before()
            work()
        taken: list[float] = []
        while self._go_on(len(taken), sum(taken)):
            before()
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            taken.append(time.perf_counter() - start)
        low, median, high = np.percentile(taken, (25, 50, 75)).tolist()
        return median, (high - low) / median

    @property
    def calls(self) -> int:
        """How often work is done at most."""
        return self.warmup + max(_FEWEST, 4 * self.repeats)

    def _go_on(self, timings: int, seconds: float) -> bool:
        if timings < self.repeats:
            return timings < _FEWEST or seconds < self.at_most_s
        return timings < 4 * self.repeats and seconds < _MORE_UNTIL_S

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
