"""Micro-batches as rectangles: prompt and response of each sample side by side, padded on the right.

With causal attention nothing on the right reaches a real token, so no attention mask is needed and a row's numbers do
not depend on how far its neighbours are padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.transfer_queue import Ragged


@dataclass(frozen=True)
class PaddedBatch:
    """tokens: int64 [k, T]; responses: bool [k, T], true at response tokens. Both on one device."""

    tokens: torch.Tensor
    responses: torch.Tensor

    @property
    def inputs(self) -> torch.Tensor:
        """Tokens that go into the model: int64 [k, T - 1]."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        """Tokens that position t predicts: int64 [k, T - 1]."""
        return self.tokens[:, 1:]

    @property
    def mask(self) -> torch.Tensor:
        """Where a target is a response token: bool [k, T - 1]."""
        return self.responses[:, 1:]

    def spread(self, column: Ragged) -> torch.Tensor:
        """A value per response token, laid out as `mask` [k, T - 1]; 0 elsewhere."""
        values = torch.from_numpy(column.values).to(self.tokens.device)
        spread = torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device)
        spread[self.mask] = values
        return spread

    def gather(self, values: torch.Tensor) -> Ragged:
        """The inverse of `spread`: [k, T - 1] -> one float32 value per response token."""
        lengths = self.mask.sum(dim=1, dtype=torch.int64)
        return Ragged(values[self.mask].float().cpu().numpy(), lengths.cpu().numpy())


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
