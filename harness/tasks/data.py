"""Problems from a data set, a file or one of the Hugging Face hub; and a census of its rows: what was kept, what was
left out and why, and what is odd about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from harness.config.plugins import GIVEN, is_path, keywords, named_by
from harness.config.readers import Read, Where
from harness.config.registries import find
from harness.tasks.data_prompts import Columns, PromptFormat
from harness.tasks.data_source import HUB, DataSource
from harness.tasks.rewards.reading import normalised
from harness.tasks.rewards.text import exact
from harness.tasks.task import HELD_OUT_SEED, Problem, Sample, Score, draws
from harness.tasks.tokenizer import TextTask, Tokenizer

LONGEST = 1024
"""Tokens of prompts, and of responses, where nothing else is said."""
_PIECE = 1 << 16
"""Characters of a giant text that are made tokens at a time."""
_JOINT = 64
"""Tokens by which pieces may come to more than the whole text."""
_REMEMBERED = 1 << 14
"""Answers that are read once."""


@dataclass(frozen=True)
class JobFacts:
    """The part of a job that its data are held against. reward: its name, or None where the task scores by itself;
    max_tokens: of a response, 0 where the task says so."""

    batch_groups: int = 16
    max_tokens: int = 0
    reward: str | None = None
    reward_options: str = "{}"
    pay_truncated: bool = False

    def reader(self) -> Callable[[str], object]:
        """The function by which the reward reads answers of rows; it raises for one that it cannot read."""
        check = getattr(self._function, "check_answer", None)
        if check is None:
            return str
        options = keywords(self._function, json.loads(self.reward_options), "task.reward_options", str(self.reward))
        return partial(check, **named_by(check, options))

    @property
    def says_answer(self) -> bool:
        """Whether a response has to say the answer as it stands."""
        return getattr(self._function, "says_answer", False)

    @property
    def _function(self) -> Any:
        return exact if self.reward is None else find("task.reward", self.reward)


def _on_hub(source: str | None) -> bool:
    return source is not None and source.startswith(HUB)


_OF_HUB = Where("task.data is of the hub", lambda job, own: _on_hub(own.data), "task.data=hf:<org>/<name>")
_SPLIT = Where(
    "task.data is of the hub, or task.held_out_data is and task.held_out_split is not set",
    lambda job, own: _on_hub(own.data) or (_on_hub(own.held_out_data) and not own.held_out_split),
    "task.data=hf:<org>/<name>",
)
_HELD_OUT_SPLIT = Where(
    "what is held out is of the hub",
    lambda job, own: _on_hub(own.held_out_data or own.data),
    "task.held_out_data=hf:<org>/<name>",
)
_HELD_OUT_SHARE = Where(
    "rows to evaluate by are some of task.data: neither task.held_out_data nor task.held_out_split says others",
    lambda job, own: not own.held_out_data and not (own.held_out_split and _on_hub(own.data)),
)
_CHATS = Where("prompts are chats", lambda job, own: own.chat is not False, "task.chat=true")


@dataclass(frozen=True)
class Rows:
    """Problems of one source in its order, what each prompt says (a digest, equal where that is), and their census."""

    problems: Sequence[Problem]
    prompts: Sequence[bytes]
    census: Source


@dataclass(frozen=True)
class DataTask(TextTask):
    """The rows of `data`, each once per pass in an order shuffled anew for every pass and seed; docs/data.md has the
    options. Rows are read on first use: who only scores reads none. context: tokens that the model holds, of which
    prompts get half and responses the rest, up to `LONGEST` each, where their limits are 0.

    Raises ValueError that names file and line for a row that cannot be used.
    """

    data: Read[str]
    name: str = "data"
    subset: Annotated[str | None, _OF_HUB] = None
    split: Annotated[str, _SPLIT] = "train"
    revision: Annotated[str | None, _OF_HUB] = None
    columns: Read[Columns] = Columns()
    template: Read[str | None] = None
    system: Annotated[str | None, _CHATS] = None
    chat: Read[bool | None] = None
    chat_options: Annotated[dict[str, Any], _CHATS] = field(default_factory=dict)
    answer_pattern: Read[str | None] = None
    max_prompt_tokens: Read[int] = 0
    max_response_tokens: Read[int] = 0
    drop_repeated: Read[bool] = False
    held_out_data: Read[str | None] = None
    held_out_split: Annotated[str | None, _HELD_OUT_SPLIT] = None
    held_out_share: Annotated[float, _HELD_OUT_SHARE] = 0.1
    held_out_overlap: Read[Literal["refuse", "drop", "allow"]] = "refuse"
    context: int = field(default=2 * LONGEST, kw_only=True, repr=False, metadata=GIVEN)
    job: JobFacts = field(default=JobFacts(), kw_only=True, repr=False, metadata=GIVEN)

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
        return exact.paying_truncated(sample) if self.job.pay_truncated else exact(sample)  # type: ignore[attr-defined]

    @property
    def summary(self) -> str:
        """A line on what was read and what was left out, and lines on what is odd about it."""
        return str(self._split[2])

    @property
    def census(self) -> dict[str, Any]:
        """The same as numbers."""
        return asdict(self._split[2])

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
        lists_of_one = self.job.reward is not None and is_path(self.job.reward)  # whose code may read JSON
        written = (self.columns, self.template, self.system, self.chat, options, self.answer_pattern, lists_of_one)
        return PromptFormat(*written)

    def _rows(self, source: DataSource) -> Rows:
        limits = {
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_response_tokens": self.job.max_tokens or self.max_response_tokens,
            "drop_repeated": self.drop_repeated,
        }
        return _read(source, source.stamp(), self.tokenizer, self._prompts, self.job, **limits)

    @cached_property
    def _split(self) -> tuple[Sequence[Problem], Sequence[Problem], Census]:
        """Training and held-out problems. Raises ValueError where a prompt is both, and nothing is said of that."""
        rows = self._rows(self._source)
        other = self.held_out_data or (self.data if self.held_out_split and self.data.startswith(HUB) else None)
        if other is None:
            training, held_out = self._parts(rows)
            return training, held_out, Census(len(training), len(held_out), 0, 0, self.job.batch_groups, rows.census)
        apart = self._rows(self._at(other, self.held_out_split or self.split))
        aside, trained = set(apart.prompts), set(rows.prompts)
        shared = sum(prompt in trained for prompt in apart.prompts)
        if shared and self.held_out_overlap == "refuse":
            first = next(p.row for p, prompt in zip(apart.problems, apart.prompts, strict=True) if prompt in trained)
            raise ValueError(
                f"{shared:,} of {len(apart.problems):,} held-out prompts of {other} are trained on, too, the first is "
                f"{first}: set task.held_out_overlap=drop to take them out of training, or allow"
            )
        drop = self.held_out_overlap == "drop"
        pairs = zip(rows.problems, rows.prompts, strict=True)
        training = [problem for problem, prompt in pairs if not drop or prompt not in aside]
        if not training:
            raise ValueError(f"{self.data} holds no problem to train on: {other} has every prompt of it")
        taken_out = len(rows.problems) - len(training)
        told = (0 if drop else shared, taken_out, self.job.batch_groups, rows.census, apart.census)
        return training, apart.problems, Census(len(training), len(apart.problems), *told)

    def _parts(self, rows: Rows) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Rows to train on and to hold out, by their prompts: no prompt is in both parts."""
        prompts = list(dict.fromkeys(rows.prompts))
        aside = round(self.held_out_share * len(prompts))
        if self.held_out_share and len(prompts) > 1:
            aside = max(1, aside)
        order = draws(HELD_OUT_SEED, 0).permutation(len(prompts)).tolist()
        place = {prompts[number]: place for place, number in enumerate(order)}
        by_prompt = sorted(range(len(rows.problems)), key=lambda row: place[rows.prompts[row]])
        held_out = [rows.problems[row] for row in by_prompt if place[rows.prompts[row]] < aside]
        return [rows.problems[row] for row in by_prompt[len(held_out) :]], held_out


@lru_cache(maxsize=4)
def _read(
    source: DataSource,
    stamp: tuple[int, int] | None,
    tokenizer: Tokenizer,
    prompts: PromptFormat,
    job: JobFacts,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    drop_repeated: bool,
) -> Rows:
    """All problems of a source; stamp: of the file, so that another is read anew. Raises ValueError for the first row
    that cannot be used, and where none is left."""
    problems: list[Problem] = []
    said: list[bytes] = []
    answers: dict[bytes, bytes] = {}  # by prompt, the first one
    conflicting: set[bytes] = set()
    lengths: list[int] = []
    answer_lengths: list[int] = []
    too_long = repeated = unreachable = altered = 0
    alters = False
    special, says_answer = not prompts.chats(tokenizer), job.says_answer
    readable = lru_cache(maxsize=_REMEMBERED)(job.reader())
    said_of = lru_cache(maxsize=_REMEMBERED)(partial(_said, tokenizer, max_response_tokens, says_answer))
    for place, row in source.rows():
        try:
            messages, answer = prompts.messages(row, tokenizer), prompts.answer(row)
            text = prompts.written(messages, tokenizer)
            tokens, length = _tokens(tokenizer, text, special, max_prompt_tokens)
            answer.encode()
            if prompts.columns.answer is not None:
                answer_length, alters = said_of(answer)
                _read_by(readable, prompts.columns.answer, answer)
                answer_lengths.append(answer_length)
        except (ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"{place}: {error}") from error
        lengths.append(length)
        if tokens is None:
            too_long += 1
            continue
        prompt, answered = _digest(*(one for m in messages for one in m.values())), _digest(answer)
        if (first := answers.get(prompt)) is None:
            answers[prompt] = answered
        elif first != answered:
            conflicting.add(prompt)
        if drop_repeated and first is not None:
            repeated += 1
            continue
        said.append(prompt)
        altered += bool(answer_lengths) and alters
        unreachable += says_answer and bool(answer_lengths) and answer_lengths[-1] > max_response_tokens
        problems.append(Problem(tokens, answer, place if place.startswith(HUB) else Path(place).name))
    if not problems:
        why = f": all {too_long} prompts have more than {max_prompt_tokens} tokens" if too_long else ""
        raise ValueError(f"{source.name} holds no problem{why}")
    census = Source(
        source.name,
        rows=len(lengths),
        kept=len(problems),
        too_long=too_long,
        repeated=repeated,
        prompt_tokens=Lengths.of(lengths, max_prompt_tokens),
        answer_tokens=Lengths.of(answer_lengths, max_response_tokens) if answer_lengths else None,
        duplicates=len(problems) - len(set(said)),
        conflicting=len(conflicting),
        unreachable=unreachable,
        altered=altered,
    )
    return Rows(problems, said, census)


def _tokens(tokenizer: Tokenizer, text: str, special: bool, most: int) -> tuple[np.ndarray | None, int]:
    """The tokens of a prompt, int64 [n], and how many; None where they are more than `most`, and of a giant text the
    number so far."""
    if len(text) > _PIECE and (counted := _counted(tokenizer, text, most + _JOINT)) > most + _JOINT:
        return None, counted
    tokens = tokenizer.encode(text, special=special)
    return (tokens if len(tokens) <= most else None), len(tokens)


def _counted(tokenizer: Tokenizer, text: str, most: int) -> int:
    """Tokens of a text, made in pieces so that memory is bounded, until they are more than `most`."""
    counted = 0
    for at in range(0, len(text), _PIECE):
        counted += len(tokenizer.encode(text[at : at + _PIECE]))
        if counted > most:
            break
    return counted


def _said(tokenizer: Tokenizer, most: int, says_answer: bool, answer: str) -> tuple[int, bool]:
    """Tokens of an answer and the one that ends a response, and whether the tokenizer says the answer otherwise,
    unknown or in lower case, by the beginning of a giant one. Raises ValueError where a response has to say it, and the
    vocabulary lacks a character of it, or it holds what ends responses."""
    try:
        tokens = tokenizer.encode(answer[:_PIECE])
        length = 1 + (len(tokens) if len(answer) <= _PIECE else _counted(tokenizer, answer, most))
    except ValueError:
        if says_answer:
            raise
        return 1, False
    if not says_answer:
        return length, False
    if end := next((end for end in tokenizer.stop_texts if end in answer.strip()), None):
        raise ValueError(f"the answer {answer!r:.80} holds {end!r}, which ends responses: none can be it")
    return length, normalised(tokenizer.decode(tokens)).strip() != normalised(answer[:_PIECE].strip())


def _read_by(reader: Callable[[str], object], column: str, answer: str) -> None:
    try:
        reader(answer)
    except Exception as error:  # of the user's code, too
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"column {column!r}: {kind}{str(error).partition(chr(10))[0]}") from error


def _digest(*texts: str) -> bytes:
    """Equal where texts say the same: normalised, and white space aside."""
    said = "\0".join(" ".join(normalised(text).split()) for text in texts)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A shuffle of range(rows), int64 [rows], that follows from seed and pass."""
    return draws(seed, epoch).permutation(rows)


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
