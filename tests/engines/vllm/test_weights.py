"""The link between the vLLM adapter and vLLM's worker, without vLLM: buckets, and what travels between two ends."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from engines.buckets import PackedBucket, buckets, shared_tensor
from engines.torch.model import build_model
from engines.vllm import rollout
from engines.vllm.rollout import VLLMRollout
from harness.config import ModelConfig
from harness.protocols import Sampling
from tests.support.role_setting import TickingClock

CPU = torch.device("cpu")
WEIGHTS = {
    "first": torch.arange(10, dtype=torch.float32),
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "large": torch.arange(100, dtype=torch.float64),
    "last": torch.tensor(7.0),
}


def unpacked(bucket: PackedBucket) -> Iterator[tuple[str, torch.Tensor]]:
    told = bucket.described()
    for name, kind, shape, start in zip(told["names"], told["dtypes"], told["shapes"], told["offsets"], strict=True):
        dtype = getattr(torch, kind)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        yield name, bucket.buffer[start:end].view(dtype).view(shape)


@pytest.mark.parametrize("limit", [1, 64, 100, 1 << 20])
def test_buckets_hold_all_weights_in_order_and_no_more_than_their_limit(limit: int) -> None:
    found = {}
    for bucket in buckets(WEIGHTS.items(), CPU, limit):
        assert bucket.size <= limit or len(bucket.names) == 1
        found |= {name: tensor.clone() for name, tensor in unpacked(bucket)}
    assert list(found) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_tensor_is_the_senders_again_when_the_next_one_is_asked_for() -> None:
    lent = torch.ones(4)

    def passing_through_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield str(number), lent.fill_(number)
            lent.fill_(torch.nan)

    (bucket,) = buckets(passing_through_one_buffer(), CPU, 1 << 20)
    assert [tensor.tolist() for _, tensor in unpacked(bucket)] == [[number] * 4 for number in range(3)]


def test_no_weights_are_no_bucket() -> None:
    assert list(buckets([], CPU, 1 << 20)) == []


@pytest.mark.slow
def test_a_bucket_on_the_host_is_mapped_by_another_process_as_it_is() -> None:
    for bucket in buckets(WEIGHTS.items(), CPU, 64):
        reading = "import sys; sys.stdout.buffer.write(shared_tensor([sys.argv[1]], int(sys.argv[2])).numpy())"
        asked = [sys.executable, "-c", f"from engines.buckets import shared_tensor; {reading}", *bucket.handle()]
        read = subprocess.run([*asked, str(bucket.size)], capture_output=True, check=True).stdout
        assert read == bucket.buffer[: bucket.size].numpy().tobytes()


def test_what_is_mapped_is_read_only_and_its_memory_goes_with_the_bucket() -> None:
    (bucket,) = buckets(WEIGHTS.items(), CPU, 1 << 20)
    handle, before = bucket.handle(), bucket.buffer[: bucket.size].clone()
    shared_tensor(handle, bucket.size).zero_()
    assert torch.equal(bucket.buffer[: bucket.size], before)
    del bucket
    with pytest.raises(FileNotFoundError):
        shared_tensor(handle, len(before))


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


async def test_one_that_may_forget_them_sleeps_on_level_two_and_needs_new_ones(engine: VLLMRollout) -> None:
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
