"""What the engines reach on one GPU, in under three minutes: `python -m tests.gpu.bench_gpu`, without Ray or MLflow.

- rollout: response tokens/s of TorchRollout, twice as many samples as slots, all of one length, against transformers
  `generate` in static batches of the same size (tests/benchmarks has lengths with a long tail);
- training: tokens/s (prompt and response) of one FSDP rank over NCCL: forward, backward and step;
- weights: GB/s from the trainer's parameters through shared memory into a rollout engine on the same GPU.

Each figure is the median of a few rounds after one that is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.distributed import HashStore, destroy_process_group
from torch.distributed.device_mesh import DeviceMesh

from engines.torch.fsdp import FSDPEngine, init_world
from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.config import AlgorithmConfig, ModelConfig
from harness.protocols import Request, Sampling, TrainBatch
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Ragged
from harness.weight_sync.ipc import share_slots
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import open_rendezvous

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
QWEN = ModelConfig("qwen0.5b", 896, 24, 14, 2, 64, 4864, 151936, True, 512, dtype="bfloat16")
ALGORITHM = AlgorithmConfig("bench", 8, 8, 8, learning_rate=1e-5)
SLOTS = (64, 256)
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 64
TRAIN_ROWS, TRAIN_RESPONSE_TOKENS = 32, 96
BUCKET_BYTES = 64 << 20
ROUNDS = 3


def per_second(work: Callable[[], int]) -> float:
    """Units a second: `work` returns how many it did."""
    rates = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        done = work()
        torch.cuda.synchronize()
        rates.append(done / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def random_tokens(config: ModelConfig, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, config.vocabulary, (rows, length))


def rollout_rate(config: ModelConfig, slots: int, device: torch.device) -> float:
    engine = TorchRollout(
        build_model(config),
        sampling=Sampling(RESPONSE_TOKENS),
        slots=slots,
        seed=0,
        clock=RealClock.starting_now(),
        device=device,
    )
    asked = random_tokens(config, 2 * slots, PROMPT_TOKENS)

    async def generate() -> int:
        engine.submit([Request(i, prompt) for i, prompt in enumerate(asked)])
        tokens = 0
        while engine.running or engine.waiting:
            tokens += sum(len(completion.tokens) for completion in await engine.finished())
        return tokens

    return per_second(lambda: asyncio.run(generate()))


def transformers_rate(config: ModelConfig, slots: int, device: torch.device) -> float:
    model = build_model(config, device=device)
    batches = torch.from_numpy(random_tokens(config, 2 * slots, PROMPT_TOKENS)).to(device).split(slots)

    def generate() -> int:
        tokens = 0
        for batch in batches:
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                top_k=0,
                min_new_tokens=RESPONSE_TOKENS,
                max_new_tokens=RESPONSE_TOKENS,
                pad_token_id=0,
            )
            tokens += out[:, PROMPT_TOKENS:].numel()
        return tokens

    return per_second(generate)


def train_rate(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> float:
    engine = FSDPEngine(build_model(config), ALGORITHM, mesh=mesh, device=device)
    lengths = np.full(TRAIN_ROWS, TRAIN_RESPONSE_TOKENS)
    total = int(lengths.sum())
    batch = TrainBatch(
        prompts=Ragged.from_rows(list(random_tokens(config, TRAIN_ROWS, PROMPT_TOKENS))),
        responses=Ragged(random_tokens(config, 1, total)[0], lengths),
        behaviour_log_probs=Ragged(np.full(total, -np.log(config.vocabulary), np.float32), lengths),
        versions=Ragged(np.zeros(total, np.int32), lengths),
        advantages=np.random.default_rng(0).standard_normal(TRAIN_ROWS).astype(np.float32),
    )

    async def step() -> int:
        await engine.accumulate(batch)
        await engine.step()
        return total + TRAIN_ROWS * PROMPT_TOKENS

    return per_second(lambda: asyncio.run(step()))


def transfer_rate(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> float:
    """GB/s, each byte counted once although it is copied twice (to the host and from it)."""
    trainer = FSDPEngine(build_model(config), ALGORITHM, mesh=mesh, device=device)
    engine = TorchRollout(
        build_model(config), sampling=Sampling(1), slots=1, seed=0, clock=RealClock.starting_now(), device=device
    )
    rendezvous, store = open_rendezvous("127.0.0.1", receivers=1, timeout_s=120)
    offer = share_slots(plan_transfer(trainer.named_parameters().items(), BUCKET_BYTES), rendezvous)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, device)
        sender, receiver = offer.sender(store, device), joining.result()
        offer.withdraw()

        def transfer() -> int:
            version = engine.version + 1
            loading = pool.submit(lambda: asyncio.run(engine.load_weights(version, receiver.receive(version))))
            asyncio.run(sender.send(version, trainer.named_parameters()))
            loading.result()
            return offer.plan.bytes

        return per_second(transfer) / 1e9


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and there is none")
    device = torch.device("cuda")
    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    mesh = init_world(HashStore(), 0, 1, device, timeout_s=120)
    for config in (TINY, QWEN):
        for slots in SLOTS:
            ours, theirs = (rate(config, slots, device) for rate in (rollout_rate, transformers_rate))
            print(
                f"{config.name}, rollout, {slots} slots: engine {ours:,.0f} tokens/s, "
                f"transformers {theirs:,.0f} tokens/s, ratio {ours / theirs:.2f}",
                flush=True,
            )
        print(f"{config.name}, training: {train_rate(config, mesh, device):,.0f} tokens/s", flush=True)
        print(f"{config.name}, weights: {transfer_rate(config, mesh, device):.2f} GB/s", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main()
