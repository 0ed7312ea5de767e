"""Tensor parallelism: layers shared between ranks.

Column by column where a layer's width grows, row by row where it shrinks again: two sums over the ranks per layer,
forward and backward (Megatron-LM, arXiv 1909.08053, section 3), through DTensor. The vocabulary is shared as well, by
the embeddings and by the output layer, which may be the same parameter. Every parameter becomes a DTensor, norms a
whole one on each rank: so sharding, clipping, saving and sending see one kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from engines.torch.model import blocks_of
from engines.torch.scoring import VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def share_layers(model: PreTrainedModel, world: DeviceMesh) -> dist.ProcessGroup:
    """Keep this rank's part of `model`, in place; the ranks of the mesh's dimension `tensor`, whose group is returned,
    hold the same weights before.

    Heads, KV heads, width and vocabulary must each be a multiple of the number of ranks, as
    harness/checks/layout.py sees to.
    """
    mesh = world["tensor"]
    for layer in blocks_of(model):
        plan = {
            "input_layernorm": Whole(),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "post_attention_layernorm": Whole(),
        }
        if hasattr(layer.mlp, "experts"):
            plan |= {"mlp": DividedExperts()}
        else:
            plan |= {
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            }
        if hasattr(layer.self_attn, "q_norm"):
            norm = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
            plan |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
        parallelize_module(layer, mesh, plan)
    outer = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "model.norm": Whole(local_output=True)}
    if hasattr(model, VALUE_HEAD):
        parallelize_module(model, mesh, outer | {VALUE_HEAD: Whole(local_output=True)})
        return mesh.get_group()
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, outer | {"lm_head": ColwiseParallel()})  # only its weight is used, by log_probs.py
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return mesh.get_group()


HEADS = 2
"""The dimension of heads where queries and keys are normalised: [B, T, heads, D]."""


class Whole(ParallelStyle):
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


class DividedExperts(ParallelStyle):
    """A layer's router, which every rank computes whole, and its experts, of which each rank has its own
    (`engines.torch.experts.spread_experts`): what these add to a token is summed over the ranks."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        def routed(router: torch.nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            logits, scores, chosen = output
            of_own_experts = {"grad_placements": [Partial()]}
            return logits.to_local(**of_own_experts), scores.to_local(**of_own_experts), chosen.to_local()

        def enter(experts: torch.nn.Module, inputs: Any) -> Any:
            hidden, *routing = inputs
            return (hidden.to_local(grad_placements=[Partial()]), *routing)

        def leave(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        distribute_module(module.gate, device_mesh, None, None, routed)
        module.experts.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        whole: torch.nn.Module = module
        return whole
