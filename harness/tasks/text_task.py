"""The base of tasks over a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harness.config.plugins import GIVEN
from harness.tasks.task import Problem
from harness.tasks.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TextTask:
    """tokenizer: of the run's model."""

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
