"""A task whose problems have a size and no content, for engines that only let time pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.tasks.task import Problem, Score


@dataclass(frozen=True)
class SimulatedTask:
    """`harness.tasks.Task` for simulated engines. A prompt is one value, its number of tokens; every reward is 0."""

    prompt_tokens: int
    max_response_tokens: int
    name: str = "simulated"
    vocabulary_size: int = 1
    pad_token: int = 0
    stop_token: int = 0

    @property
    def max_prompt_tokens(self) -> int:
        return self.prompt_tokens

    def problem(self, group_id: int, seed: int) -> Problem:
        return Problem(np.array([self.prompt_tokens], np.int64), np.zeros(1, np.int64))

    def score(self, response: np.ndarray, answer: np.ndarray) -> Score:
        """Nothing was said, so nothing is rewarded."""
        return Score(0.0, False)

    def encode(self, text: str) -> np.ndarray:
        raise ValueError(f"a simulated task has no text; cannot encode {text!r}")

    def decode(self, tokens: np.ndarray) -> str:
        """Run-length coded tokens as text, for people: how many there are."""
        return f"<{int(tokens.sum())} tokens>"
