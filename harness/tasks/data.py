"""Problems from a data set: a file, or one of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.plugins import GIVEN
from harness.tasks.data_prompts import Columns, PromptFormat
from harness.tasks.data_source import HUB, DataSource
from harness.tasks.rewards.text import exact
from harness.tasks.task import HELD_OUT_SEED, Problem, Sample, Score, draws
from harness.tasks.tokenizer import TextTask, Tokenizer

LONGEST = 1024
"""Tokens of prompts, and of responses, where nothing else is said."""


@dataclass(frozen=True)
class Rows:
    """Problems of one source in its order, and how many rows were left out."""

    problems: Sequence[Problem]
    too_long: int
    repeated: int


@dataclass(frozen=True)
class DataTask(TextTask):
    """The rows of `data`, each once per pass in an order shuffled anew for every pass and seed; docs/data.md has the
    options. Rows are read on first use: who only scores reads none. context: tokens that the model holds, of which
    prompts get half and responses the rest, up to `LONGEST` each, where their limits are 0.

    Raises ValueError that names file and line for a row that cannot be used.
    """

    data: str
    name: str = "data"
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: Columns = Columns()
    template: str | None = None
    system: str | None = None
    chat: bool | None = None
    chat_options: dict[str, Any] = field(default_factory=dict)
    answer_pattern: str | None = None
    max_prompt_tokens: int = 0
    max_response_tokens: int = 0
    drop_repeated: bool = False
    held_out_data: str | None = None
    held_out_split: str | None = None
    held_out_share: float = 0.1
    context: int = field(default=2 * LONGEST, kw_only=True, repr=False, metadata=GIVEN)
    pay_truncated: bool = field(default=False, kw_only=True, repr=False, metadata=GIVEN)

    def __post_init__(self) -> None:
        for option in ("max_prompt_tokens", "max_response_tokens"):
            if getattr(self, option) < 0:
                raise ValueError(f"{option}={getattr(self, option)} is too small; use 0 or more")
        prompt = self.max_prompt_tokens or min(LONGEST, self.context // 2)
        object.__setattr__(self, "max_prompt_tokens", prompt)
        response = self.max_response_tokens or max(1, min(LONGEST, self.context - prompt))
        object.__setattr__(self, "max_response_tokens", response)
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share={self.held_out_share} is no share of the rows; use 0 or more, below 1")
        self._prompts.check(self.tokenizer)

    def problem(self, group_id: int, seed: int) -> Problem:
        training = self._split[0]
        epoch, place = divmod(group_id, len(training))
        return training[_order(len(training), seed, epoch)[place]]

    def held_out(self, index: int) -> Problem:
        """Rows of `held_out_data`, or of `held_out_split`, or those of `data` that training leaves out; from the first
        again after the last. Raises ValueError where there are none."""
        held_out = self._split[1]
        if not held_out:
            raise ValueError(f"task {self.name} holds no row out; set task.held_out_share=0.1, or task.held_out_data")
        return held_out[index % len(held_out)]

    def score(self, sample: Sample) -> Score:
        return exact.paying_truncated(sample) if self.pay_truncated else exact(sample)  # type: ignore[attr-defined]

    @property
    def summary(self) -> str:
        """A line on what was read and what was left out."""
        rows, (training, held_out) = self._rows(self._source), self._split
        left_out = [f"{rows.too_long:,} prompts of more than {self.max_prompt_tokens} tokens"] if rows.too_long else []
        left_out += [f"{rows.repeated:,} repeated prompts"] if rows.repeated else []
        without = f", without {' and '.join(left_out)}" if left_out else ""
        return f"{self.data}: {len(training):,} problems to train on, {len(held_out):,} held out{without}"

    @property
    def _source(self) -> DataSource:
        return self._at(self.data, self.split)

    def _at(self, name: str, split: str) -> DataSource:
        """The source of this name; subset and revision hold for `data` alone."""
        return (
            DataSource(name, self.subset, split, self.revision) if name == self.data else DataSource(name, split=split)
        )

    @property
    def _prompts(self) -> PromptFormat:
        options = json.dumps(self.chat_options, sort_keys=True)
        return PromptFormat(self.columns, self.template, self.system, self.chat, options, self.answer_pattern)

    def _rows(self, source: DataSource) -> Rows:
        limits = {"max_prompt_tokens": self.max_prompt_tokens, "drop_repeated": self.drop_repeated}
        return _read(source, source.stamp(), self.tokenizer, self._prompts, **limits)

    @cached_property
    def _split(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Training and held-out problems."""
        problems = self._rows(self._source).problems
        other = self.held_out_data or (self.data if self.held_out_split and self.data.startswith(HUB) else None)
        if other is not None:
            return problems, self._rows(self._at(other, self.held_out_split or self.split)).problems
        aside = round(self.held_out_share * len(problems))
        if self.held_out_share and len(problems) > 1:
            aside = max(1, aside)
        order = draws(HELD_OUT_SEED, 0).permutation(len(problems))
        return [problems[row] for row in order[aside:]], [problems[row] for row in order[:aside]]


@lru_cache(maxsize=4)
def _read(
    source: DataSource,
    stamp: tuple[int, int] | None,
    tokenizer: Tokenizer,
    prompts: PromptFormat,
    *,
    max_prompt_tokens: int,
    drop_repeated: bool,
) -> Rows:
    """All problems of a source; stamp: of the file, so that another is read anew. Raises ValueError for the first row
    that cannot be used, and where none is left."""
    problems: list[Problem] = []
    seen: set[str] = set()
    too_long = repeated = 0
    for place, row in source.rows():
        try:
            text, answer = prompts.prompt(row, tokenizer), prompts.answer(row)
            tokens = tokenizer.encode(text, special=not prompts.chats(tokenizer))
            answer.encode()
        except (ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"{place}: {error}") from error
        if drop_repeated and text in seen:
            repeated += 1
            continue
        seen.add(text)
        if len(tokens) > max_prompt_tokens:
            too_long += 1
            continue
        problems.append(Problem(tokens, answer, Path(place).name if not place.startswith(HUB) else place))
    if not problems:
        why = f": all {too_long} prompts have more than {max_prompt_tokens} tokens" if too_long else ""
        raise ValueError(f"{source.name} holds no problem{why}")
    return Rows(problems, too_long, repeated)


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffle of range(rows), int64 [rows], that follows from seed and pass."""
    return draws(seed, epoch).permutation(rows)
