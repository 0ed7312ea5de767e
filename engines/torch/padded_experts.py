"""Experts whose arithmetic for a token does not depend on how many others go to the same expert.

transformers multiplies each expert's weights with the tokens that were routed to it; with few of them the CPU takes
other kernels than with many (see `kv_slots`), so that a sample's bits would follow from its neighbours. Here those rows
are padded, as all others of a pass are, and each token adds what its experts say in their order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "cadence_padded"


def use_padded_experts(model: PreTrainedModel, rows: int) -> None:
    """Make the experts of `model` compute for a multiple of `rows` tokens."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, partial(padded_experts, rows=rows))
    model.set_experts_implementation(NAME)


def padded_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, rows: int
) -> torch.Tensor:
    """The experts of one layer: sum_k weights_k expert_k(x), [tokens, hidden].

    module: transformers' experts, with gate and up projections in one tensor and no biases; hidden [tokens, hidden];
    chosen int64 [tokens, k], experts of each token; weights [tokens, k].
    """
    out = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        padded = F.pad(hidden[token], (0, 0, 0, -len(token) % rows))
        inner = module._apply_gate(F.linear(padded, module.gate_up_proj[expert]))
        said = F.linear(inner, module.down_proj[expert])[: len(token)]
        out.index_add_(0, token, (said * weights[token, place, None]).to(out.dtype))
    return out
