"""How long a batch takes to generate, from the first request to the last token: engines, and nothing around them."""

from __future__ import annotations

import numpy as np

from harness.config import CostConfig
from harness.simulator.decoding import Decoding
from harness.simulator.samples import SimulatedSample
from harness.simulator.step_time import DecodeCost


def batch_seconds(cost: CostConfig, lengths: np.ndarray, *, engines: int, slots: int) -> float:
    """Seconds until all responses are there: int64 lengths [samples], dealt out to engines in equal runs."""
    return max(_engine_seconds(cost, part, slots) for part in np.array_split(lengths, engines) if len(part))


def _engine_seconds(cost: CostConfig, lengths: np.ndarray, slots: int) -> float:
    decoding = Decoding(DecodeCost.of(cost), slots=slots)
    samples = [SimulatedSample(i, cost.prompt_tokens, tokens) for i, tokens in enumerate(lengths.tolist())]
    decoding.submit(samples, 0.0)
    at = 0.0
    while (due := decoding.next_event()) is not None:
        at = due
        decoding.advance(at)
    return at
