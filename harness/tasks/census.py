"""A census of the rows that a run reads: what was kept, what was left out and why, and what is odd about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts or answers, those left out among them, and the limit. Of a giant text the first pieces count
    that exceed the limit."""

    median: int
    p99: int
    max: int
    limit: int

    @classmethod
    def of(cls, tokens: Sequence[int], limit: int) -> Lengths:
        """tokens: one number for each row, not empty."""
        median, p99 = np.percentile(tokens, [50, 99], method="higher")
        return cls(int(median), int(p99), max(tokens), limit)

    def __str__(self) -> str:
        return f"median {self.median:,}, 99% {self.p99:,}, longest {self.max:,} of {self.limit:,}"


@dataclass(frozen=True)
class Source:
    """The rows of one source. too_long, repeated: rows that were left out. duplicates: kept rows whose prompt an
    earlier one has; conflicting: prompts with several answers; where a response has to say its answer,
    unreachable: answers longer than it may be; altered: those that the tokenizer does not say as they stand."""

    name: str
    rows: int
    kept: int
    too_long: int
    repeated: int
    prompt_tokens: Lengths
    answer_tokens: Lengths | None
    duplicates: int
    conflicting: int
    unreachable: int
    altered: int

    @property
    def left_out(self) -> list[str]:
        """A phrase for each reason."""
        told = [_many(self.too_long, "prompt") + f" of more than {self.prompt_tokens.limit:,} tokens"] * (
            self.too_long > 0
        )
        return told + [_many(self.repeated, "repeated prompt")] * (self.repeated > 0)

    def oddities(self) -> Iterator[str]:
        """A line for each kind of row that is no mistake by itself."""
        if self.duplicates:
            yield f"{_many(self.duplicates, 'row')} of a prompt that was there (left out: task.drop_repeated=true)"
        if self.conflicting:
            yield f"{_many(self.conflicting, 'prompt')} with several answers: conflicting rewards"
        if self.unreachable:
            assert self.answer_tokens is not None, "they have been counted"
            yield (
                f"{_many(self.unreachable, 'answer')} longer than a response may be, "
                f"{_many(self.answer_tokens.limit, 'token')} with its end"
            )
        if self.altered:
            yield f"{_many(self.altered, 'answer')} that the tokenizer does not say as they stand"


@dataclass(frozen=True)
class Census:
    """The problems of a run. shared: held-out problems whose prompt is trained on; taken_out: rows that are not trained
    because their prompt is held out. held_out_source: where it is not the one of training."""

    training: int
    held_out: int
    shared: int
    taken_out: int
    batch_groups: int
    source: Source
    held_out_source: Source | None = field(default=None)

    def __str__(self) -> str:
        """The line that says what was read, and one for each thing that is odd."""
        left_out = self.source.left_out + [
            f"{_many(self.taken_out, 'row')} whose prompt is held out" for _ in range(self.taken_out > 0)
        ]
        without = f", without {' and '.join(left_out)}" if left_out else ""
        lines = [
            f"{self.source.name}: {_many(self.training, 'problem')} to train on, {self.held_out:,} held out{without}",
            f"tokens of prompts: {self.source.prompt_tokens}",
        ]
        if self.source.answer_tokens is not None:
            lines.append(f"tokens of answers: {self.source.answer_tokens}")
        lines += self.source.oddities()
        if self.held_out_source is not None:
            other = self.held_out_source
            told = [f"without {' and '.join(other.left_out)}"] if other.left_out else []
            lines += [f"held out, {other.name}: {one}" for one in (*told, *other.oddities())]
        if self.shared:
            lines.append(f"{_many(self.shared, 'held-out prompt')} also trained: their accuracy is one of training")
        elif self.source.duplicates:
            lines.append("a prompt is on one side of the split only: none held out is also trained")
        if self.training < self.batch_groups:
            lines.append(f"fewer than the {self.batch_groups} groups of a batch, which has prompts several times")
        return "\n  ".join(lines)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
