"""Micro-batches as rectangles: prompt and response of each sample side by side, padded on the right.

With causal attention nothing on the right reaches a real token, so no attention mask is needed and a row's numbers do
not depend on how far its neighbours are padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model


@dataclass(frozen=True)
class PaddedBatch:
    """tokens: int64 [k, T]; responses: bool [k, T], true at response tokens. Both on one device.

    `engines.torch.scoring.LaidOut`: every token but the first of a row is scored, the padding too.
    """

    tokens: torch.Tensor
    responses: torch.Tensor

    @property
    def inputs(self) -> torch.Tensor:
        """Tokens that go into the model: int64 [k, T - 1]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        return self.tokens[:, 1:].flatten()

    def hidden(self, decoder: Qwen3Model) -> torch.Tensor:
        return decoder(input_ids=self.inputs, use_cache=False).last_hidden_state.flatten(0, 1)

    def at_responses(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.responses[:, 1:].flatten()]


def pad_batch(prompts: Ragged, responses: Ragged, device: torch.device) -> PaddedBatch:
    """Lay out samples of prompts int64 and responses int64; both have k rows."""
    starts = prompts.lengths[:, None]
    ends = starts + responses.lengths[:, None]
    place = np.arange(int(ends.max()))
    tokens = np.zeros((len(prompts), len(place)), np.int64)
    tokens[place < starts] = prompts.values  # row by row, which is the order of packed values
    at_response = (place >= starts) & (place < ends)
    tokens[at_response] = responses.values
    return PaddedBatch(torch.from_numpy(tokens).to(device), torch.from_numpy(at_response).to(device))
