import sys
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.torch import packing
from engines.torch.packing import pack_batch, pad_batch
from harness.config import ModelConfig
from harness.transfer_queue import Ragged

SMALL = ModelConfig("small", 32, 2, 4, 2, 8, 64, 32, True, 64)
CPU = torch.device("cpu")

Lengths = list[tuple[int, int]]
lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=9)


def columns(lengths: Lengths, seed: int = 0) -> tuple[Ragged, Ragged]:
    rng = np.random.default_rng(seed)
    parts = zip(*lengths, strict=True)
    return tuple(Ragged.from_rows([rng.integers(1, SMALL.vocabulary, n) for n in part]) for part in parts)


@given(lengths)
def test_a_row_holds_every_sample_but_its_last_token_and_positions_start_again(lengths: Lengths) -> None:
    prompts, responses = columns(lengths)
    batch = pack_batch(prompts, responses, CPU)
    samples = [np.append(prompts.row(i), responses.row(i))[:-1] for i in range(len(lengths))]
    assert batch.tokens.tolist() == np.concatenate(samples).tolist()
    assert batch.positions.tolist() == [place for sample in samples for place in range(len(sample))]
    assert batch.boundaries.lengths == [len(sample) for sample in samples]
    assert batch.boundaries.offsets.tolist() == np.cumsum([0, *map(len, samples)]).tolist()


@given(lengths)
def test_each_response_token_is_predicted_where_the_one_before_it_stands(lengths: Lengths) -> None:
    prompts, responses = columns(lengths)
    batch = pack_batch(prompts, responses, CPU)
    before = [np.append(prompts.row(i), responses.row(i))[p - 1 : -1] for i, (p, _) in enumerate(lengths)]
    assert batch.tokens[batch.predicting].tolist() == np.concatenate(before).tolist()
    assert batch.targets.tolist() == responses.values.tolist()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_kernel_of_many_lengths_is_asked_as_one_by_one_does(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself is of GPUs (tests/gpu); here a stand-in that follows its documentation."""

    def varlen_attn(q, k, v, offsets, same, longest, as_long, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert q.shape == (10, 4, 8) and k.shape == v.shape == (10, kv_heads, 8) and offsets.dtype == torch.int32
        assert enable_gqa == (kv_heads < 4)
        k, v = (part.repeat_interleave(4 // kv_heads, dim=1) for part in (k, v))
        assert (longest, as_long, window_size) == (5, 5, (-1, 0)) and same is offsets
        parts = (part.tensor_split(offsets[1:-1].long()) for part in (q, k, v))
        rows = [[part.transpose(0, 1) for part in sample] for sample in zip(*parts, strict=True)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(*row, is_causal=True, scale=scale).transpose(0, 1) for row in rows])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    query, key, value = (torch.randn(1, heads, 10, 8) for heads in (4, kv_heads, kv_heads))
    boundaries = packing.Boundaries([2, 5, 3], torch.tensor([0, 2, 7, 10], dtype=torch.int32))
    arguments = (query, key, value, boundaries, 0.3, None)
    torch.testing.assert_close(packing._in_one_kernel(*arguments), packing._one_by_one(*arguments))


def varlen_of_flash_attention_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """What is computed under the signature of flash_attn_interface."""
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert causal and window_size[1] == 0 and q.is_contiguous()
    window = None if window_size[0] < 0 else window_size[0] + 1
    rows = (part.transpose(0, 1)[None] for part in (q, k, v))
    boundaries = packing.Boundaries(cu_seqlens_q.diff().tolist(), cu_seqlens_q)
    return packing._one_by_one(*rows, boundaries, softmax_scale, window)[0]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("major", "called"), [(9, 1), (8, 0)])
def test_flash_attention_3_is_called_where_it_is_installed_on_a_hopper(
    major: int, called: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself is of GPUs, where tests/gpu and the gate take it."""
    calls = mock.Mock(wraps=varlen_of_flash_attention_3)
    library = ModuleType("flash_attn_interface")
    library.flash_attn_varlen_func, library.__spec__ = calls, mock.Mock()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(packing, "flash_attention_3", packing.flash_attention_3.__wrapped__)
    query, key, value = (torch.randn(1, heads, 10, 8) for heads in (4, 2, 2))
    boundaries = packing.Boundaries([2, 5, 3], torch.tensor([0, 2, 7, 10], dtype=torch.int32))
    expected = packing._one_by_one(query, key, value, boundaries, 0.3, window)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda *_, **__: (expected[0], None))
    torch.testing.assert_close(packing._in_one_kernel(query, key, value, boundaries, 0.3, window), expected)
    assert calls.call_count == called


def test_heads_that_queries_share_are_never_repeated() -> None:
    query = torch.randn(1, 8, 12, 16, requires_grad=True)
    key, value = (torch.randn(1, 2, 12, 16, requires_grad=True) for _ in range(2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        packing.packed_attention(
            torch.nn.Module(), query, key, value, None, scaling=0.3, boundaries=packing.Boundaries([12], torch.empty(0))
        )
    assert sorted(tensor.shape[1] for tensor in kept if tensor.shape[-1] == 16) == [2, 2, 8, 8]


@given(lengths)
def test_each_row_is_prompt_response_and_zeros(lengths: list[tuple[int, int]]) -> None:
    prompts, responses = columns(lengths)
    batch = pad_batch(prompts, responses, CPU)
    assert batch.tokens.shape == (len(lengths), max(map(sum, lengths)))
    for i, (p, r) in enumerate(lengths):
        assert batch.tokens[i, : p + r].tolist() == [*prompts.row(i), *responses.row(i)]
        assert not batch.tokens[i, p + r :].any()
        assert batch.responses[i].nonzero().flatten().tolist() == list(range(p, p + r))


@given(lengths)
def test_targets_at_responses_are_these_and_inputs_are_what_precedes_them(lengths: list[tuple[int, int]]) -> None:
    prompts, responses = columns(lengths)
    batch = pad_batch(prompts, responses, CPU)
    assert batch.at_responses(batch.targets).tolist() == responses.values.tolist()
    expected = np.concatenate(
        [np.append(prompts.row(i), responses.row(i))[p - 1 : -1] for i, (p, _) in enumerate(lengths)]
    )
    assert batch.at_responses(batch.inputs.flatten()).tolist() == expected.tolist()
