"""What a task is: prompts that follow from a seed, and a reward that a program can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.tasks import vocabulary


@dataclass(frozen=True, slots=True)
class Problem:
    """prompt: int64 [P]; answer: int64 [A], ending in the stop token: the one response that earns the full reward."""

    prompt: np.ndarray
    answer: np.ndarray


@dataclass(frozen=True, slots=True)
class Score:
    """reward in [0, 1], and whether the response is the answer, stop token included."""

    reward: float
    exact_match: bool


class Task(Protocol):
    """One source of problems. Pure: `problem` depends on its arguments only, so any process can ask in any order."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary_size(self) -> int:
        """Tokens are integers in [0, vocabulary_size)."""

    @property
    def pad_token(self) -> int:
        """What fills the place of no token; no prompt or answer contains it."""

    @property
    def stop_token(self) -> int:
        """What ends a response; every answer ends in it, nothing else contains it."""

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def max_response_tokens(self) -> int:
        """Where sampling gives up: at least the longest answer, stop token included."""

    def problem(self, group_id: int, seed: int) -> Problem:
        """The problem of one group; both arguments are integers in [0, 2**64)."""

    def score(self, response: np.ndarray, answer: np.ndarray) -> Score:
        """response: int64 [L] as sampled, stop token included; answer: int64 [A] from `problem`."""

    def encode(self, text: str) -> np.ndarray:
        """Text to tokens, int64 [len]; ValueError for a character that the vocabulary lacks."""

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens to text, for people."""


def draws(seed: int, group_id: int) -> np.random.Generator:
    """The random numbers of one group: Philox keyed by (seed, group), so no draw depends on another group's.

    Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, group_id], dtype=np.uint64)))


def score_tokens(response: np.ndarray, answer: np.ndarray) -> Score:
    """reward = 0.5 * partial + 0.5 * exact.

    partial is the number of places at which response [L] and answer [A] hold the same token, over max(L, A); the stop
    token is a token like any other, so that a response which is right but does not stop earns A - 1 of max(L, A)
    places and is not exact. exact is 1 where the two are equal, else 0.
    """
    common = min(len(response), len(answer))
    same = int(np.count_nonzero(response[:common] == answer[:common]))
    longest = max(len(response), len(answer))
    exact = same == longest
    return Score(0.5 * same / longest + 0.5 * exact, exact)


class CharacterTask:
    """What tasks over the 32 characters share. A prompt ends in `=`, an answer in the stop token."""

    vocabulary_size = vocabulary.VOCABULARY_SIZE
    pad_token = vocabulary.PAD
    stop_token = vocabulary.STOP

    def score(self, response: np.ndarray, answer: np.ndarray) -> Score:
        return score_tokens(response, answer)

    def encode(self, text: str) -> np.ndarray:
        return vocabulary.encode(text)

    def decode(self, tokens: np.ndarray) -> str:
        return vocabulary.decode(tokens)


def question(prompt: np.ndarray, answer: np.ndarray) -> Problem:
    """A problem from what stands before the `=` and after it; both int64, neither with its end token."""
    return Problem(np.append(prompt, vocabulary.EQUALS), np.append(answer, vocabulary.STOP))
