"""Problems from a local file, one JSON object per line: `{"prompt": "2+3=", "answer": "5"}`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from harness.tasks.task import CharacterTask, Problem, draws
from harness.tasks.vocabulary import CHARACTERS, STOP, encode


@dataclass(frozen=True)
class Jsonl(CharacterTask):
    """The lines of `path`, each once per pass in an order shuffled anew for every pass and seed.

    Both strings are written in the vocabulary without `_` and `.`; the stop token is appended to the answer. Raises
    ValueError that names file and line for a line that is not like that, FileNotFoundError for a missing file.
    """

    path: str
    name: str = "jsonl"
    problems: tuple[Problem, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        with Path(self.path).open(encoding="utf-8") as lines:
            problems = tuple(read_line(line, f"{self.path}:{n}") for n, line in enumerate(lines, 1) if line.strip())
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
        return self.problems[order(len(self.problems), seed, epoch)[place]]


@lru_cache(maxsize=4)
def order(lines: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffle of range(lines), int64 [lines], that follows from seed and pass."""
    return draws(seed, epoch).permutation(lines)


def read_line(line: str, place: str) -> Problem:
    """One line as a problem; `place` is file:line, for messages."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); write one object per line") from error
    if not isinstance(record, dict) or set(record) != {"prompt", "answer"}:
        raise ValueError(f'{place}: expected an object with exactly "prompt" and "answer", not {line.strip()}')
    return Problem(read_text(record, "prompt", place), np.append(read_text(record, "answer", place), STOP))


def read_text(record: dict[str, object], key: str, place: str) -> np.ndarray:
    """One of a record's two strings as tokens, int64 [len]."""
    text = record[key]
    if not isinstance(text, str) or not text:
        raise ValueError(f'{place}: "{key}" must be a non-empty string, not {text!r}')
    if foreign := sorted(set(text) - set(CHARACTERS[2:])):
        raise ValueError(f'{place}: "{key}" holds {"".join(foreign)!r}; use only the characters {CHARACTERS[2:]!r}')
    return encode(text)
