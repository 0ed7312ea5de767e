"""Samples of several turns: what an environment answers goes behind what the policy said, and the sample goes on."""

import asyncio
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.config import CostConfig, LatencyConfig, LengthsConfig
from harness.cost_model.lengths import drawn_latency, drawn_tokens
from harness.protocols import Clock, Completion, FinishReason, Request
from harness.tasks import Environment, Problem, Step, Task, number_of, observation_tokens
from harness.tasks.task import draws
from harness.workers.reward_scorers import one_line


@dataclass(slots=True)
class _Episode:
    """One sample. tokens: of its response that have been looked at; mask: which of them the policy sampled."""

    problem: Problem
    state: Any = None
    begun: bool = False
    turns: int = 0
    reward: float = math.nan
    cut: bool = False
    waiting: asyncio.Timeout | None = None  # for its environment to answer
    mask: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))


class Episodes:
    """The samples that one engine generates, between their turns.

    max_tokens: of a response, what the environment writes included; None is no limit. seed: of the run.
    """

    def __init__(
        self, environment: Environment, task: Task, clock: Clock, *, seed: int, max_tokens: int | None
    ) -> None:
        self._environment, self._task, self._clock = environment, task, clock
        self._seed, self._max_tokens = seed, max_tokens
        self._episodes: dict[int, _Episode] = {}
        self.answers = 0
        """Answers that the environment gave so far."""

    def begin(self, sample_id: int, problem: Problem) -> None:
        """The engine gets the sample. One that was begun before begins again."""
        self._episodes[sample_id] = _Episode(problem)

    async def begin_again(self, sample_id: int) -> None:
        """A sample that was begun, and has not ended, begins again; whatever its environment did is given up."""
        await self._close(sample_id)
        self.begin(sample_id, self._episodes[sample_id].problem)

    async def give_up(self, sample_id: int) -> None:
        """Forget a sample that was begun, and has not ended; whatever its environment did is given up."""
        await self._close(sample_id)
        del self._episodes[sample_id]

    def cut(self, samples: Iterable[int]) -> None:
        """End those of the samples that have not ended: what their environments would have answered is not waited for,
        and they have no other turn."""
        for episode in (self._episodes[sample] for sample in samples if sample in self._episodes):
            episode.cut = True
            if episode.waiting is not None:
                episode.waiting.reschedule(asyncio.get_running_loop().time())

    async def follow(self, turn: Completion) -> Request | Completion:
        """The sample after a turn: as it goes on, or as it ended. turn: all that the sample has said."""
        episode = self._episodes[turn.sample_id]
        said = len(turn.tokens) - len(episode.mask)
        episode.mask = np.concatenate([episode.mask, np.ones(said, np.bool_)])
        episode.turns += 1
        if turn.finish_reason != "stop":
            return await self._end(episode, turn, turn.finish_reason)
        try:
            async with asyncio.timeout(self._environment.step_timeout_s) as episode.waiting:
                observed = None if episode.cut else await self._observe(episode, turn, said)
        except Exception as error:  # of whatever the environment is made of: the sample has failed, not the run
            if episode.cut:
                return await self._end(episode, turn, "cut")
            return await self._end(episode, turn, "failed", self._why(episode, error))
        finally:
            episode.waiting = None
        if episode.cut:
            return await self._end(episode, turn, "cut")
        if observed is None:
            return await self._end(episode, turn, "stop")
        if episode.turns == self._environment.max_turns:
            return await self._end(episode, turn, "turns")
        if self._max_tokens is not None and len(turn.tokens) + len(observed) >= self._max_tokens:
            return await self._end(episode, turn, "length")
        return Request(turn.sample_id, episode.problem.prompt, partial=self._longer(episode, turn, observed))

    async def _observe(self, episode: _Episode, turn: Completion, said: int) -> np.ndarray | None:
        """The environment's answer, int64 [n]; None where the sample is done."""
        if not episode.begun:
            seed = int(np.random.SeedSequence([self._seed, turn.sample_id]).generate_state(1, np.uint64)[0])
            episode.state = await self._environment.reset(episode.problem, seed)
            episode.begun = True
        action = self._task.decode(turn.tokens[len(turn.tokens) - said : -1])
        step = await self._environment.step(episode.state, action)
        await self._clock.sleep(step.latency_s)
        self.answers += 1
        if step.reward is not None:
            reward = number_of(step.reward, "the reward of a step")
            episode.reward = reward + (0.0 if math.isnan(episode.reward) else episode.reward)
        return None if step.done else observation_tokens(self._task, step.observation)

    def _longer(self, episode: _Episode, turn: Completion, observed: np.ndarray) -> Completion:
        """The turn, with what was observed behind it."""
        episode.mask = np.concatenate([episode.mask, np.zeros(len(observed), np.bool_)])
        return replace(
            turn,
            tokens=np.concatenate([turn.tokens, observed]),
            log_probs=np.concatenate([turn.log_probs, np.zeros(len(observed), np.float32)]),
            versions=np.concatenate([turn.versions, np.repeat(turn.versions[-1], len(observed))]),
            mask=episode.mask,
        )

    def _why(self, episode: _Episode, error: Exception) -> str:
        late = isinstance(error, TimeoutError) and episode.waiting is not None and episode.waiting.expired()
        why = f"no answer after {self._environment.step_timeout_s:g} s" if late else one_line(error)
        return f"its environment failed in turn {episode.turns}: {why}"

    async def _end(self, episode: _Episode, turn: Completion, reason: FinishReason, failure: str = "") -> Completion:
        await self._close(turn.sample_id)
        del self._episodes[turn.sample_id]
        return replace(
            turn,
            finish_reason=reason,
            mask=episode.mask,
            turns=episode.turns,
            environment_reward=episode.reward,
            failure=failure,
        )

    async def _close(self, sample_id: int) -> None:
        """End what a sample's environment holds, where it was begun."""
        episode = self._episodes[sample_id]
        if episode.begun:
            try:
                async with asyncio.timeout(self._environment.step_timeout_s):
                    await self._environment.close(episode.state)
            except Exception as error:  # the sample is what it is
                print(f"sample {sample_id}: its environment was not closed: {error!r}", file=sys.stderr)


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
