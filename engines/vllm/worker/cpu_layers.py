"""Layers of vLLM's CPU build that an engine in training needs otherwise.

vLLM packs linear weights for oneDNN when a model is loaded and computes with the packed copy from then on. A reload
that packs them again misses the output layer where it is tied to the embeddings: it would go on with the old weights,
without an error. So linear layers compute with the plain weights, which `load_weights` changes in place. Experts it
packs too, and the first weights alone: a reload has to make their kernel anew.
"""

from typing import Any

import torch
from torch.nn.functional import linear, pad
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models import llama, qwen2, qwen3
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


def install() -> None:
    """Replace layers of vLLM; to be called before the model is made."""
    utils.dispatch_cpu_unquantized_gemm = _compute_with_plain_weights
    UnquantizedFusedMoEMethod._setup_kernel = _set_up_anew
    for architecture in (llama, qwen2, qwen3):
        architecture.Attention = WidenedAttention


def _compute_with_plain_weights(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = linear


_set_up_kernel = UnquantizedFusedMoEMethod._setup_kernel


def _set_up_anew(method: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
    method.moe_kernel = None
    _set_up_kernel(method, layer, w13, w2)


class WidenedAttention(Attention):
    """Attention whose heads are filled up with zeros to a size that the CPU kernels know: exact, because zeros add
    nothing to a product, and the scale stays that of the head's own size."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **options: Any) -> None:
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        wide = min((size for size in sizes if size >= head_size), default=head_size)
        super().__init__(num_heads, wide, scale, **options)
        self.own_head_size = head_size

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query, key, value: [tokens, heads * head size]; so is the result, with the heads of the query."""
        if self.own_head_size == self.head_size:
            return super().forward(query, key, value)
        wide = super().forward(self._widened(query), self._widened(key), self._widened(value))
        return wide.unflatten(-1, (-1, self.head_size))[..., : self.own_head_size].flatten(-2)

    def _widened(self, heads: torch.Tensor) -> torch.Tensor:
        own = heads.unflatten(-1, (-1, self.own_head_size))
        return pad(own, (0, self.head_size - self.own_head_size)).flatten(-2)
