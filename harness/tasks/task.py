"""Tasks: prompts that follow from a seed, and a reward for each response."""

import math
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any, Protocol, Self

import numpy as np

EXTRA_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*(/[a-z0-9_][a-z0-9_.-]*)*")
"""Names of extra values of a score, and so of the metric `custom/<name>`."""
_TOKENS = re.compile(r"<(\d+) tokens>")
HELD_OUT_SEED = (1 << 64) - 1
"""Seed of held-out problems that are made up: no run draws its own by it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and its answer. prompt: int64 [P]; answer: what the reward reads, "" where there is nothing to read.

    row: where it is from, such as `sums.jsonl:3`, or the number that a task makes it of; "" where nobody says.
    """

    prompt: np.ndarray
    answer: str
    row: str = ""

    def numbered(self, number: int) -> Self:
        """The problem with this row, where it has none."""
        return self if self.row else replace(self, row=str(number))


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as text, for a reward.

    response: without the token that ended it; stopped: by such a token, and not by the limit; tokens: of the response,
    the end token included; turns: how often the policy spoke; environment_reward: of a task with an environment.
    """

    prompt: str
    response: str
    answer: str
    stopped: bool
    tokens: int
    turns: int = 1
    environment_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a response, in [0, 1] for tasks that are built in, and whether it is right.

    extra: further values of this response, for the metrics `custom/<name>`; a task declares their names.
    """

    reward: float
    exact_match: bool
    extra: Mapping[str, float] = field(default_factory=dict)


def unpaid(score: Score) -> Score:
    """The score of a response that the limit cut off: no reward, but penalties stay, and it is not right."""
    return replace(score, reward=min(score.reward, 0.0), exact_match=False)


_LARGEST = float(np.finfo(np.float32).max)


def number_of(value: object, what: str) -> float:
    """The number that user's code gave, finite in float32, with which rewards are computed: a bool is one, and so is an
    array or a tensor of one. Raises ValueError, which names `what`, for anything else."""
    one = value
    if hasattr(value, "item"):
        try:
            one = value.item()
        except (RuntimeError, TypeError, ValueError):  # of several
            one = None
    if not isinstance(one, Real | Decimal):
        raise ValueError(f"{what} is {value!r:.80}, of type {type(value).__name__}; return a number")
    number = float(one) if not isinstance(one, int) or abs(one) <= _LARGEST else math.inf
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{what} is {value!r:.80}; return a number that is finite in float32")
    return number


def checked_score(given: object) -> Score:
    """The score that a task gave, every number of it checked: the one place where scores enter. Raises ValueError for
    what is none."""
    if not isinstance(given, Score):
        raise ValueError(f"the score is {given!r:.80}, of type {type(given).__name__}; return a harness.tasks.Score")
    reward, right = number_of(given.reward, "the reward"), number_of(given.exact_match, "exact_match")
    if not isinstance(given.extra, Mapping):
        raise ValueError(f"extra is {given.extra!r:.80}; return a mapping of names to numbers")
    extra = {name: number_of(value, f"extra[{name!r}]") for name, value in given.extra.items() if value == value}
    return Score(reward, bool(right), extra)


class Task(Protocol):
    """One source of problems. Pure: `problem` depends on its arguments only, so any process can ask in any order.

    A task whose scores have extra values declares their names besides, as `extra_metrics: tuple[str, ...]`.
    """

    @property
    def name(self) -> str:
        """Name by which settings choose it."""

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens: integers in [0, vocabulary_size)."""

    @property
    def pad_token(self) -> int:
        """The token that fills the place of no token; no prompt or response contains it."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""

    @property
    def max_response_tokens(self) -> int:
        """Tokens at which sampling gives up: at least the longest answer, end token included."""

    def problem(self, group_id: int, seed: int) -> Problem:
        """The problem of one group; both arguments are integers in [0, 2**64)."""

    def held_out(self, index: int) -> Problem:
        """A problem to evaluate by, index >= 0: of rows, or of draws, that no training sees."""

    def score(self, sample: Sample) -> Score | Awaitable[Score]:
        """The score of a response."""

    def encode(self, text: str) -> np.ndarray:
        """Text to tokens, int64 [len]; ValueError for text that the vocabulary cannot say."""

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens to text."""

    def demonstration(self, problem: Problem) -> np.ndarray:
        """A response that is right, int64 [A], its end token included. Raises ValueError where none is known."""


MEMBERS = tuple(name for name in vars(Task) if not name.startswith("_"))
"""Members of a task."""


def sample_of(task: Task, prompt: np.ndarray, response: np.ndarray, answer: str) -> Sample:
    """A sample as text. prompt: int64 [P]; response: int64 [L], as sampled."""
    stopped = bool(len(response)) and int(response[-1]) in task.stop_tokens
    said = response[:-1] if stopped else response
    return Sample(task.decode(prompt), task.decode(said), answer, stopped, len(response))


def extra_metrics(task: Task) -> tuple[str, ...]:
    """Names of the extra values of its scores: `task.extra_metrics`, or none. Raises ValueError for a name that is
    there twice, or cannot name a metric."""
    names = tuple(getattr(task, "extra_metrics", ()))
    for name in names:
        if not isinstance(name, str) or not EXTRA_NAME.fullmatch(name):
            raise ValueError(f"extra_metrics: {name!r} cannot name a metric; use a-z 0-9 _ . - and / between words")
        if names.count(name) > 1:
            raise ValueError(f"extra_metrics has {name!r} twice")
    return names


def extra_values(scores: Sequence[Score], names: Sequence[str]) -> np.ndarray:
    """The extra values of k scores, float64 [k, len(names)], NaN for one that a score lacks. Raises ValueError for a
    value that is not among `names`."""
    for score in scores:
        if unknown := score.extra.keys() - set(names):
            raise ValueError(
                f"a score has the extra value {min(unknown)!r}, which its task does not declare: "
                f"extra_metrics = {tuple(names)}"
            )
    return np.array([[score.extra.get(name, np.nan) for name in names] for score in scores], np.float64)


def draws(seed: int, group_id: int) -> np.random.Generator:
    """The random numbers of one group: Philox keyed by (seed, group), so no draw depends on another group's.

    Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, group_id], dtype=np.uint64)))


@dataclass(frozen=True)
class SimulatedTask:
    """A task for engines that only let time pass: problems have a size and no content.

    A prompt is one value, its number of tokens; every reward is 0. The text of a run of tokens is its number, as in
    "<12 tokens>". environment: of samples with several turns (`harness.tasks.Environment`).
    """

    prompt_tokens: int
    max_response_tokens: int
    name: str = "simulated"
    vocabulary_size: int = 1
    pad_token: int = 0
    stop_tokens: tuple[int, ...] = ()
    environment: Any = None

    @property
    def max_prompt_tokens(self) -> int:
        return self.prompt_tokens

    def problem(self, group_id: int, seed: int) -> Problem:
        return Problem(np.array([self.prompt_tokens], np.int64), "")

    def held_out(self, index: int) -> Problem:
        return self.problem(index, HELD_OUT_SEED)

    def score(self, sample: Sample) -> Score:
        """Score of 0: nothing was sampled, so nothing is rewarded."""
        return Score(0.0, False)

    def encode(self, text: str) -> np.ndarray:
        """The inverse of `decode`, for one run. Raises ValueError for other text."""
        if (number := _TOKENS.fullmatch(text)) is None:
            raise ValueError(f"a simulated task has no text; cannot encode {text!r}")
        return np.array([int(number[1])], np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """Run-length coded tokens as text, for people: how many there are."""
        return f"<{int(tokens.sum())} tokens>"

    def demonstration(self, problem: Problem) -> np.ndarray:
        raise ValueError("a simulated task has no answers")
