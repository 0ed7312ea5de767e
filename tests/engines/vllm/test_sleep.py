"""What vLLM is told when an engine sleeps and wakes, in which order; its processes are made up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from engines.torch.model import build_model
from engines.vllm import rollout
from engines.vllm.rollout import VLLMRollout
from harness.config import ModelConfig
from harness.protocols import Sampling
from tests.support.role_setting import TickingClock

MODEL = ModelConfig("small", 32, 1, 2, 2, 16, 32, vocabulary=32, tied_embeddings=True, max_length=64)


class Process:
    """Of vLLM: writes down what it is told."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.told: list[str] = []
        self.holds = {"weights": 0, "kv_cache": 0}

    def require_alive(self) -> None: ...

    async def forget_cache(self) -> None:
        self.told.append("forget cache")

    async def resume(self) -> None:
        self.told.append("resume")

    async def tell_worker(self, method: str, **arguments: Any) -> None:
        self.told.append(f"{method} {arguments}")


class Sender:
    incomplete = None

    def __init__(self, process: Process, *_: Any, **__: Any) -> None:
        self.process = process

    async def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        list(weights)
        self.process.told.append(f"load {version}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VLLMRollout:
    monkeypatch.setattr(rollout, "VLLMProcess", Process)
    monkeypatch.setattr(rollout, "VLLMWeightSender", Sender)
    return VLLMRollout(build_model(MODEL), sampling=Sampling(8), slots=2, seed=0, clock=TickingClock())


def told(engine: VLLMRollout) -> list[str]:
    process = engine._process
    assert isinstance(process, Process)
    lines, process.told = process.told, []
    return lines


async def test_an_engine_that_keeps_its_weights_sleeps_on_level_one_and_wakes_as_it_was(engine: VLLMRollout) -> None:
    await engine.sleep()
    assert told(engine) == ["forget cache", "sleep {'level': 1}"]
    await engine.wake()
    await engine.resume()
    assert told(engine) == ["wake_up {'tags': ['weights']}", "wake_up {'tags': ['kv_cache']}", "resume"]


async def test_one_that_may_forget_them_sleeps_on_level_two_and_generates_only_with_new_ones(
    engine: VLLMRollout,
) -> None:
    await engine.sleep(keep_weights=False)
    assert told(engine) == ["forget cache", "sleep {'level': 2}"]
    with pytest.raises(RuntimeError, match="engine 0 forgot its weights when it slept"):
        await engine.resume()

    def broken() -> Iterable[tuple[str, torch.Tensor]]:
        raise ConnectionError("the sender is gone")
        yield

    with pytest.raises(ConnectionError):
        await engine.load_weights(1, broken())
    with pytest.raises(RuntimeError, match="load a complete set of weights"):
        await engine.resume()
    told(engine)
    await engine.load_weights(1, iter(()))
    await engine.wake()
    await engine.resume()
    assert told(engine) == ["load 1", "wake_up {'tags': ['kv_cache']}", "resume"]
    await engine.sleep()
    assert told(engine) == ["forget cache", "sleep {'level': 1}"]
