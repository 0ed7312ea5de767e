"""Prompts and answers from rows: columns, templates, chats."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from harness.config.fields import whole_number
from harness.tasks.data_source import Row, text_of
from harness.tasks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Columns:
    """The columns of a row by their meaning; `a.b` is b within a. answer: None where the reward reads none."""

    prompt: str = "prompt"
    answer: str | None = "answer"


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts and answers.

    template: text around columns, as in `{prompt} Answer in words.`; system: the first message of a chat; chat: by the
    tokenizer's chat template (None: where it has one), with these chat_options (JSON), such as enable_thinking;
    answer_pattern: a regular expression whose last match, or its first group, is the answer; lists_of_one: whether a
    list of one value may be an answer, as JSON.
    """

    columns: Columns
    template: str | None
    system: str | None
    chat: bool | None
    chat_options: str
    answer_pattern: str | None
    lists_of_one: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError where these cannot work together."""
        if self.chat and tokenizer.chat_template is None:
            raise ValueError(f"chat=true: the tokenizer in {tokenizer.folder} has no chat template; leave it out")
        options = json.loads(self.chat_options)
        unused = [name for name, value in (("system", self.system), ("chat_options", options)) if value]
        if unused and not self.chats(tokenizer):
            raise ValueError(f"{unused[0]} is for chats: this model's tokenizer has no chat template, or chat=false")
        if self.answer_pattern is not None:
            try:
                re.compile(self.answer_pattern)
            except re.error as error:
                raise ValueError(f"answer_pattern={self.answer_pattern} is no regular expression: {error}") from error
        if self.template is not None:
            try:
                places = [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]
            except ValueError as error:
                raise ValueError(f"template={self.template}: {error}; write braces that are text twice") from error
            if not places or not all(re.fullmatch(r"\w+", name) for name in places):
                raise ValueError(f"template={self.template} needs the names of columns in braces, such as {{prompt}}")

    def messages(self, row: Row, tokenizer: Tokenizer) -> list[dict[str, str]]:
        """The chat, or the one text, that the row asks. Raises ValueError for a row that has none."""
        asked = value_at(row, self.columns.prompt)
        asked = _text(self.columns.prompt, asked) if isinstance(asked, bytes) else asked
        messages = _as_messages(asked)
        if messages is None:
            if not isinstance(asked, str) or not asked.strip():
                raise ValueError(f"column {self.columns.prompt!r} must hold a text or chat messages, not {asked!r:.60}")
            messages = [{"role": "user", "content": self._fill(row, asked)}]
        elif self.template is not None:
            raise ValueError(f"column {self.columns.prompt!r} holds messages: a template is for texts")
        last = messages[-1]["content"].rstrip()
        if end := next((end for end in tokenizer.stop_texts if last.endswith(end)), None):
            raise ValueError(f"column {self.columns.prompt!r} ends in {end!r}, which ends responses: take it out")
        if len(messages) > 1 and not self.chats(tokenizer):
            raise ValueError(f"column {self.columns.prompt!r} holds a chat, and there is no chat template")
        return messages

    def written(self, messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> str:
        """The text that the model is given."""
        if not self.chats(tokenizer):
            return messages[0]["content"]
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        return tokenizer.chat(messages, json.loads(self.chat_options))

    def answer(self, row: Row) -> str:
        """The answer that the reward reads. Raises ValueError for a row that has none."""
        if self.columns.answer is None:
            return ""
        value = value_at(row, self.columns.answer)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"column {self.columns.answer!r} is empty; give the answer, or set columns.answer=null")
        text = _text(self.columns.answer, value, lists_of_one=self.lists_of_one)
        if self.answer_pattern is None:
            return text
        found = list(re.finditer(self.answer_pattern, text))
        if not found:
            raise ValueError(f"column {self.columns.answer!r} has no match of {self.answer_pattern}: {text[-60:]!r}")
        return found[-1].group(1 if found[-1].re.groups else 0).strip()

    def chats(self, tokenizer: Tokenizer) -> bool:
        """Whether prompts are written by the tokenizer's chat template."""
        return tokenizer.chat_template is not None if self.chat is None else self.chat

    def _fill(self, row: Row, asked: str) -> str:
        if self.template is None:
            return asked
        values: dict[str, Any] = {"prompt": asked}
        for _, name, form, _ in Formatter().parse(self.template):
            if name is not None and name not in values:
                if name not in row:
                    raise ValueError(f"the template names column {name!r}; there are {', '.join(row)}")
                text = _text(name, row[name])
                values[name] = row[name] if form else text  # a form, such as {n:03d}, is of a number
        return self.template.format_map(values)


def _text(column: str, value: Any, *, lists_of_one: bool = False) -> str:
    try:
        return text_of(value, lists_of_one=lists_of_one)
    except ValueError as error:
        raise ValueError(f"column {column!r} {error}") from error


def value_at(row: Row, column: str) -> Any:
    """The value of a column, or inside of it: `a.b`, `a.0`. Raises ValueError, which names what columns there are."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if isinstance(value, list) and (index := whole_number(name)) is not None and index < len(value):
            value = value[index]
            continue
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"there is no column {column!r}; the row has {', '.join(row) or 'none'}")
        value = value[name]
    return value


def _as_messages(value: Any) -> list[dict[str, str]] | None:
    """A chat, as data sets hold it; None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return None
    return [{"role": message["role"], "content": message["content"]} for message in value]
