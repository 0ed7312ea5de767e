"""A decoder over a fixed number of slots: each slot holds the keys and values of one running sample.

The arithmetic of a sample does not depend on its neighbours, bitwise, in float32 on the CPU. That stands on three facts
about the CPU kernels (torch 2.13 with MKL, AVX-512, of Intel and AMD), measured, and held by tests:

- a matrix product gives each row the same bits whatever the number of rows, from 16 rows up; below, other kernels take
  over. So token rows are padded to a multiple of `ROWS`. With several threads this holds for hidden sizes up to 512 or
  so: from 1024 on, the split among threads depends on the number of rows. Use one thread there.
- attention treats each (sample, head) alone and masked keys add exact zeros, but how the sum over keys is split depends
  on their number: a scalar tail behind the last full vector, and chunks of equal size where there are more than 384. So
  the number of keys is a multiple of `VECTOR`, and from `CHUNK` on a multiple of `CHUNK`, which splits all alike.
- with both, and at least `QUERIES` query rows per key head (on Intel 2 are enough), prefill and decode give the same
  bits for up to 384 tokens: a sample that recomputes its cache under the same weights goes on exactly as it would have.

Any decoder whose attention is open to functions of others' (transformers' `AttentionInterface`) runs by its own forward
pass, which calls `slot_attention`. The blocks of `BLOCKS` are run here module by module: the same bits, in 10 to 20 %
less time on a small model (tests/benchmarks/bench_rollout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from engines.requests import RouteShape
from engines.torch.model import blocks_of, float32_head, model_shape
from engines.torch.packing import refuse_changed_scores, window_mask
from harness.config.job import routes_dtype
from harness.rl.log_probs import logits_in_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PADDED = "cadence_padded"


def use_padded_experts(model: PreTrainedModel, rows: int) -> None:
    """Make the experts of `model` compute for a multiple of `rows` tokens.

    transformers multiplies each expert's weights with the tokens that were routed to it; with few of them the CPU takes
    other kernels than with many, so that a sample's bits would follow from its neighbours. Here those rows are padded,
    as all others of a pass are, and each token adds what its experts say in their order.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_PADDED, partial(padded_experts, rows=rows))
    model.set_experts_implementation(_PADDED)


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


NAME = "cadence_slots"
BLOCKS = ("qwen2", "qwen3", "llama")
"""Architectures of one kind of block: norms before attention and before the feed-forward network, rotary positions,
perhaps norms of queries and keys, perhaps biases."""
ROWS = 32
"""Token rows of a forward pass are a multiple of this (twice what the CPU's matrix products need)."""
VECTOR = 16
"""Key lengths are a multiple of this: the floats in the widest vector register."""
CHUNK = 256
"""Key lengths beyond this are a multiple of it."""
QUERIES = 4
"""Query rows of attention are at least as many: below, its matrix products take other kernels."""
EXACT = 384
"""Up to so many tokens all ways to compute a sample's keys and values give the same bits on the CPU."""
PREFILL_TOKENS = 8192
"""Most tokens in one prefill pass, which bounds its activations."""


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends, and the number of its cache. scale: of the scores; None is one over the root of the heads'
    size. window: how many tokens, itself included, a token sees; None: all before it."""

    number: int
    scale: float | None = None
    window: int | None = None


Attention = Callable[[LayerAttention, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The attention of a pass in each layer: query [N, heads, dim], key and value [N, kv_heads, dim] -> [N, heads *
dim]."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def key_length(tokens: int) -> int:
    """How many keys attention runs over for a sequence of so many tokens."""
    return _round_up(tokens, VECTOR if tokens <= CHUNK else CHUNK)


class SlotModel:
    """Runs the model's own modules against the slot cache; rows of a decode pass are slots 0, 1, 2, ...

    The cache is, per layer, keys and values of [slots, length, kv_heads, head_dim] in the model's dtype, allocated once
    for `slots` sequences of `max_length` tokens. Of its sixteen attributes nine are the sizes of model and cache.
    """

    def __init__(self, model: PreTrainedModel, slots: int, *, routes: bool = False) -> None:
        """Take the model over: one whose blocks are not `BLOCKS` attends to slots only from now on. routes: whether to
        note the experts of each token that is read, of a model that has any."""
        config = model.config
        self.model, self.slots = model, slots
        self.max_length: int = config.max_position_embeddings
        shape = model_shape(model)
        self.heads: int = shape["heads"]
        self.kv_heads: int = shape["kv_heads"]
        self.head_dim: int = shape["head_dim"]
        self.capacity = key_length(self.max_length)
        self.head: torch.nn.Linear = model.get_output_embeddings()
        self._float32 = float32_head(model)
        self._by_block = config.model_type in BLOCKS and not shape["sliding_layers"]
        if not self._by_block:
            from transformers import AttentionInterface

            AttentionInterface.register(NAME, slot_attention)
            model.set_attn_implementation(NAME)
        if shape["experts"] and self.head.weight.device.type == "cpu":
            use_padded_experts(model, ROWS)
        self.routes = Routes(model, slots, self.capacity) if routes else None
        self.allocate()

    @torch.inference_mode()
    def allocate(self) -> None:
        """Make the cache and the rotary table on the device where the model is now."""
        weight = self.head.weight
        shape = (self.slots, self.capacity, self.kv_heads, self.head_dim)
        # Zeros, not empty: masked positions are multiplied by zero, and zero times NaN is NaN.
        layers = range(self.model.config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.positions = torch.arange(self.capacity, device=weight.device)
        if self._by_block:
            tables = self.model.model.rotary_emb(weight, self.positions[None])
            self.cos, self.sin = (table[0].unsqueeze(1) for table in tables)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, allocated or not."""
        numbers = self.slots * self.capacity * self.kv_heads * self.head_dim
        return 2 * self.model.config.num_hidden_layers * numbers * self.head.weight.itemsize

    def release(self) -> None:
        """Give the cache's memory back; `allocate` makes a new, empty one."""
        self.keys, self.values = [], []

    @property
    def released(self) -> bool:
        """Whether the cache has no memory."""
        return not self.keys

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget what the cache holds; its memory stays."""
        for tensor in self.keys + self.values:
            tensor.zero_()

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copy a slot's keys and values to another slot."""
        for tensor in self.keys + self.values:
            tensor[target] = tensor[source]

    @torch.inference_mode()
    def swap(self, one: int, other: int) -> None:
        """Exchange the keys and values of two slots."""
        for tensor in self.keys + self.values:
            tensor[[one, other]] = tensor[[other, one]]

    def can_extend(self, start: int, end: int) -> bool:
        """Whether `extend` from `start` to `end` tokens gives the bits of a prefill, and has room for its padding."""
        exact = self.positions.device.type != "cpu" or end <= EXACT
        return exact and start + _round_up(end - start, QUERIES) <= self.capacity

    @torch.inference_mode()
    def extend(self, contexts: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Fill slots that hold the first `start` tokens of a context with the rest, at least one, by (slot, tokens,
        start) triples."""

        def shape(context: tuple[int, Sequence[int], int]) -> tuple[int, int]:
            _, tokens, start = context
            return _round_up(len(tokens) - start, QUERIES), key_length(len(tokens))

        for (new, length), group in groupby(sorted(contexts, key=shape), key=shape):
            self._extend(list(group), new, length)

    @torch.inference_mode()
    def prefill(self, contexts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Fill slots from position 0 by (slot, tokens) pairs.

        A sample's padded length is a function of its own length: what is prefilled with it cannot reach its bits.
        """

        def padded(context: tuple[int, Sequence[int]]) -> int:
            return key_length(len(context[1]))

        for length, group in groupby(sorted(contexts, key=padded), key=padded):
            for batch in _batches(list(group), max(1, PREFILL_TOKENS // length)):
                self._prefill(batch, length)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [n, vocabulary] after one more token in each of slots 0 to n - 1.

        Args:
            tokens: the token of each slot, [n].
            positions: its position; keys and values before it are in the cache, [n].
        """
        rows, length, shared = len(tokens), key_length(max(positions) + 1), self.heads // self.kv_heads
        at = self._tensor(positions)
        before = self._seen(at[:, None], length)

        def attention(
            layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            # The query heads that share a key head become query rows: no copy of keys per query head.
            grouped = F.pad(query.view(rows, self.kv_heads, shared, self.head_dim), (0, 0, 0, max(0, QUERIES - shared)))
            keys = self.keys[layer.number][:rows, :length].transpose(1, 2)
            values = self.values[layer.number][:rows, :length].transpose(1, 2)
            mask = before if layer.window is None else self._seen(at[:, None], length, layer.window)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=layer.scale)
            return out[:, :, :shared].reshape(rows, -1)

        hidden = self._forward(self._tensor(tokens), at, self._tensor(range(rows)), attention)
        if self._float32:
            return logits_in_float32(hidden[:rows], self.head.weight)
        return self.head(hidden)[:rows]

    def _prefill(self, contexts: Sequence[tuple[int, Sequence[int]]], length: int) -> None:
        """One pass over contexts of one padded length. Padding is on the right: causal attention never looks there,
        and decoding overwrites its keys before it unmasks them."""
        rows = len(contexts)
        tokens = self._tensor(
            [token for _, context in contexts for token in (*context, *[0] * (length - len(context)))]
        )

        def attention(
            layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            query, key, value = (x.view(rows, length, -1, self.head_dim).transpose(1, 2) for x in (query, key, value))
            mask = window_mask(length, layer.window, query.device)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(rows * length, -1)

        slots = self._tensor([slot for slot, _ in contexts]).repeat_interleave(length)
        self._forward(tokens, self.positions[:length].repeat(rows), slots, attention)

    def _extend(self, contexts: Sequence[tuple[int, Sequence[int], int]], new: int, length: int) -> None:
        """One pass over `new` tokens of each, padded as in `_prefill`, which attend to `length` keys of their slots."""
        rows = len(contexts)
        added = [[*tokens[start:], *[0] * (new - len(tokens) + start)] for _, tokens, start in contexts]
        slots = self._tensor([slot for slot, _, _ in contexts])
        at = self._tensor([start for _, _, start in contexts])[:, None] + self.positions[:new]
        before = self._seen(at, length)

        def attention(
            layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            query = query.view(rows, new, -1, self.head_dim).transpose(1, 2)
            keys = self.keys[layer.number][slots, :length].transpose(1, 2)
            values = self.values[layer.number][slots, :length].transpose(1, 2)
            mask = before if layer.window is None else self._seen(at, length, layer.window)
            out = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(rows * new, -1)

        tokens = self._tensor([token for row in added for token in row])
        self._forward(tokens, at.flatten(), slots.repeat_interleave(new), attention)

    def _seen(self, at: torch.Tensor, length: int, window: int | None = None) -> torch.Tensor:
        """Mask of the first `length` keys of its slot that a query sees: bool [rows, 1, queries, length]. at: the
        positions of queries, int64 [rows, queries]; window: as of `LayerAttention`."""
        keys, at = self.positions[:length], at[:, None, :, None]
        return keys <= at if window is None else (keys <= at) & (keys > at - window)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Final hidden states of N token rows, padded to [multiple of ROWS, hidden]; writes their keys and values."""
        real = len(tokens)
        padding = _round_up(real, ROWS) - real
        where = slots * self.capacity + positions
        tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))

        def cached(layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            """Attention of rows that are padded: only the real ones enter the cache."""
            query, key, value = query[:real], key[:real], value[:real]
            self.keys[layer.number].view(-1, self.kv_heads, self.head_dim).index_copy_(0, where, key)
            self.values[layer.number].view(-1, self.kv_heads, self.head_dim).index_copy_(0, where, value)
            mixed = attention(layer, query, key, value)
            return F.pad(mixed, (0, 0, 0, padding)) if padding else mixed

        if self._by_block:
            return self._blocks(tokens, positions, cached)
        decoder = self.model.base_model
        output = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, slot_attention=cached)
        if self.routes is not None:
            self.routes.note(where)
        return output.last_hidden_state[0]

    def _blocks(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """The decoder layers of `BLOCKS`, through their modules, without the work that transformers' own forward pass
        does for every token besides."""
        cos, sin = self.cos[positions], self.sin[positions]
        hidden = self.model.model.embed_tokens(tokens)
        for number, layer in enumerate(self.model.model.layers):
            block = layer.self_attn
            x = layer.input_layernorm(hidden)
            query = block.q_proj(x).view(-1, self.heads, self.head_dim)
            key = block.k_proj(x).view(-1, self.kv_heads, self.head_dim)
            if hasattr(block, "q_norm"):
                query, key = block.q_norm(query), block.k_norm(key)
            value = block.v_proj(x).view(-1, self.kv_heads, self.head_dim)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            hidden = hidden + block.o_proj(attention(LayerAttention(number), query, key, value))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.model.norm(hidden)

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.positions.device)


class Routes:
    """The experts of the tokens in each slot. of: [slots, length, layers * k], as `harness.protocols.Completion` has
    them."""

    def __init__(self, model: Any, slots: int, length: int) -> None:
        shape = RouteShape.of(model)
        self.of = np.zeros((slots, length, shape.of_token), routes_dtype(shape.experts))
        self._chosen: list[torch.Tensor] = []  # in each layer of the pass
        for layer in blocks_of(model):
            layer.mlp.gate.register_forward_hook(lambda router, inputs, output: self._chosen.append(output[2]))  # type: ignore[union-attr]

    def note(self, where: torch.Tensor) -> None:
        """Keep those of the last pass, whose first tokens have these places among those of all slots."""
        places, chosen = where.cpu().numpy(), torch.stack(self._chosen, 1).flatten(1).cpu().numpy()
        self.of.reshape(-1, self.of.shape[2])[places] = chosen[: len(places)]
        self._chosen = []


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., "RoFormer", 2021), halves convention. x: [rows, heads, dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _batches(items: list[tuple[int, Sequence[int]]], size: int) -> Iterator[list[tuple[int, Sequence[int]]]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_attention: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """A transformers attention function: query [1, heads, N, D], key and value [1, kv heads, N, D] -> [1, N, heads, D].

    Raises NotImplementedError as `refuse_changed_scores`.
    """
    refuse_changed_scores(others)
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    mixed = slot_attention(LayerAttention(module.layer_idx, scaling, sliding_window), query, key, value)
    return mixed.view(1, *query.shape), None
