"""Problems that `reasoning-gym` makes up and judges: over a hundred kinds, by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np

from harness.config.readers import Read, Where
from harness.tasks.environment import Step
from harness.tasks.rewards.reading import normalised
from harness.tasks.task import HELD_OUT_SEED, Problem, Sample, Score, draws
from harness.tasks.tokenizer import TextTask

_ITEMS = 1 << 31
"""Items of a data set: the library makes each when it is asked for."""
ANSWER_TAG = "</answer>"
_SEVERAL_TURNS = Where("task.turns is above 1", lambda job, own: own.turns > 1, "task.turns=3")


@dataclass(frozen=True)
class ReasoningGym(TextTask):
    """Problems of one data set of the library. dataset: its name in `reasoning_gym`; settings: its own, such as
    `{min_terms: 2, max_terms: 3}`.

    The response's `<answer>...</answer>` is judged, or all of it where it has none. right: the score from which on a
    response counts as right. turns: with more than one, a response that is not right is answered by `feedback`, as the
    user's next message of a chat, and the last one counts; max_response_tokens is for all of them together. Raises
    ValueError where the package is missing, or it has no such data set or settings.
    """

    slow: ClassVar[bool] = True  # scoring may take its time
    dataset: Read[str]
    name: str = "reasoning_gym"
    settings: Read[dict[str, Any]] = field(default_factory=dict)
    system: Read[str | None] = None
    chat_options: Read[dict[str, Any]] = field(default_factory=dict)
    max_prompt_tokens: Read[int] = 1024
    max_response_tokens: Read[int] = 1024
    right: Read[float] = 0.99
    turns: Read[int] = 1
    feedback: Annotated[str, _SEVERAL_TURNS] = "That is not right. Try again."
    step_timeout_s: Annotated[float, _SEVERAL_TURNS] = 30.0

    def __post_init__(self) -> None:
        _dataset(self.dataset, json.dumps(self.settings, sort_keys=True))
        if self.system is not None and self.tokenizer.chat_template is None:
            raise ValueError(f"system is for chats: the tokenizer in {self.tokenizer.folder} has no chat template")
        if self.turns < 1 or self.step_timeout_s <= 0:
            given = f"turns={self.turns}, step_timeout_s={self.step_timeout_s}"
            raise ValueError(f"it needs turns of 1 or more, and step_timeout_s above 0, not {given}")
        if self.turns > 1:
            self.encode_observation(self.feedback)  # now rather than in every sample

    @property
    def environment(self) -> Tries | None:
        """Several tries at one question; None where there is one turn."""
        if self.turns == 1:
            return None
        return Tries(self.judge, self.right, self.turns, self.feedback, self.step_timeout_s)

    def encode_observation(self, observation: str) -> np.ndarray:
        """Tokens that are read after an answer, int64 [n]: in a chat the user's next message."""
        if self.tokenizer.chat_template is None:
            return self.encode(observation)
        return self.encode(self.tokenizer.next_message(observation, self.chat_options))

    def problem(self, group_id: int, seed: int) -> Problem:
        """Raises ValueError for a prompt that is too long, or that the tokenizer cannot say."""
        number = int(draws(seed, group_id).integers(_ITEMS))
        question = self._made[number]["question"]
        if self.tokenizer.chat_template is None:
            tokens = self.tokenizer.encode(question, special=True)
        else:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            messages = [*system, {"role": "user", "content": question}]
            tokens = self.encode(self.tokenizer.chat(messages, self.chat_options))
        if len(tokens) > self.max_prompt_tokens:
            raise ValueError(f"problem {number} of {self.dataset} has {len(tokens)} tokens; set task.max_prompt_tokens")
        return Problem(tokens, str(number), str(group_id))

    def held_out(self, index: int) -> Problem:
        return self.problem(index, HELD_OUT_SEED)

    def score(self, sample: Sample) -> Score:
        """Score a sample; of several turns, by what its environment said of the last one that came to its end, 0 where
        none did."""
        reward = self.judge(sample.response, sample.answer) if self.turns == 1 else sample.environment_reward or 0.0
        return Score(reward, reward >= self.right)

    def judge(self, response: str, answer: str) -> float:
        """The library's score. answer: of the problem."""
        said = normalised(response).split("<answer>")[-1].split(ANSWER_TAG)[0].strip()
        return float(self._made.score_answer(answer=said, entry=self._made[int(answer)]))

    def demonstration(self, problem: Problem) -> Any:
        answer = self._made[int(problem.answer)]["answer"]
        return super().demonstration(Problem(problem.prompt, answer))

    @cached_property
    def _made(self) -> Any:
        return _dataset(self.dataset, json.dumps(self.settings, sort_keys=True))


@lru_cache(maxsize=4)
def _dataset(name: str, settings: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("the package reasoning-gym is missing; install it: pip install 'cadence-rl[gym]'") from error
    known = sorted(reasoning_gym.factory.DATASETS)
    if name not in known:
        raise ValueError(f"dataset={name} is unknown; choose one of {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(name, seed=0, size=_ITEMS, **json.loads(settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"settings of {name}: {error or type(error).__name__}") from error


@dataclass
class Tried:
    """One sample: the answer of its problem, how often it tried, and the score of its last try."""

    answer: str
    tries: int = 0
    score: float = 0.0


@dataclass(frozen=True)
class Tries:
    """`harness.tasks.Environment`: a turn is an answer, which `judge(turn, answer of the problem)` scores. One that
    scores less than `right` is followed by `feedback`, while there are tries left.

    Each step's reward is what the score rose by, so that they add up to the score of the last try, however a sample
    ends. `judge` is called in a thread: it may take its time.
    """

    judge: Callable[[str, str], float]
    right: float
    max_turns: int
    feedback: str
    step_timeout_s: float

    async def reset(self, problem: Problem, seed: int) -> Tried:
        return Tried(problem.answer)

    async def step(self, state: Tried, action: str) -> Step:
        score = await asyncio.to_thread(self.judge, action, state.answer)
        rise, state.score = score - state.score, score
        state.tries += 1
        done = score >= self.right or state.tries == self.max_turns
        return Step("" if done else self.feedback, done, reward=rise)

    async def close(self, state: Tried) -> None:
        """Do nothing: it holds nothing."""
