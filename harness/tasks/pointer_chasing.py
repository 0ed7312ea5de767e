"""Pointer chasing: a task of several turns, in which the policy asks an environment for what it cannot know."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.config.readers import Read
from harness.tasks.characters import DIGITS, LETTERS, geometric
from harness.tasks.environment import Step
from harness.tasks.task import HELD_OUT_SEED, Problem, Sample, Score, draws
from harness.tasks.tokenizer import TextTask

ASK = "+"
"""Begins a turn that asks for a letter."""
NOTHING = "-"
"""The answer where there is no such letter."""


@dataclass
class Chase:
    """One sample: the table of its problem, what is asked for, and the draws of its latencies."""

    table: dict[str, str]
    start: str
    random: np.random.Generator


@dataclass(frozen=True)
class HiddenTable:
    """`harness.tasks.Environment`: `+a` is answered by what the table holds for `a`; any other turn is the answer,
    worth 1 where it is the digit at the end of the chain, else 0. latency_s: mean of an exponential latency."""

    max_turns: int
    latency_s: float
    step_timeout_s: float

    async def reset(self, problem: Problem, seed: int) -> Chase:
        return Chase(_table(problem.answer), problem.answer[0], draws(seed, 0))

    async def step(self, state: Chase, action: str) -> Step:
        if not action.startswith(ASK):
            return Step("", done=True, reward=float(action == _end(state.table, state.start)))
        return Step(
            state.table.get(action.removeprefix(ASK), NOTHING),
            done=False,
            latency_s=self.latency_s * state.random.standard_exponential(),
        )

    async def close(self, state: Chase) -> None:
        """Do nothing: it holds nothing."""


@dataclass(frozen=True)
class Lookup(TextTask):
    """`a=` -> `+a` (`c`) `+c` (`f`) `+f` (`7`) `7`: in brackets what the environment answers, from a table of letters
    that the prompt does not show. Hops are geometric with mean `mean_hops`, drawn again where they exceed `max_hops`.

    latency_s: mean seconds (exponential) until an answer is there. The reward is 1 for the right digit, else 0.
    """

    mean_hops: Read[float] = 3.0
    max_hops: Read[int] = 8
    max_turns: Read[int] = 12
    latency_s: Read[float] = 0.0
    step_timeout_s: Read[float] = 30.0
    name: str = "lookup"

    def __post_init__(self) -> None:
        if not 1 <= self.mean_hops <= self.max_hops <= len(LETTERS) - 1:
            given = f"mean_hops={self.mean_hops}, max_hops={self.max_hops}"
            raise ValueError(f"lookup needs 1 <= mean_hops <= max_hops <= {len(LETTERS) - 1}, not {given}")
        if self.latency_s < 0:
            raise ValueError(f"lookup needs latency_s >= 0, not {self.latency_s}")

    @cached_property
    def environment(self) -> HiddenTable:
        """The table that the policy asks."""
        return HiddenTable(self.max_turns, self.latency_s, self.step_timeout_s)

    @property
    def max_prompt_tokens(self) -> int:
        return 2

    @property
    def max_response_tokens(self) -> int:
        return 5 * self.max_turns  # a turn and its answer are four tokens

    def problem(self, group_id: int, seed: int) -> Problem:
        """answer: the first letter, and a letter and what the table holds for it, for each letter."""
        random = draws(seed, group_id)
        hops = geometric(random, self.mean_hops, self.max_hops)
        letters = random.permutation(LETTERS)
        held = np.append(letters[1:], random.choice(DIGITS))
        held[hops - 1] = random.choice(DIGITS)
        table = "".join(letter + there for letter, there in zip(letters, held, strict=True))
        return Problem(self.encode(f"{letters[0]}="), letters[0] + table, str(group_id))

    def held_out(self, index: int) -> Problem:
        return self.problem(index, HELD_OUT_SEED)

    def score(self, sample: Sample) -> Score:
        right = sample.environment_reward == 1.0
        return Score(float(right), right)

    def transcript(self, problem: Problem) -> list[np.ndarray]:
        """Turns of a perfect sample, int64 [n] each: the policy's and the environment's in turn."""
        held, here = _table(problem.answer), problem.answer[0]
        parts = []
        while here in held:
            parts += [self.said(ASK + here), self.encode(held[here])]
            here = held[here]
        return [*parts, self.said(here)]

    def demonstration(self, problem: Problem) -> np.ndarray:
        return np.concatenate(self.transcript(problem))


def _table(answer: str) -> dict[str, str]:
    """The letter that is held for each letter, of a problem's answer."""
    return dict(zip(answer[1::2], answer[2::2], strict=True))


def _end(table: dict[str, str], here: str) -> str:
    """The letter where the chain ends."""
    while here in table:
        here = table[here]
    return here
