"""The 32 characters that every built-in task is written in: tokens without a tokenizer."""

from __future__ import annotations

import numpy as np

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
