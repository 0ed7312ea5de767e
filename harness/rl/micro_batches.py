"""Micro-batches cut by tokens: memory goes with the tokens of one pass, not with its samples."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.config.job import Layout, TrainingConfig
from harness.protocols import TrainBatch, ValueBatch
from harness.transfer_queue import Ragged, taken

Part = NDArray[np.int64]
"""Indices of samples."""


def cut_by_tokens(lengths: Sequence[int] | NDArray[np.int64], limit: int, layout: Layout) -> list[Part]:
    """Samples of these lengths (prompt and response, tokens) in as few parts as a walk from the longest to the shortest
    makes, each of at most `limit` tokens as `layout` computes them; a sample that is longer by itself is a part alone.

    Padded, a part costs its longest sample for each of its samples, so that samples of like lengths belong together.
    """
    parts: list[list[int]] = []
    longest = total = 0
    for sample in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[sample])
        together = longest * (len(parts[-1]) + 1) if parts and layout == "padded" else total + length
        if not parts or together > limit:
            parts.append([])
            longest, total = length, 0
        parts[-1].append(sample)
        total += length
    return [np.array(part, np.int64) for part in parts]


def cut_further(parts: Sequence[Part], count: int) -> list[Part]:
    """The same samples in `count` parts, by halving the largest; ValueError where there are fewer samples."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda place: len(parts[place]))
        if len(parts[largest]) < 2:
            raise ValueError(f"{len(parts)} samples cannot be cut into {count} parts")
        middle = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:middle], parts[largest][middle:]]
    return parts


def passes_over(
    prompts: Ragged, responses: Ragged, training: TrainingConfig, agreed: Callable[[int], int] | None = None
) -> list[Part]:
    """The samples of each pass over these: all in their order, or by `training.tokens_per_micro_batch`. agreed: of the
    numbers of passes that ranks need the largest, where all of them have to make as many."""
    if training.tokens_per_micro_batch is None:
        return [np.arange(len(prompts.lengths))]
    lengths = prompts.lengths + responses.lengths
    cut = cut_by_tokens(lengths, training.tokens_per_micro_batch, training.layout)
    return cut if agreed is None else cut_further(cut, agreed(len(cut)))


MicroBatch = TypeVar("MicroBatch", TrainBatch, ValueBatch)


def part_of(batch: MicroBatch, part: Part) -> MicroBatch:
    """A micro-batch of these samples, in this order."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    cut: dict[str, Any] = {name: None if column is None else taken(column, part) for name, column in columns.items()}
    return replace(batch, **cut)
