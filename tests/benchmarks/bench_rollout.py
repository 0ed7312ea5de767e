"""The embedded rollout engine against transformers `generate`, on the tiny model: tokens per second and their ratio.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_rollout [--device cuda] [--rounds 5]

equal lengths: one static batch of 128 prompts, 64 new tokens each, no stop token.
long tail: one token of 32 stops, so lengths are geometric (mean 31) with a cap of 96; 512 samples over 128 slots.
`generate` takes them in static batches of 128 and runs each until its longest is done; the engine refills its slots.

Both sample at temperature 1 and count response tokens only. The engine also returns log-probabilities; `generate` does
not. Rounds alternate between the two, after one round to warm up; the medians are printed.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.config import ModelConfig
from harness.protocols import Request, Sampling
from harness.runtime.runtime import RealClock

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
PROMPT_TOKENS = 8
Generator = Callable[[Qwen3ForCausalLM, "Workload", str, int], int]
SLOTS = 128


@dataclass(frozen=True)
class Workload:
    """What is generated; `target` is the ratio that the engine has to reach."""

    name: str
    samples: int
    sampling: Sampling
    target: float

    def prompts(self) -> np.ndarray:
        """int64 [samples, PROMPT_TOKENS]; token 0, which stops, is left out."""
        return np.random.default_rng(0).integers(1, TINY.vocabulary, (self.samples, PROMPT_TOKENS))


WORKLOADS = (
    Workload("equal lengths", 128, Sampling(max_tokens=64), target=0.7),
    Workload("long tail", 512, Sampling(max_tokens=96, stop_tokens=(0,)), target=1.0),
)


def by_engine(model: Qwen3ForCausalLM, workload: Workload, device: str, seed: int) -> int:
    """Response tokens generated."""

    async def generate() -> int:
        engine = TorchRollout(
            model, sampling=workload.sampling, slots=SLOTS, seed=seed, clock=RealClock.starting_now(), device=device
        )
        engine.submit([Request(i, prompt) for i, prompt in enumerate(workload.prompts())])
        done = tokens = 0
        while done < workload.samples:
            completions = await engine.finished()
            done += len(completions)
            tokens += sum(len(completion.tokens) for completion in completions)
        return tokens

    return asyncio.run(generate())


def by_transformers(model: Qwen3ForCausalLM, workload: Workload, device: str, seed: int) -> int:
    """Response tokens generated, padding after a stop token not counted."""
    torch.manual_seed(seed)
    sampling, tokens = workload.sampling, 0
    for prompts in torch.tensor(workload.prompts(), device=device).split(SLOTS):
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=None if sampling.stop_tokens else sampling.max_tokens,
            eos_token_id=list(sampling.stop_tokens) or None,
            pad_token_id=0,
        )[:, PROMPT_TOKENS:]
        ended = torch.isin(out, torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device))
        tokens += int((ended.cumsum(-1) - ended.long() == 0).sum())
    return tokens


def tokens_per_second(run: Generator, model: Qwen3ForCausalLM, workload: Workload, device: str, seed: int) -> float:
    start = time.perf_counter()
    tokens = run(model, workload, device, seed)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(TINY, device=arguments.device)
    for workload in WORKLOADS:
        rates: dict[str, list[float]] = {"engine": [], "transformers": []}
        for seed in range(arguments.rounds + 1):
            for name, run in (("engine", by_engine), ("transformers", by_transformers)):
                rates[name].append(tokens_per_second(run, model, workload, arguments.device, seed))
        ours, theirs = (statistics.median(rate[1:]) for rate in rates.values())
        print(
            f"{workload.name}: engine {ours:,.0f} tokens/s, transformers {theirs:,.0f} tokens/s, "
            f"ratio {ours / theirs:.2f} (target {workload.target})"
        )


if __name__ == "__main__":
    main()
