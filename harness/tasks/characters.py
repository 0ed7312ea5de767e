"""Tasks over 32 characters: tokens without a tokenizer, prompts that end in `=`, answers that a program can check."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from harness.tasks.task import Problem, Score, draws

CHARACTERS = "_.= +-0123456789abcdefghijklmnop"
"""Token `i` is `CHARACTERS[i]`. `_` pads and `.` stops; both are kept out of prompts and answers that people write."""

VOCABULARY_SIZE = len(CHARACTERS)
PAD = CHARACTERS.index("_")
STOP = CHARACTERS.index(".")
EQUALS = CHARACTERS.index("=")
DIGITS = np.array([CHARACTERS.index(c) for c in "0123456789"], dtype=np.int64)
LETTERS = np.array([CHARACTERS.index(c) for c in "abcdefghijklmnop"], dtype=np.int64)


def encode(text: str) -> np.ndarray:
    """Text to tokens, int64 [len(text)]. Raises ValueError at the first character outside the vocabulary."""
    for place, character in enumerate(text):
        if character not in CHARACTERS:
            raise ValueError(f"character {character!r} at place {place} of {text!r} is not one of {CHARACTERS!r}")
    return np.array([CHARACTERS.index(character) for character in text], dtype=np.int64)


def decode(tokens: np.ndarray) -> str:
    """Tokens (integers in [0, 32), any length) to text."""
    return "".join(CHARACTERS[token] for token in tokens)


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
    """What these tasks share. A prompt ends in `=`, an answer in the stop token."""

    vocabulary_size = VOCABULARY_SIZE
    pad_token = PAD
    stop_token = STOP

    def score(self, response: np.ndarray, answer: np.ndarray) -> Score:
        return score_tokens(response, answer)

    def encode(self, text: str) -> np.ndarray:
        return encode(text)

    def decode(self, tokens: np.ndarray) -> str:
        return decode(tokens)


def _problem(prompt: np.ndarray, answer: np.ndarray) -> Problem:
    """prompt, answer: int64, neither with its end token."""
    return Problem(np.append(prompt, EQUALS), np.append(answer, STOP))


@dataclass(frozen=True)
class Reverse(CharacterTask):
    """`abc=` -> `cba`: a word of `min_letters` to `max_letters` letters (uniform, with repetition), backwards."""

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
        return self.max_letters + 5  # so that a policy that stutters can stop by itself

    def problem(self, group_id: int, seed: int) -> Problem:
        random = draws(seed, group_id)
        word = random.choice(LETTERS, size=random.integers(self.min_letters, self.max_letters, endpoint=True))
        return _problem(word, word[::-1])


@dataclass(frozen=True)
class Copy(CharacterTask):
    """`abc=` -> `abc`: a word of different letters; the task whose long responses hold a batch up.

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
        return _problem(word, word)


@dataclass(frozen=True)
class Expand(CharacterTask):
    """`a3b1=` -> `aaab`: a run-length code of one to `max_runs` runs (uniform) of different letters, undone.

    A run is geometric, 1 to 9: prompts are short, responses have a long tail.
    """

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
        return _problem(np.stack([letters, DIGITS[counts]], axis=1).ravel(), np.repeat(letters, counts))


@dataclass(frozen=True)
class Jsonl(CharacterTask):
    """Problems from a local file, an object per line: `{"prompt": "2+3=", "answer": "5"}`.

    The lines of `path`, each once per pass in an order shuffled anew for every pass and seed. Both strings are written
    in the vocabulary without `_` and `.`; the stop token is appended to the answer. Raises ValueError that names file
    and line for a line that is not like that, FileNotFoundError for a missing file.
    """

    path: str
    name: str = "jsonl"
    problems: tuple[Problem, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        with Path(self.path).open(encoding="utf-8") as lines:
            problems = tuple(_read_line(line, f"{self.path}:{n}") for n, line in enumerate(lines, 1) if line.strip())
        if not problems:
            raise ValueError(f'{self.path} holds no problem: write lines like {{"prompt": "2+3=", "answer": "5"}}')
        object.__setattr__(self, "problems", problems)

    @property
    def max_prompt_tokens(self) -> int:
        return max(len(problem.prompt) for problem in self.problems)

    @property
    def max_response_tokens(self) -> int:
        return max(len(problem.answer) for problem in self.problems) + 4

    def problem(self, group_id: int, seed: int) -> Problem:
        epoch, place = divmod(group_id, len(self.problems))
        return self.problems[_order(len(self.problems), seed, epoch)[place]]


@lru_cache(maxsize=4)
def _order(lines: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffle of range(lines), int64 [lines], that follows from seed and pass."""
    return draws(seed, epoch).permutation(lines)


def _read_line(line: str, place: str) -> Problem:
    """One line as a problem; `place` is file:line, for messages."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); write one object per line") from error
    if not isinstance(record, dict) or set(record) != {"prompt", "answer"}:
        raise ValueError(f'{place}: expected an object with exactly "prompt" and "answer", not {line.strip()}')
    return Problem(_read_text(record, "prompt", place), np.append(_read_text(record, "answer", place), STOP))


def _read_text(record: dict[str, object], key: str, place: str) -> np.ndarray:
    """One of a record's two strings as tokens, int64 [len]."""
    text = record[key]
    if not isinstance(text, str) or not text:
        raise ValueError(f'{place}: "{key}" must be a non-empty string, not {text!r}')
    if foreign := sorted(set(text) - set(CHARACTERS[2:])):
        raise ValueError(f'{place}: "{key}" holds {"".join(foreign)!r}; use only the characters {CHARACTERS[2:]!r}')
    return encode(text)
