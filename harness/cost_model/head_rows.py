"""The rows of logits that exist at a time: the one rule of the output layer (harness/rl/log_probs.py) and of plans of
its memory. It follows from shapes and a setting, never from what is free: the same job rounds alike every time."""

from __future__ import annotations

from dataclasses import dataclass

_CHUNKS_PER_PRODUCT = 4
"""Gradients that wait for a product, by the bytes of a chunk."""


@dataclass(frozen=True)
class HeadRows:
    """The output layer's matrix on a rank, [columns, hidden] numbers of `itemsize` bytes. limit: bytes of float32
    logits at a time (training.logit_bytes)."""

    columns: int
    hidden: int
    itemsize: int
    limit: int

    @property
    def chunk(self) -> int:
        """Rows of float32 logits at a time, one at least; a row is never split."""
        return max(1, self.limit // (4 * self.columns))

    def product(self, rows: int) -> int:
        """How many, of so many rows, have their gradients by the logits made for one product: whole chunks in four
        times the limit. What several products add up is a float32 [columns, hidden]: all rows wait for one product
        where they fit into those bytes as well."""
        row, waiting = self.columns * self.itemsize, _CHUNKS_PER_PRODUCT * self.limit
        if rows * row <= waiting + 4 * self.columns * self.hidden:
            return rows
        return self.chunk * max(1, waiting // (self.chunk * row))
