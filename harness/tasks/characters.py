"""Tasks over letters and digits: prompts that end in `=`, answers that a program can check.

A character is a token of the shipped tokenizer (`tokenizer.CHARACTER_TOKENIZER`), and text of any other.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from harness.config.readers import Read
from harness.tasks.task import HELD_OUT_SEED, Problem, Sample, Score, draws
from harness.tasks.tokenizer import TextTask

DIGITS = np.array(list("0123456789"))
LETTERS = np.array(list("abcdefghijklmnop"))


def score_characters(sample: Sample) -> Score:
    """reward = 0.5 * partial + 0.5 * exact.

    partial is the number of places at which response and answer have the same character, over the longer of the two;
    the end is a place like any other, so that a response which is right but does not stop earns A - 1 of max(L, A)
    places and is not exact. exact is 1 where the two are equal, else 0.
    """
    response, answer = sample.response, sample.answer
    same = sum(said == right for said, right in zip(response, answer, strict=False))
    same += sample.stopped and len(response) == len(answer)
    longest = max(len(response) + sample.stopped, len(answer) + 1)
    exact = same == longest
    return Score(0.5 * same / longest + 0.5 * exact, exact)


@dataclass(frozen=True)
class CharacterTask(TextTask, ABC):
    """The base of these tasks."""

    def problem(self, group_id: int, seed: int) -> Problem:
        word, answer = self.draw(draws(seed, group_id))
        return Problem(self.encode(word + "="), answer, str(group_id))

    def held_out(self, index: int) -> Problem:
        return self.problem(index, HELD_OUT_SEED)

    def score(self, sample: Sample) -> Score:
        return score_characters(sample)

    @abstractmethod
    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        """The text before the `=`, and the answer."""


def geometric(random: np.random.Generator, mean: float, most: int) -> int:
    """A geometric number with this mean, drawn again where it exceeds `most`."""
    while (number := int(random.geometric(1 / mean))) > most:
        continue
    return number


@dataclass(frozen=True)
class Reverse(CharacterTask):
    """`abc=` -> `cba`: a word of `min_letters` to `max_letters` letters (uniform, with repetition), backwards."""

    min_letters: Read[int] = 2
    max_letters: Read[int] = 7
    name: str = "reverse"

    def __post_init__(self) -> None:
        if not 1 <= self.min_letters <= self.max_letters:
            given = f"min_letters={self.min_letters}, max_letters={self.max_letters}"
            raise ValueError(f"reverse needs 1 <= min_letters <= max_letters, not {given}")

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_letters + 1

    @property
    def max_response_tokens(self) -> int:
        return self.max_letters + 5  # so that a policy that stutters can stop by itself

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        word = "".join(random.choice(LETTERS, size=random.integers(self.min_letters, self.max_letters, endpoint=True)))
        return word, word[::-1]


@dataclass(frozen=True)
class Copy(CharacterTask):
    """`abc=` -> `abc`: a word of different letters; the task whose long responses hold a batch up.

    Its length is geometric with mean `mean_letters`, drawn again where it exceeds `max_letters`.
    """

    mean_letters: Read[float] = 4.0
    max_letters: Read[int] = 16
    name: str = "copy"

    def __post_init__(self) -> None:
        if not 1 <= self.mean_letters <= self.max_letters <= len(LETTERS):
            given = f"mean_letters={self.mean_letters}, max_letters={self.max_letters}"
            raise ValueError(f"copy needs 1 <= mean_letters <= max_letters <= {len(LETTERS)}, not {given}")

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_letters + 1

    @property
    def max_response_tokens(self) -> int:
        return self.max_letters + 8

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        letters = geometric(random, self.mean_letters, self.max_letters)
        word = "".join(random.choice(LETTERS, size=letters, replace=False))
        return word, word


@dataclass(frozen=True)
class Expand(CharacterTask):
    """`a3b1=` -> `aaab`: a run-length code of one to `max_runs` runs (uniform) of different letters, undone.

    A run is geometric, 1 to 9: prompts are short, responses have a long tail.
    """

    max_runs: Read[int] = 3
    name: str = "expand"

    def __post_init__(self) -> None:
        if not 1 <= self.max_runs <= len(LETTERS):
            raise ValueError(f"expand needs 1 <= max_runs <= {len(LETTERS)}, not max_runs={self.max_runs}")

    @property
    def max_prompt_tokens(self) -> int:
        return 2 * self.max_runs + 1

    @property
    def max_response_tokens(self) -> int:
        return 9 * self.max_runs + 5

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        letters = random.choice(LETTERS, size=random.integers(1, self.max_runs, endpoint=True), replace=False)
        counts = np.minimum(random.geometric(0.5, size=len(letters)), 9)
        return "".join(np.stack([letters, DIGITS[counts]], axis=1).ravel()), "".join(np.repeat(letters, counts))
