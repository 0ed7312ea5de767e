"""Parts of the SGLang engine that need no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.requests import RunningSample
from engines.sglang.launcher import murmur_hash32
from engines.sglang.requests import Reply, body_of
from engines.sglang.server import write_model
from engines.torch.model import build_model
from harness.config import ModelConfig
from harness.protocols import Sampling

PLAIN = Sampling(max_tokens=8)


def message(tokens: list[int], of: int, **meta: Any) -> dict[str, Any]:
    rows = [[-float(token), token, None] for token in tokens]
    return {
        "output_ids": tokens,
        "meta_info": {"completion_tokens": of, "output_token_logprobs": rows, "finish_reason": None, **meta},
    }


@pytest.mark.parametrize("repeats", [True, False], ids=["whole", "what is new"])
def test_a_reply_is_the_same_whether_messages_repeat_what_came_before_or_not(repeats: bool) -> None:
    reply = Reply(PLAIN, "engine 0")
    tokens = [4, 4, 7, 1, 4]
    for start, end in ((0, 1), (1, 4), (4, 4), (4, 5)):
        reply.add(message(tokens[0 if repeats else start : end], end))
    assert (reply.tokens, reply.log_probs) == (tokens, [-float(token) for token in tokens])


def test_an_abort_that_repeats_the_last_token_adds_none() -> None:
    reply = Reply(PLAIN, "engine 0")
    reply.add(message([4, 5], 2))
    reply.add(message([5], 2, finish_reason={"type": "abort"}))
    assert reply.tokens == [4, 5] and reply.finish == {"type": "abort"}


def test_versions_are_the_servers_where_it_tells_them_and_ours_where_not() -> None:
    reply = Reply(PLAIN, "engine 0")
    reply.add(message([4, 5, 6], 3))
    assert reply.versions(7) == [7, 7, 7]
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    reply.add(message([4, 5, 6], 3, weight_versions=spans))
    assert reply.versions(7) == [7, 7, 8]


def test_messages_that_lack_tokens_or_have_log_probs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="engine 0.*counts 3 tokens.*sent 2"):
        Reply(PLAIN, "engine 0").add(message([4, 5], 3))
    with pytest.raises(FloatingPointError, match="engine 0"):
        broken = message([4], 1)
        broken["meta_info"]["output_token_logprobs"][0][0] = float("nan")
        Reply(PLAIN, "engine 0").add(broken)


def test_the_only_choice_has_log_probability_zero() -> None:
    reply = Reply(Sampling(max_tokens=8, temperature=0), "engine 0")
    reply.add(message([4, 5], 2))
    assert reply.log_probs == [0.0, 0.0]


def test_log_probs_under_top_p_are_those_of_the_nucleus() -> None:
    sampling = Sampling(max_tokens=8, top_p=0.9)
    body = body_of(RunningSample(0, 1, [3]), sampling, seed=0, vocabulary=32)
    assert body["return_sampling_mask"] and body["sampling_params"]["top_k"] == 32
    reply = Reply(sampling, "engine 0")
    reply.add(message([4, 5], 2, output_token_sampling_logprobs=[-0.5, -0.25]))
    assert reply.log_probs == [-0.5, -0.25]


def test_stop_tokens_are_told_and_nothing_else_stops_a_sample() -> None:
    sample = RunningSample(0, 2, [3, 4, 9], log_probs=[-1.0], versions=[0])
    stopping = body_of(sample, Sampling(max_tokens=8, stop_tokens=(7,)), seed=0, vocabulary=32)["sampling_params"]
    assert (stopping["stop_token_ids"], stopping["ignore_eos"], stopping["max_new_tokens"]) == ([7], False, 7)
    endless = body_of(sample, PLAIN, seed=0, vocabulary=32)["sampling_params"]
    assert (endless["stop_token_ids"], endless["ignore_eos"]) == ([], True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_written_whole_and_without_an_end_of_its_own(tmp_path: Path, tied: bool) -> None:
    model = build_model(ModelConfig("small", 32, 1, 2, 1, 16, 64, 32, tied, 64))
    model.config.eos_token_id = 5
    write_model(model, tmp_path)
    assert model.config.eos_token_id == 5
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("eos_token_id") is None and config["architectures"] == ["Qwen3ForCausalLM"]
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }
    assert not (tmp_path / "generation_config.json").exists()


def test_the_hash_behind_draws_is_murmur3() -> None:
    seeds, positions, columns = [0, 1, (1 << 63) - 1, 0xDEADBEEF12345678 - (1 << 64)], [0, 3, 70000, 12], [0, 1, 151935]
    hashed = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for place, column in enumerate(columns):
            block = (
                (seed % (1 << 64)).to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            )
            assert hashed[row, place] == murmur3(block)


def test_murmur3_is_right_where_its_value_is_known() -> None:
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE and murmur3(b"test") == 0xBA6BD213


def murmur3(data: bytes) -> int:
    """Of a multiple of four bytes, with seed 0; byte by byte as its author describes it."""
    mask, value = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) * 0x1B873593 & mask
        value ^= k
        value = ((value << 13 | value >> 19) & mask) * 5 + 0xE6546B64 & mask
    value ^= len(data)
    value = (value ^ value >> 16) * 0x85EBCA6B & mask
    value = (value ^ value >> 13) * 0xC2B2AE35 & mask
    return value ^ value >> 16
