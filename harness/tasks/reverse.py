"""`abc=` -> `cba`: lengths within a factor of three of each other."""

from __future__ import annotations

from dataclasses import dataclass

from harness.tasks.task import CharacterTask, Problem, draws, question
from harness.tasks.vocabulary import LETTERS


@dataclass(frozen=True)
class Reverse(CharacterTask):
    """Say a word of `min_letters` to `max_letters` letters (uniform, with repetition) backwards."""

    min_letters: int = 2
    max_letters: int = 7
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
        return self.max_letters + 5  # room for a policy that stutters to stop by itself

    def problem(self, group_id: int, seed: int) -> Problem:
        random = draws(seed, group_id)
        word = random.choice(LETTERS, size=random.integers(self.min_letters, self.max_letters, endpoint=True))
        return question(word, word[::-1])
