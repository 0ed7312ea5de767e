"""Layers shared by several ranks: column by column where a layer's width grows, row by row where it shrinks again.

Two sums over the ranks per layer, forward and backward (Megatron-LM, arXiv 1909.08053, section 3), through DTensor.
The vocabulary is shared as well, by the embeddings and by the output layer, which may be the same parameter. Every
parameter becomes a DTensor, norms a whole one on each rank: so sharding, clipping, saving and sending see one kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

HEADS = 2
"""The dimension of heads where queries and keys are normalised: [B, T, heads, D]."""


def share_layers(model: Qwen3ForCausalLM, mesh: DeviceMesh) -> None:
    """Keep this rank's part of `model`, in place; all ranks of the one-dimensional mesh hold the same weights before.

    Heads, KV heads, width and vocabulary must each be a multiple of the number of ranks (harness/config/checks/job.py).
    """
    for layer in model.model.layers:
        plan = {
            "input_layernorm": WholeNorm(),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.q_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
            "self_attn.k_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
            "self_attn.o_proj": RowwiseParallel(),
            "post_attention_layernorm": WholeNorm(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    outer = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.norm": WholeNorm(local_output=True),
        "lm_head": ColwiseParallel(),  # only its weight is used, by harness/rl/log_probs.py
    }
    parallelize_module(model, mesh, outer)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


class WholeNorm(ParallelStyle):
    """A module that every rank computes whole, on the same input.

    Without `local_output` its output stays a DTensor, so that the gradients of those who read it are summed over the
    ranks once, all together.
    """

    def __init__(self, local_output: bool = False) -> None:
        self._local_output = local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

        def leave(module: torch.nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if self._local_output else output

        return distribute_module(module, device_mesh, None, enter, leave)
