"""Frames at hand for tests of a storage alone: what is written, and assignments made up of it."""

import numpy as np

from harness.transfer_queue.rows.columns import Column, ColumnSpec, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment, Frame, Part

DENSE = {"reward": ColumnSpec("float32"), "mask": ColumnSpec("bool", shape=(3,))}
SPECS = {"tokens": ColumnSpec("int64", ragged=True)} | DENSE


def tokens(rows: range) -> Ragged:
    return Ragged.from_rows([np.full(row % 5, row, np.int64) for row in rows], np.int64)


def columns(rows: range) -> dict[str, Column]:
    mask = np.array([[row % 2, row % 3, row % 5] for row in rows], bool)
    return {"tokens": tokens(rows), "reward": np.array(rows, np.float32), "mask": mask}


def assignment(*runs: tuple[Frame, int, int], names: tuple[str, ...] = tuple(SPECS)) -> BatchAssignment:
    """Rows start to stop of each of these frames, of partition train_0."""
    part = Part(names, tuple((f, start, stop) for f, (_, start, stop) in enumerate(runs)))
    rows = np.arange(sum(stop - start for _, start, stop in runs))
    return BatchAssignment(1, "train_0", rows, tuple(frame for frame, _, _ in runs), (part,))


def assert_read(got: dict[str, Column], rows: list[int]) -> None:
    """What was read is what `columns` made of these rows, and the reader's own."""
    ragged, reward, mask = got["tokens"], got["reward"], got["mask"]
    assert isinstance(ragged, Ragged) and isinstance(reward, np.ndarray) and isinstance(mask, np.ndarray)
    assert [row.tolist() for row in ragged.rows()] == [[row] * (row % 5) for row in rows]
    assert reward.tolist() == rows
    assert mask.tolist() == [[bool(row % 2), bool(row % 3), bool(row % 5)] for row in rows]
    for array in (ragged.values, ragged.lengths, reward, mask):
        array[:] = 0
