"""GRPO on one device as a plain loop: one process, one thread, no queue, no Ray, no FSDP, no weight copies.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bare_loop [setting=value ...]

It takes the settings of `python -m harness bench` and does the work of a `colocate_sync` run on one device, with the
harness's own engine, task, forwards, losses and diagnostics, on one model that all phases share. So it is what a
schedule could reach if the harness cost nothing. Prints one JSON object: seconds of each phase of each iteration, mean
rewards, and the final weights' SHA-256.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engines.torch.fsdp import FSDPEngine
from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from engines.torch.scoring import TorchLogProb
from harness.config import JobConfig
from harness.config.compose import compose_job
from harness.driver.model_folders import initial_model
from harness.protocols import Completion, Request, Sampling, TrainBatch
from harness.rl.advantages import advantages_of
from harness.runtime.runtime import RealClock
from harness.tasks import Task, make_task, max_tokens, sample_of, score_of
from harness.tasks.task import Problem
from harness.transfer_queue import Ragged

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))  # where the warm start is kept


class BareLoop:
    """`seconds[phase]` has a value per iteration; so has `rewards`."""

    def __init__(self, config: JobConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.task: Task = make_task(config)
        shape, algorithm = initial_model(config.model, self.task, RESULTS), config.algorithm
        self.model, cpu = build_model(shape), torch.device("cpu")
        self.trainer = FSDPEngine(self.model, algorithm, mesh=None, device=cpu)
        self.reference = TorchLogProb(build_model(shape), temperature=algorithm.temperature, device=cpu)
        self.old = TorchLogProb(self.model, temperature=algorithm.temperature, device=cpu)
        self.rollout = TorchRollout(
            self.model,
            sampling=Sampling(
                max_tokens(config, self.task), algorithm.temperature, algorithm.top_p, self.task.stop_tokens
            ),
            slots=config.engine.slots,
            seed=seed,
            clock=RealClock.starting_now(),
        )
        self.seconds: dict[str, list[float]] = {}
        self.rewards: list[float] = []

    async def run(self) -> None:
        for iteration in range(self.config.iterations):
            with self.timed("iteration"):
                await self.iterate(iteration)

    async def iterate(self, iteration: int) -> None:
        algorithm = self.config.algorithm
        with self.timed("prompts"):
            first = iteration * algorithm.batch_groups
            groups = range(first, first + algorithm.batch_groups)
            problems = [
                p for p in (self.task.problem(g, self.seed) for g in groups) for _ in range(algorithm.group_size)
            ]
        with self.timed("generate"):
            completions = await self.generate(first * algorithm.group_size, problems)
        with self.timed("reward"):
            advantages = await self.advantages(problems, completions)
        size = algorithm.micro_batch_groups * algorithm.group_size
        batches = [
            micro_batch(problems[at : at + size], completions[at : at + size], advantages[at : at + size], iteration)
            for at in range(0, len(problems), size)
        ]
        with self.timed("reference"):
            reference = [
                await self.reference.log_probs(b.prompts, b.responses) for b in batches if algorithm.has_reference
            ]
        with self.timed("old_log_prob"):
            old = [await self.old.log_probs(b.prompts, b.responses) for b in batches if algorithm.recompute_log_probs]
        with self.timed("update_actor"):
            for i, batch in enumerate(batches):
                await self.trainer.accumulate(with_scores(batch, reference[i : i + 1], old[i : i + 1], iteration))
            await self.trainer.step()

    async def generate(self, first: int, problems: list[Problem]) -> list[Completion]:
        self.rollout.submit([Request(first + i, problem.prompt) for i, problem in enumerate(problems)])
        completions: list[Completion] = []
        while len(completions) < len(problems):
            completions += await self.rollout.finished()
        return sorted(completions, key=lambda completion: completion.sample_id)

    async def advantages(self, problems: list[Problem], completions: list[Completion]) -> np.ndarray:
        """float32 [samples]; notes the mean reward."""
        said = [sample_of(self.task, p.prompt, c.tokens, p.answer) for c, p in zip(completions, problems, strict=True)]
        scored = [(await score_of(self.task, sample)).reward for sample in said]
        self.rewards.append(float(np.mean(scored)))
        grouped = torch.tensor(scored, dtype=torch.float64).view(-1, self.config.algorithm.group_size)
        return advantages_of(self.config.algorithm)(grouped, None).flatten().numpy()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(phase, []).append(time.perf_counter() - start)

    def weights_digest(self) -> str:
        """SHA-256 over all weights by name."""
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def micro_batch(
    problems: list[Problem], completions: list[Completion], advantages: np.ndarray, iteration: int
) -> TrainBatch:
    responses = Ragged.from_rows([completion.tokens for completion in completions])
    return TrainBatch(
        prompts=Ragged.from_rows([problem.prompt for problem in problems]),
        responses=responses,
        behaviour_log_probs=Ragged.from_rows([completion.log_probs for completion in completions]),
        versions=Ragged(np.full(responses.values.shape, iteration, np.int32), responses.lengths),
        advantages=advantages,
    )


def with_scores(batch: TrainBatch, reference: list[Ragged], old: list[Ragged], iteration: int) -> TrainBatch:
    """The batch with the log-probs there are (lists of none or one)."""
    versions = np.full(len(batch.advantages), iteration, np.int32) if old else None
    return replace(
        batch,
        ref_log_probs=reference[0] if reference else None,
        old_log_probs=old[0] if old else None,
        old_versions=versions,
    )


def main() -> None:
    config = compose_job(sys.argv[1:])
    torch.set_num_threads(config.cluster.threads_per_device)
    loop = BareLoop(config, config.seed_list[0])
    asyncio.run(loop.run())
    print(json.dumps({"seconds": loop.seconds, "rewards": loop.rewards, "weights": loop.weights_digest()}))


if __name__ == "__main__":
    main()
