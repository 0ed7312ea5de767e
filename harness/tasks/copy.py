"""`abc=` -> `abc`, with a geometric tail of lengths: the task whose long responses hold a batch up."""

from __future__ import annotations

from dataclasses import dataclass

from harness.tasks.task import CharacterTask, Problem, draws, question
from harness.tasks.vocabulary import LETTERS


@dataclass(frozen=True)
class Copy(CharacterTask):
    """Repeat a word of different letters.

    Its length is geometric with mean `mean_letters`, drawn again where it exceeds `max_letters`.
    """

    mean_letters: float = 4.0
    max_letters: int = 16
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

    def problem(self, group_id: int, seed: int) -> Problem:
        random = draws(seed, group_id)
        letters = random.geometric(1 / self.mean_letters)
        while letters > self.max_letters:
            letters = random.geometric(1 / self.mean_letters)
        word = random.choice(LETTERS, size=letters, replace=False)
        return question(word, word)
