"""Layouts of micro-batches: rectangles, and rows without padding.

Padded, prompt and response of each sample stand side by side, filled up on the right. With causal attention nothing on
the right reaches a real token, so no attention mask is needed and a row's numbers do not depend on how far its
neighbours are padded.

Packed, all samples stand one after the other in one row; positions start again with each. All that works token by token
sees one long row. Attention keeps to the samples: on a GPU in half precision by one
kernel for sequences of different lengths, FlashAttention 3 where it is installed on a Hopper and else torch's, which is
FlashAttention 2; elsewhere sample by sample. (One call under a block-diagonal mask costs the
square of all tokens together: on a CPU 10 to 20 times as much.) Heads of keys and
values that queries share are not repeated, but in float32 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NAME = "cadence_packed"
ROUTES = "routes"
"""The argument by which layers get the experts of each token (engines/torch/experts.py)."""
CAUSAL = (-1, 0)
"""All that is before a token and nothing after it, as a window."""


@dataclass(frozen=True)
class PaddedBatch:
    """tokens: int64 [k, T]; responses: bool [k, T], true at response tokens; routes: int16 [k * (T - 1), layers,
    experts of a token], -1 where a router chooses. All on one device.

    `engines.torch.scoring.LaidOut`: every token but the first of a row is scored, the padding too.
    """

    tokens: torch.Tensor
    responses: torch.Tensor
    routes: torch.Tensor | None = None

    @property
    def inputs(self) -> torch.Tensor:
        """Tokens that go into the model: int64 [k, T - 1]."""
        return self.tokens[:, :-1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.tokens), self.tokens.shape[1] - 1

    @property
    def targets(self) -> torch.Tensor:
        return self.tokens[:, 1:].flatten()

    def through(self, decoder: PreTrainedModel, received: torch.Tensor | None = None) -> torch.Tensor:
        given = {"input_ids": self.inputs} if received is None else {"inputs_embeds": received}
        hidden: torch.Tensor = decoder(**given, **_going_by(self.routes), use_cache=False).last_hidden_state
        return hidden

    def at_targets(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.flatten(0, 1)

    def at_responses(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.responses[:, 1:].flatten()]

    def with_routes(self, routes: Ragged, experts: tuple[int, int]) -> PaddedBatch:
        samples, tokens = self.shape
        return replace(
            self, routes=_placed(routes, experts, range(0, samples * tokens + 1, tokens), self.tokens.device)
        )


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


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of samples in the row: their lengths, and int32 [k + 1] on the device, from 0 to their sum."""

    lengths: list[int]
    offsets: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """tokens, positions: int64 [T]; predicting: int64 [R], where in the row each response token is predicted;
    targets: int64 [R]; routes: int16 [T, layers, experts of a token], -1 where a router chooses. The last token of a
    response predicts nothing and is left out of the row.

    `engines.torch.scoring.LaidOut`: only response tokens are scored.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    boundaries: Boundaries
    routes: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return 1, len(self.tokens)

    def through(self, decoder: PreTrainedModel, received: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of a decoder that `use_packed_attention` has prepared."""
        given = {"input_ids": self.tokens[None]} if received is None else {"inputs_embeds": received}
        place = {"position_ids": self.positions[None], "boundaries": self.boundaries, **_going_by(self.routes)}
        hidden: torch.Tensor = decoder(**given, **place, use_cache=False).last_hidden_state
        return hidden

    def at_targets(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[0, self.predicting]

    def at_responses(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def with_routes(self, routes: Ragged, experts: tuple[int, int]) -> PackedBatch:
        starts = np.cumsum([0, *self.boundaries.lengths]).tolist()
        return replace(self, routes=_placed(routes, experts, starts, self.tokens.device))


def _placed(routes: Ragged, experts: tuple[int, int], starts: Sequence[int], device: torch.device) -> torch.Tensor:
    """The experts of each token of a layout, int16 [N, layers, k], -1 where none are given. routes: as of `TrainBatch`;
    experts: layers and k; starts: where each sample begins, and N. ValueError where a sample has fewer tokens."""
    placed = torch.full((starts[-1], *experts), -1, dtype=torch.int16)
    for number, row in enumerate(routes.rows()):
        start, end = starts[number], starts[number + 1]
        of_tokens = torch.from_numpy(row.astype(np.int16)).view(-1, *experts)
        if len(of_tokens) > end - start:
            raise ValueError(f"there are experts of {len(of_tokens)} tokens, and {end - start} of its sample have any")
        placed[start : start + len(of_tokens)] = of_tokens
    return placed.to(device)


def _going_by(routes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if routes is None else {ROUTES: routes}


def pack_batch(prompts: Ragged, responses: Ragged, device: torch.device) -> PackedBatch:
    """Lay out samples of prompts int64 and responses int64; both have k rows, none of them empty."""
    lengths = prompts.lengths + responses.lengths - 1
    ends = np.cumsum(lengths)
    positions = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    at_prompt = positions < np.repeat(prompts.lengths, lengths)
    last = np.cumsum(responses.lengths) - 1
    tokens = np.empty(len(positions), np.int64)
    tokens[at_prompt] = prompts.values
    tokens[~at_prompt] = np.delete(responses.values, last)
    predicting = np.flatnonzero(positions >= np.repeat(prompts.lengths - 1, lengths))
    offsets = np.concatenate([[0], ends]).astype(np.int32)

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return PackedBatch(
        there(tokens),
        there(positions),
        there(predicting),
        there(responses.values),
        Boundaries(lengths.tolist(), there(offsets)),
    )


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` attend within the `boundaries` that it is called with."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))  # or each list of lengths is compiled
    model.set_attn_implementation(NAME)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    boundaries: Boundaries,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """A transformers attention function: query [1, heads, T, D], key and value [1, kv heads, T, D] -> [1, T, heads, D].

    Causal within each sample; without dropout. Raises NotImplementedError as `refuse_changed_scores`.
    """
    refuse_changed_scores(others)
    attend = _in_one_kernel if query.is_cuda and query.dtype.itemsize == 2 else _one_by_one
    return attend(query, key, value, boundaries, scaling, sliding_window), None


def refuse_changed_scores(others: Mapping[str, Any]) -> None:
    """Raises NotImplementedError where a model hands its attention function what would change the scores."""
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"attention with {name} is not computed here; use another model")


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Mask of the keys that a query sees, the `window` tokens that end with itself: bool [length, length]. None where
    it sees all before it, for which attention needs no mask."""
    if window is None or window >= length:
        return None
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (back >= 0) & (back < window)


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:  # in float32 the one kernel there that shares heads makes all scores at once
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        groups = 1
    parts = zip(*(part.split(boundaries.lengths, dim=2) for part in (query, key, value)), strict=True)
    done = []
    for q, k, v in parts:
        mask = window_mask(q.shape[2], window, q.device)
        done.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
            )
        )
    return torch.cat(done, dim=2).transpose(1, 2)


def _in_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: Boundaries,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    offsets, longest = boundaries.offsets, max(boundaries.lengths)
    how: dict[str, Any] = {"window_size": CAUSAL if window is None else (window - 1, 0)}
    attend = flash_attention_3(query.device)
    if attend is not None:
        how |= {"softmax_scale": scaling, "causal": True}
    else:
        from torch.nn.attention import varlen

        attend = varlen.varlen_attn
        how["scale"] = scaling
        if "enable_gqa" in signature(attend).parameters:  # before torch 2.13 it shares heads without being told
            how["enable_gqa"] = query.shape[1] > key.shape[1]
    attended = attend(query, key, value, offsets, offsets, longest, longest, **how)
    if isinstance(attended, tuple):  # FlashAttention 3 gave logarithms of sums as well, before the end of 2025
        attended = attended[0]
    return attended.unsqueeze(0)


@cache
def flash_attention_3(device: torch.device) -> Callable[..., Any] | None:
    """`flash_attn_varlen_func` of FlashAttention 3 (hopper/flash_attn_interface.py of its repository), which shares
    heads by itself. None where it is not installed, and on what is no Hopper."""
    if find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    found: Callable[..., Any] = import_module("flash_attn_interface").flash_attn_varlen_func
    return found
