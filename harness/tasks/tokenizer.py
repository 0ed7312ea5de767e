"""A model's tokenizer: text to tokens and back, what ends a response, and how a chat is written."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from harness.config.plugins import GIVEN
from harness.tasks.task import Problem

CHARACTER_TOKENIZER = Path(__file__).parent / "character_tokenizer"
"""The folder of the shipped tokenizer: 32 characters, a token each."""
_ANSWER = "what-the-model-answered"
"""Stands in a chat for what was sampled, so that it is found again."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model's folder.

    stop_tokens: each ends a response; pad_token: fills the place of no token; chat_template: Jinja, or None.
    Equal where the folder is; pickled as the folder's name.
    """

    folder: Path
    stop_tokens: tuple[int, ...]
    pad_token: int
    chat_template: str | None = field(repr=False, compare=False)
    _text: tokenizers.Tokenizer = field(repr=False, compare=False)

    @property
    def vocabulary_size(self) -> int:
        """Tokens are integers in [0, vocabulary_size)."""
        return vocabulary_size(self._text)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Text to tokens, int64 [n]. special: with what the tokenizer puts around a text, such as its beginning.
        Raises ValueError where the vocabulary lacks a character."""
        try:
            return np.array(self._text.encode(text, add_special_tokens=special).ids, dtype=np.int64)
        except Exception as error:  # the library has no narrower class
            raise ValueError(f"{text!r:.80} holds a character that the tokenizer in {self.folder} lacks") from error

    def chat(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> str:
        """Messages ({"role", "content"}) by the chat template, up to where the model answers. options: the template's
        own, such as enable_thinking. Raises ValueError where there is no template, it refuses the messages, or leaves
        out the last one or what the system says."""
        if self.chat_template is None:
            raise ValueError(f"the tokenizer in {self.folder} has no chat template")
        from jinja2 import TemplateError

        try:
            text: str = _with_template(self.folder).apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, AttributeError, KeyError, OSError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        for number, message in enumerate(messages):
            heard = message["role"] == "system" or number == len(messages) - 1
            if heard and message["content"].strip() not in text:
                raise ValueError(f"the chat template leaves out what the {message['role']} says")
        return text

    def next_message(self, content: str, options: Mapping[str, Any]) -> str:
        """A user's message after the model's: what the chat template writes from the end of the model's answer up to
        where it answers again, without the token that ended the answer. Raises ValueError as `chat` does."""
        messages = (("user", "question"), ("assistant", _ANSWER), ("user", content))
        written = self.chat([{"role": role, "content": text} for role, text in messages], options)
        _, answer, after = written.partition(_ANSWER)
        if not answer:
            raise ValueError("the chat template leaves out what the model answered: it has no second turn")
        return next((after.removeprefix(end) for end in self.stop_texts if after.startswith(end)), after)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The text of each token that ends a response."""
        return tuple(end for token in self.stop_tokens if (end := self._text.id_to_token(token)) is not None)

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens (integers, [n]) to text, special ones included."""
        return self._text.decode(tokens.tolist(), skip_special_tokens=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tokenizer, (self.folder,)


@lru_cache(maxsize=8)
def load_tokenizer(folder: Path = CHARACTER_TOKENIZER) -> Tokenizer:
    """The tokenizer of a folder, which holds tokenizer.json and what transformers writes beside it.

    Responses end in what generation_config.json and config.json name, by id or by text, and in the tokenizer's own end
    of text. Raises ValueError where there is no tokenizer, nothing ends a response, or what is named is no token.
    """
    if not os.path.isfile(folder / "tokenizer.json"):  # Path's raises for what can be no name
        raise ValueError(f"{folder} has no tokenizer.json; save the tokenizer with transformers' save_pretrained")
    try:
        text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library has no narrower class
        raise ValueError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from error
    text.no_truncation()
    text.no_padding()
    settings = _read(folder / "tokenizer_config.json")
    named = {name: _read(folder / name) for name in ("generation_config.json", "config.json")}
    size = named["config.json"].get("vocab_size")
    tokens = max(vocabulary_size(text), size if isinstance(size, int) else 0)
    ends = [_token(text, settings.get("eos_token"))]
    if settings.get("eos_token") and ends == [None]:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: eos_token={settings['eos_token']!r} is no token of its own"
        )
    for name, of_file in named.items():
        ids = of_file.get("eos_token_id")
        for one in ids if isinstance(ids, list) else [ids]:
            ends.append(_named_id(text, one, tokens, f"{folder / name}: eos_token_id={ids!r}"))
        _named_id(text, of_file.get("pad_token_id"), tokens, f"{folder / name}: pad_token_id", least=-1)
    stops = tuple(dict.fromkeys(end for end in ends if end is not None))
    if not stops:
        raise ValueError(f"{folder} names no token that ends a response; set eos_token in its tokenizer_config.json")
    pad = _token(text, settings.get("pad_token"))
    return Tokenizer(folder, stops, stops[0] if pad is None else pad, _chat_template(folder, settings), text)


@lru_cache(maxsize=8)
def _with_template(folder: Path) -> Any:
    """The tokenizer as transformers loads it, which knows what templates are given."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def vocabulary_size(text: tokenizers.Tokenizer) -> int:
    """All tokens are integers below this."""
    return max(text.get_vocab_size(), 1 + max(text.get_added_tokens_decoder(), default=0))


def _named_id(text: tokenizers.Tokenizer, named: Any, tokens: int, where: str, least: int = 0) -> int | None:
    """The id that settings give, as itself or by its text; None where they give none. ValueError, which begins with
    `where`, for one outside of [least, tokens)."""
    if named is None:
        return None
    found = text.token_to_id(named) if isinstance(named, str) else named
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found < tokens:
        raise ValueError(f"{where}: {named!r} is no token; ids are below {tokens:,}: correct the file")
    return found


def _token(text: tokenizers.Tokenizer, named: Any) -> int | None:
    """The id of a token that settings name by its text, or by an object that holds it."""
    content = named.get("content") if isinstance(named, dict) else named
    return text.token_to_id(content) if isinstance(content, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template in a file of its own, or in the tokenizer's settings; of several the one called default."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}.get("default")
    return template


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file. Raises ValueError for what is no JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


@dataclass(frozen=True)
class TextTask:
    """The base of tasks over a tokenizer. tokenizer: of the run's model."""

    tokenizer: Tokenizer = field(default_factory=load_tokenizer, kw_only=True, repr=False, metadata=GIVEN)

    @property
    def vocabulary_size(self) -> int:
        """Tokens of the tokenizer's vocabulary."""
        return self.tokenizer.vocabulary_size

    @property
    def pad_token(self) -> int:
        """The token that fills the place of no token."""
        return self.tokenizer.pad_token

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self.tokenizer.stop_tokens

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens)

    def demonstration(self, problem: Problem) -> np.ndarray:
        """A right response, int64 [n]."""
        return self.said(problem.answer)

    def said(self, text: str) -> np.ndarray:
        """A turn of the policy, int64 [n]: this text, and the token that ends it."""
        return np.append(self.encode(text), self.stop_tokens[0])
