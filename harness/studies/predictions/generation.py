"""How long a batch takes to generate, from the first request to the last token: engines, and nothing around them."""

from __future__ import annotations

import numpy as np

from engines.simulated.decoding import decoded_s
from harness.config import CostConfig
from harness.cost_model.step_time import DecodeCost


def batch_seconds(cost: CostConfig, lengths: np.ndarray, *, engines: int, slots: int) -> float:
    """Seconds until all responses are there: int64 lengths [samples], dealt out to engines in equal runs."""
    decode, prompt = DecodeCost.of(cost), cost.prompt_tokens
    parts = [part.tolist() for part in np.array_split(lengths, engines) if len(part)]
    return max(decoded_s(decode, part, prompt=prompt, slots=slots) for part in parts)
