"""Experts that tokens were sampled by: what engines tell of them, and that training goes by these and no others."""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engines.requests import RouteShape, RunningSample
from engines.sglang.requests import Reply, SampleRequests, body_of
from engines.torch.fsdp import FSDPEngine
from engines.torch.model import blocks_of, build_model
from engines.torch.rollout import TorchRollout
from engines.vllm.rollout import extend
from harness.config import ModelConfig, TrainingConfig
from harness.protocols import Completion, Request, Sampling
from harness.transfer_queue import Ragged
from tests.support.fsdp_samples import CPU, FREE, assert_close, batch_of, computed, gradients
from tests.support.role_setting import TickingClock

MODEL = ModelConfig("moe", 32, 3, 2, 1, 16, 24, 64, False, 64, experts=8, active_experts=2, architecture="qwen3_moe")
PROMPTS = [np.array([3, 5, 7]), np.array([2, 4, 6, 8, 9, 11])]


def make_engine(model: Any, tokens: int) -> TorchRollout:
    return TorchRollout(model, sampling=Sampling(max_tokens=tokens), slots=2, seed=0, clock=TickingClock(), routes=True)


async def done(engine: TorchRollout) -> list[Completion]:
    found = []
    while engine.running or engine.waiting or engine._done:
        found += await engine.finished()
    return sorted(found, key=lambda completion: completion.sample_id)


@torch.no_grad()
def routes_by_forward(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Experts of all tokens by one plain pass of the model: [L, layers * k]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda router, inputs, output: chosen.append(output[2]))
        for layer in blocks_of(model)
    ]
    model(torch.from_numpy(tokens)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).flatten(1).numpy()


def other_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(1)
    return ((name, torch.randn_like(parameter) * 0.3) for name, parameter in model.named_parameters())


async def test_an_engine_tells_the_experts_of_all_tokens_that_it_read() -> None:
    engine = make_engine(build_model(MODEL), tokens=6)
    engine.submit([Request(i, prompt) for i, prompt in enumerate(PROMPTS)])
    for completion, prompt in zip(await done(engine), PROMPTS, strict=True):
        expected = routes_by_forward(build_model(MODEL), np.concatenate([prompt, completion.tokens])[:-1])
        assert completion.routes is not None and completion.routes.dtype == np.uint8
        np.testing.assert_array_equal(completion.routes, expected)


@pytest.mark.parametrize("carried", [True, False])
async def test_experts_of_tokens_are_those_by_which_the_next_was_sampled_though_weights_changed(carried: bool) -> None:
    engine = make_engine(build_model(MODEL), tokens=8)
    request = Request(0, PROMPTS[0])
    engine.submit([request])
    for _ in range(4):
        engine.step()
    await engine.pause("abort" if carried else "keep")
    if carried:
        (partial,) = await engine.finished()
        request = request.after(partial)
    await engine.load_weights(1, other_weights(build_model(MODEL)))
    engine.drop_cache()
    if carried:
        engine.submit([request])
    await engine.resume()
    (completion,) = await done(engine)
    tokens = np.concatenate([PROMPTS[0], completion.tokens])[:-1]
    newer = build_model(MODEL)
    newer.load_state_dict(dict(other_weights(newer)))
    assert completion.routes is not None and len(completion.routes) == len(tokens)
    read = len(PROMPTS[0]) + 3  # all but the last of those that were there before the weights came
    np.testing.assert_array_equal(completion.routes[:read], routes_by_forward(build_model(MODEL), tokens)[:read])
    np.testing.assert_array_equal(completion.routes[read:], routes_by_forward(newer, tokens)[read:])
    assert (routes_by_forward(newer, tokens)[:read] != completion.routes[:read]).any()


def trained(layout: TrainingConfig, routes: Ragged | None) -> tuple[FSDPEngine, dict[str, float]]:
    engine = FSDPEngine(build_model(MODEL), FREE, mesh=None, device=CPU, training=layout)
    sums = computed(engine.accumulate(replace(batch_of(range(4)), routes=routes)))
    computed(engine.step())
    return engine, sums


def routes_of_batch(model: Any) -> Ragged:
    batch = batch_of(range(4))
    rows = zip(batch.prompts.rows(), batch.responses.rows(), strict=True)
    return Ragged.from_rows(
        [routes_by_forward(model, np.concatenate(both)[:-1]).astype(np.uint8).ravel() for both in rows]
    )


def test_layouts_and_recomputed_layers_go_by_the_same_experts_and_those_of_the_router_change_no_bit() -> None:
    own, plain = trained(TrainingConfig(), routes_of_batch(build_model(MODEL))), trained(TrainingConfig(), None)
    assert own[1]["rerouted"] == 0 < own[1]["replayed"]
    assert_close(gradients(own[0]), gradients(plain[0]), rtol=0)
    other = build_model(MODEL)
    other.load_state_dict(dict(other_weights(other)))
    routes = routes_of_batch(other)
    expected, sums = trained(TrainingConfig(), routes)
    assert 0 < sums["rerouted"] < sums["replayed"]
    frugal = TrainingConfig(layout="packed", recompute_activations=True, tokens_per_micro_batch=30)
    found, told = trained(frugal, routes)
    assert_close(gradients(found), gradients(expected), rtol=5e-6)
    assert (told["rerouted"], told["replayed"]) == (sums["rerouted"], sums["replayed"])


def test_experts_of_more_tokens_than_a_sample_has_are_refused() -> None:
    routes = routes_of_batch(build_model(MODEL))
    longer = Ragged.from_rows([np.concatenate([row, row]) for row in routes.rows()])
    with pytest.raises(ValueError, match="there are experts of .* tokens"):
        trained(TrainingConfig(layout="packed"), longer)


def test_what_vllm_and_sglang_tell_is_added_to_what_is_known_and_more_than_can_be_is_refused() -> None:
    shape = RouteShape.of(build_model(MODEL))
    assert shape == RouteShape(of_token=6, experts=8)
    known, new = np.ones((4, 6), np.uint8), np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    partial = Completion(0, np.array([1, 2]), np.zeros(2, np.float32), np.zeros(2, np.int32), "abort", 0.0, 0.0)
    request = Request(0, PROMPTS[0], replace(partial, routes=known))
    sample = RunningSample.of(request, Sampling(max_tokens=8))
    assert body_of(sample, seed=0, vocabulary=24, routes=True)["routed_experts_start_len"] == 4
    tokens = {5: SimpleNamespace(logprob=-1.0)}, {6: SimpleNamespace(logprob=-1.0)}
    spans = [SimpleNamespace(version="0", start=0, end=2)]
    said = SimpleNamespace(
        token_ids=[5, 6], logprobs=tokens, weight_versions=spans, finish_reason="stop", routed_experts=new
    )
    extend(sample, cast(Any, said), greedy=False, routes=shape)
    routes = sample.completion("stop", 1.0).routes
    assert routes is not None and routes.dtype == np.uint8
    np.testing.assert_array_equal(routes, np.concatenate([known, new.reshape(2, 6)]))
    with pytest.raises(RuntimeError, match="experts of 6 and 1 tokens, and it has 7"):
        sample.add_routes(new[:1], shape)
    reply = Reply(Sampling(max_tokens=8), "engine 0")
    meta = {"completion_tokens": 1, "output_token_logprobs": [(-1.0, 5, None)], "finish_reason": {"type": "stop"}}
    reply.add({"output_ids": [5], "meta_info": meta | {"routed_experts": b64encode(new.tobytes()).decode()}})
    assert reply.routes
    silent = Reply(Sampling(max_tokens=8), "engine 0")
    silent.add({"output_ids": [5], "meta_info": meta})
    nothing: Any = lambda *_: None  # noqa: E731
    calls = dict.fromkeys(("prepare", "ended", "changed", "require_alive", "still"), nothing)
    client = cast(Any, SimpleNamespace(owner="engine 0"))
    requests = SampleRequests(client, **calls, clock=TickingClock(), routes=shape)
    requests._require_reason(sample, reply)
    with pytest.raises(RuntimeError, match="start it with --enable-return-routed-experts"):
        requests._require_reason(sample, silent)
