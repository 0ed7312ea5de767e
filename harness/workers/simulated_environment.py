"""An environment that only takes time: how often a sample speaks, how much it reads between, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.config import CostConfig, LatencyConfig, LengthsConfig
from harness.cost_model.lengths import drawn_latency, drawn_tokens
from harness.tasks import Problem, Step
from harness.tasks.task import draws


@dataclass
class SimulatedEpisode:
    """One sample: the turns that it will have, those that it had, and the draws of what comes between them."""

    turns: int
    random: np.random.Generator
    had: int = 0


@dataclass(frozen=True)
class SimulatedEnvironment:
    """`harness.tasks.Environment`, of `cost.turns`, `cost.observation_tokens` and `cost.tool_latency`. An observation
    is its number of tokens, as simulated text is (`harness.tasks.task.SimulatedTask`)."""

    turns: LengthsConfig
    observation_tokens: LengthsConfig
    latency: LatencyConfig

    @property
    def max_turns(self) -> int:
        return self.turns.cap

    @property
    def step_timeout_s(self) -> float:
        return self.latency.timeout_s

    async def reset(self, problem: Problem, seed: int) -> SimulatedEpisode:
        random = draws(seed, 0)
        return SimulatedEpisode(drawn_tokens(self.turns, random), random)

    async def step(self, state: SimulatedEpisode, action: str) -> Step:
        """The last turn is the answer, and no tool is called."""
        state.had += 1
        if state.had == state.turns:
            return Step("", done=True)
        tokens = drawn_tokens(self.observation_tokens, state.random)
        return Step(f"<{tokens} tokens>", done=False, latency_s=drawn_latency(self.latency, state.random))

    async def close(self, state: SimulatedEpisode) -> None:
        """Do nothing: it holds nothing."""


def simulated_environment(cost: CostConfig) -> SimulatedEnvironment | None:
    """The environment that the costs describe; None where samples have one turn."""
    if cost.turns is None:
        return None
    return SimulatedEnvironment(cost.turns, cost.observation_tokens, cost.tool_latency)
