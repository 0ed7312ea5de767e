"""What only a GPU shows: those parts of the gate (docs/gpu.md) that need one GPU, and what no part looks at.
Skipped where there is none; needs torch and transformers, and neither Ray nor MLflow."""

import asyncio
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, destroy_process_group
from torch.distributed.device_mesh import DeviceMesh

from engines.torch.fsdp import FSDPEngine, init_world
from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.acceptance.gpu_gate.part import GateSetting
from harness.config import AlgorithmConfig, ModelConfig
from harness.protocols import Completion, Request, Sampling
from harness.runtime.runtime import RealClock
from harness.weight_sync.host_staged import HostStagedOffer
from harness.weight_sync.plan import TransferPlan, plan_transfer
from harness.weight_sync.process_group import open_rendezvous

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
QWEN = ModelConfig("qwen0.5b", 896, 24, 14, 2, 64, 4864, 151936, True, 1024, dtype="bfloat16")
ALGORITHM = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, kl_coef=0.1)


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """TF32 would round the inputs of float32 products to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(0)
    yield init_world(HashStore(), 0, 1, GPU, timeout_s=120)
    destroy_process_group()


def rollout(
    config: ModelConfig, *, slots: int, max_tokens: int, temperature: float = 1.0, seed: int = 0
) -> TorchRollout:
    return TorchRollout(
        build_model(config, seed=seed),
        sampling=Sampling(max_tokens, temperature=temperature, stop_tokens=(0,)),
        slots=slots,
        seed=0,
        clock=RealClock.starting_now(),
        device=GPU,
    )


def prompts(config: ModelConfig, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, config.vocabulary, rng.integers(2, 30)) for _ in range(count)]


def generate(engine: TorchRollout, asked: list[np.ndarray]) -> list[Completion]:
    async def run() -> list[Completion]:
        engine.submit([Request(i, prompt) for i, prompt in enumerate(asked)])
        done: list[Completion] = []
        while len(done) < len(asked):
            done += await engine.finished()
        return sorted(done, key=lambda completion: completion.sample_id)

    return asyncio.run(run())


@pytest.mark.parametrize("part", ["kernels", "training", "rollout", "weights", "profile"])
def test_the_gate_holds(part: str, tmp_path: Path) -> None:
    run = importlib.import_module(f"harness.acceptance.gpu_gate.parts.{part}").run
    assert [str(check) for check in run(GateSetting("cuda", tmp_path)) if not check.passed] == []


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_agree_with_a_transformers_forward(temperature: float) -> None:
    asked = prompts(TINY, 40)
    done = generate(rollout(TINY, slots=16, max_tokens=60, temperature=temperature), asked)
    model = build_model(TINY, device=GPU)
    for prompt, completion in zip(asked, done, strict=True):
        sequence = torch.from_numpy(np.concatenate([prompt, completion.tokens])).to(GPU)
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(-1, sequence[len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(completion.log_probs, expected.cpu().numpy(), rtol=1e-4, atol=1e-4)


def test_sleep_gives_memory_back_and_wake_goes_on() -> None:
    engine = rollout(QWEN, slots=16, max_tokens=4)
    first = generate(engine, prompts(QWEN, 4))
    awake = torch.cuda.memory_allocated()
    asyncio.run(engine.sleep())
    assert torch.cuda.memory_allocated() < awake - 2 * 490_000_000  # the weights alone, two bytes each
    asyncio.run(engine.load_weights(1, build_model(QWEN).named_parameters()))
    assert all(parameter.is_pinned() for parameter in engine._model.parameters())
    asyncio.run(engine.wake())
    for ours, theirs in zip(generate(engine, prompts(QWEN, 4)), first, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()


# --- weights ---------------------------------------------------------------------------------------------------------


def plan_of(engine: FSDPEngine) -> TransferPlan:
    return plan_transfer(engine.named_parameters().items(), bucket_bytes=16 << 10)


def test_weights_travel_from_gpu_to_gpu_through_pinned_host_memory_in_the_background(mesh: DeviceMesh) -> None:
    trainer = FSDPEngine(build_model(TINY, seed=7), ALGORITHM, mesh=mesh, device=GPU)
    rendezvous, store = open_rendezvous("127.0.0.1", receivers=1, timeout_s=60)
    offer = HostStagedOffer(plan_of(trainer), rendezvous)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, GPU)
        sender, receiver = offer.sender(store, GPU), joining.result()
    engine, same = (rollout(TINY, slots=8, max_tokens=20, seed=seed) for seed in (0, 7))

    async def travel() -> None:
        await sender.send(1, trainer.named_parameters())
        await receiver.stage(1)
        await sender.wait_arrived(1)
        assert all(buffer.is_pinned() for buffer in receiver._staged[1])
        await engine.load_weights(1, receiver.staged(1))

    asyncio.run(travel())
    for ours, theirs in zip(*(generate(e, prompts(TINY, 12)) for e in (engine, same)), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
