"""`a3b1=` -> `aaab`: short prompts, responses with a long tail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.tasks.task import CharacterTask, Problem, draws, question
from harness.tasks.vocabulary import DIGITS, LETTERS


@dataclass(frozen=True)
class Expand(CharacterTask):
    """Undo a run-length code of one to `max_runs` runs (uniform) of different letters; a run is geometric, 1 to 9."""

    max_runs: int = 3
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

    def problem(self, group_id: int, seed: int) -> Problem:
        random = draws(seed, group_id)
        letters = random.choice(LETTERS, size=random.integers(1, self.max_runs, endpoint=True), replace=False)
        counts = np.minimum(random.geometric(0.5, size=len(letters)), 9)
        return question(np.stack([letters, DIGITS[counts]], axis=1).ravel(), np.repeat(letters, counts))
