"""What only a GPU shows. Skipped where there is none; needs torch and transformers, and neither Ray nor MLflow."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, destroy_process_group
from torch.distributed.device_mesh import DeviceMesh

from engines.torch.fsdp import FSDPEngine, init_world
from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from engines.torch.scoring import TorchLogProb
from harness.config import AlgorithmConfig, ModelConfig
from harness.config.registries import CORRECTIONS
from harness.protocols import Completion, Request, Sampling, TrainBatch
from harness.rl.kl import k3
from harness.rl.log_probs import token_log_probs
from harness.rl.losses import policy_loss
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Ragged
from harness.weight_sync.collective import CollectiveOffer, CollectiveReceiver, CollectiveSender
from harness.weight_sync.host_staged import HostStagedOffer
from harness.weight_sync.ipc import share_slots
from harness.weight_sync.plan import TransferPlan, plan_transfer
from harness.weight_sync.process_group import open_rendezvous

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

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


def train_batch(config: ModelConfig, count: int) -> TrainBatch:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 25, count)
    total = int(lengths.sum())

    def ragged(values: np.ndarray) -> Ragged:
        return Ragged(values, lengths)

    typical = -np.log(config.vocabulary)
    return TrainBatch(
        prompts=Ragged.from_rows(prompts(config, count)),
        responses=ragged(rng.integers(1, config.vocabulary, total)),
        behaviour_log_probs=ragged((typical + 0.1 * rng.standard_normal(total)).astype(np.float32)),
        versions=ragged(np.zeros(total, np.int32)),
        advantages=rng.standard_normal(count).astype(np.float32),
        ref_log_probs=ragged((typical + 0.1 * rng.standard_normal(total)).astype(np.float32)),
    )


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


def test_the_log_prob_engine_agrees_with_the_rollout_engine() -> None:
    asked = prompts(TINY, 40)
    done = generate(rollout(TINY, slots=16, max_tokens=60), asked)
    scorer = TorchLogProb(build_model(TINY), temperature=1.0, device=GPU)
    ours = asyncio.run(scorer.log_probs(Ragged.from_rows(asked), Ragged.from_rows([c.tokens for c in done])))
    np.testing.assert_allclose(ours.values, np.concatenate([c.log_probs for c in done]), rtol=1e-4, atol=1e-4)


def test_a_qwen_shape_samples_in_bfloat16() -> None:
    done = generate(rollout(QWEN, slots=16, max_tokens=8), prompts(QWEN, 24))
    assert [completion.sample_id for completion in done] == list(range(24))
    assert all(np.isfinite(completion.log_probs).all() and (completion.log_probs <= 0).all() for completion in done)


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


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_losses_and_their_gradients_are_those_of_the_cpu(correction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 20, 32, generator=generator)
    tokens = torch.randint(32, (6, 20), generator=generator)
    behaviour = -3.4 + 0.3 * torch.randn(6, 20, generator=generator)
    advantages = torch.randn(6, 1, generator=generator).expand(6, 20)
    mask = torch.rand(6, 20, generator=generator) < 0.7
    loss = policy_loss(replace(ALGORITHM, correction=correction))
    results = []
    for device in (CPU, GPU):
        there = logits.to(device).requires_grad_()
        log_probs = token_log_probs(there, tokens.to(device)).flatten()
        on = [tensor.to(device).flatten() for tensor in (behaviour, advantages, mask)]
        losses = loss(log_probs, *on, lengths=torch.full((6,), 20, device=device)) + 0.1 * k3(log_probs, on[0], on[2])
        losses.sum().backward()
        assert there.grad is not None
        results.append((losses.detach().cpu(), there.grad.cpu()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_step_over_nccl_is_that_of_plain_adamw(mesh: DeviceMesh) -> None:
    batch = train_batch(TINY, 16)
    engine = FSDPEngine(build_model(TINY), replace(ALGORITHM, kl_coef=0.0, correction="none"), mesh=mesh, device=GPU)
    asyncio.run(engine.accumulate(batch))
    norm = asyncio.run(engine.step())["grad_norm"]
    model = build_model(TINY, device=GPU).train()
    loss = torch.zeros((), device=GPU)
    rows = zip(batch.prompts.rows(), batch.responses.rows(), batch.advantages.tolist(), strict=True)
    for prompt, response, advantage in rows:
        sequence = torch.from_numpy(np.concatenate([prompt, response])).to(GPU)
        logits = model(sequence[None]).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, sequence[len(prompt) :, None])
        loss = loss - advantage * log_probs.sum()
    (loss / len(batch.responses.values)).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), ALGORITHM.grad_clip))
    assert norm == pytest.approx(expected, rel=1e-4)


def test_a_qwen_shape_trains_in_bfloat16_and_its_loss_falls(mesh: DeviceMesh) -> None:
    batch = train_batch(QWEN, 8)
    batch = replace(batch, advantages=np.ones(8, np.float32), ref_log_probs=None)
    algorithm = replace(ALGORITHM, correction="none", learning_rate=1e-4, kl_coef=0.0)
    engine = FSDPEngine(build_model(QWEN), algorithm, mesh=mesh, device=GPU)
    ratios = []
    for _ in range(4):
        ratios.append(asyncio.run(engine.accumulate(batch))["ratio_max"])
        assert np.isfinite(asyncio.run(engine.step())["grad_norm"])
    assert ratios[-1] > ratios[0], "the tokens that were praised did not become likelier"
    assert {parameter.dtype for parameter in engine.masters.values()} == {torch.float32}
    assert {parameter.dtype for parameter in engine.named_parameters().values()} == {torch.bfloat16}


# --- weights ---------------------------------------------------------------------------------------------------------


def plan_of(engine: FSDPEngine) -> TransferPlan:
    return plan_transfer(engine.named_parameters().items(), bucket_bytes=16 << 10)


def test_weights_go_from_a_gpu_through_shared_memory_to_a_gpu(mesh: DeviceMesh) -> None:
    trainer = FSDPEngine(build_model(TINY, seed=7), ALGORITHM, mesh=mesh, device=GPU)
    rendezvous, store = open_rendezvous("127.0.0.1", receivers=1, timeout_s=60)
    offer = share_slots(plan_of(trainer), rendezvous)
    engine, same = (rollout(TINY, slots=8, max_tokens=20, seed=seed) for seed in (0, 7))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, GPU)
        sender, receiver = offer.sender(store, GPU), joining.result()
        offer.withdraw()
        loading = pool.submit(lambda: asyncio.run(engine.load_weights(1, receiver.receive(1))))
        asyncio.run(sender.send(1, trainer.named_parameters()))
        loading.result()
    for ours, theirs in zip(*(generate(e, prompts(TINY, 12)) for e in (engine, same)), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert set(ours.versions.tolist()) == {1}


def test_weights_of_a_gpu_travel_over_gloo_through_the_host(mesh: DeviceMesh) -> None:
    """Two ranks cannot share one GPU in NCCL, so this broadcast is staged in host memory."""
    trainer = FSDPEngine(build_model(TINY, seed=7), ALGORITHM, mesh=mesh, device=GPU)
    rendezvous, store = open_rendezvous("127.0.0.1", receivers=1, timeout_s=60)
    offer = CollectiveOffer(plan_of(trainer), rendezvous)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, CPU)
        sender: CollectiveSender = offer.sender(store, CPU)
        receiver: CollectiveReceiver = joining.result()
        arriving = pool.submit(lambda: {name: t.to(GPU, copy=True) for name, t in receiver.receive(1)})
        asyncio.run(sender.send(1, trainer.named_parameters()))
        arrived = arriving.result()
    for name, parameter in build_model(TINY, seed=7, device=GPU).named_parameters():
        assert torch.equal(arrived[name], parameter)


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
