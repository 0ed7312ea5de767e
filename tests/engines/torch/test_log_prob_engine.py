from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from engines.torch.scoring import TorchLogProb
from harness.config import ModelConfig
from harness.protocols import Completion, LogProbEngine, Request, Sampling
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Ragged

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
CPU = torch.device("cpu")
ATOL, RTOL = 1e-5, 1e-4
"""Both are float32 on the same weights."""


def make(temperature: float = 1.0, seed: int = 0) -> TorchLogProb:
    engine = TorchLogProb(build_model(TINY, seed=seed), temperature=temperature, device=CPU)
    _: LogProbEngine = engine
    return engine


def prompts(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, TINY.vocabulary, rng.integers(1, 30)) for _ in range(count)]


def responses(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(1, TINY.vocabulary, rng.integers(1, 25)) for _ in range(count)]


async def sample(temperature: float) -> tuple[list[np.ndarray], list[Completion]]:
    engine = TorchRollout(
        build_model(TINY),
        sampling=Sampling(max_tokens=40, temperature=temperature, stop_tokens=(0,)),
        slots=8,
        seed=0,
        clock=RealClock.starting_now(),
    )
    asked = prompts(20)
    engine.submit([Request(i, prompt) for i, prompt in enumerate(asked)])
    done: list[Completion] = []
    while len(done) < len(asked):
        done += await engine.finished()
    return asked, sorted(done, key=lambda completion: completion.sample_id)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_it_agrees_with_the_engine_about_what_the_engine_sampled(temperature: float) -> None:
    asked, done = await sample(temperature)
    ours = await make(temperature).log_probs(Ragged.from_rows(asked), Ragged.from_rows([c.tokens for c in done]))
    assert ours.lengths.tolist() == [len(c.tokens) for c in done]
    np.testing.assert_allclose(ours.values, np.concatenate([c.log_probs for c in done]), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_it_agrees_with_transformers_on_each_sequence_alone(temperature: float) -> None:
    model, asked, said = build_model(TINY), prompts(9), responses(9)
    ours = await make(temperature).log_probs(Ragged.from_rows(asked), Ragged.from_rows(said))
    for prompt, response, row in zip(asked, said, ours.rows(), strict=True):
        sequence = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(-1, sequence[len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(row, expected.numpy(), rtol=RTOL, atol=ATOL)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build_model(TINY, seed=seed).named_parameters()}


async def score(engine: TorchLogProb) -> bytes:
    return (await engine.log_probs(Ragged.from_rows(prompts(3)), Ragged.from_rows(responses(3)))).values.tobytes()


async def test_loaded_weights_are_the_ones_it_scores_with() -> None:
    engine = make(seed=0)
    before = await score(engine)
    await engine.load_weights(5, weights_of(seed=1).items())
    assert engine.version == 5
    assert await score(engine) == await score(make(seed=1)) != before


async def test_weights_that_do_not_fit_are_all_named_and_read_to_their_end() -> None:
    engine, weights = make(), weights_of(seed=1)
    norm = weights.pop("model.norm.weight")
    weights = {"strange": norm, "model.layers.0.input_layernorm.weight": norm[:3]} | weights
    read = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            read.append(name)
            yield name, norm[:3] if name.endswith("0.input_layernorm.weight") else tensor

    wrong = "strange is unknown; .*0.input_layernorm.weight has shape.*model.norm.weight is missing"
    with pytest.raises(ValueError, match=f"version 3 do not fit: {wrong}"):
        await engine.load_weights(3, stream())
    assert read == list(weights)
    assert engine.version == 0


async def test_after_a_load_that_broke_off_nothing_is_scored_until_a_complete_one() -> None:
    engine = make()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(weights_of(seed=1).items()))
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        await engine.load_weights(4, broken())
    assert engine.version == 0
    with pytest.raises(RuntimeError, match="log-prob engine: version 4 was put in place in part only"):
        await score(engine)
    await engine.load_weights(5, weights_of(seed=1).items())
    assert await score(engine) == await score(make(seed=1))
