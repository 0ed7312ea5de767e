"""Exact match of the weights that a run ended with, on problems that no run trains on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.config import JobConfig
from harness.protocols import Request, Sampling
from harness.runtime.runtime import RealClock
from harness.tasks import make_task, max_tokens, sample_of, score_of

SEED = 1_000_003  # of the draws


async def held_out_exact_match(config: JobConfig, model: Path, problems: int = 1024) -> float:
    """Share of right answers, one sampled at temperature 1 for each problem. model: the run's folder of it."""
    task = make_task(config)
    sampling = Sampling(max_tokens(config, task), stop_tokens=task.stop_tokens)
    policy, clock = build_model(replace(config.model, checkpoint=str(model))), RealClock.starting_now()
    engine = TorchRollout(policy, sampling=sampling, slots=128, seed=SEED, clock=clock)
    asked = [task.held_out(index) for index in range(problems)]
    engine.submit([Request(number, problem.prompt) for number, problem in enumerate(asked)])
    right, answered = 0, 0
    while answered < problems:
        for completion in await engine.finished():
            answered += 1
            problem = asked[completion.sample_id]
            score = await score_of(task, sample_of(task, problem.prompt, completion.tokens, problem.answer))
            right += score.exact_match
    await engine.close()
    return right / problems
