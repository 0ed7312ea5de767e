"""Columns of rows as safetensors: tensors by name, and nothing that could be run.

A dense column is a tensor [k, *shape]; a ragged one its values back to back [sum(lengths)], beside `<column>.lengths`,
int64 [k]. `rows`, int64 [k], are the ids of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from harness.transfer_queue.rows.columns import Column, Ragged, Rows

ROWS = "rows"
LENGTHS = ".lengths"


def encode(rows: Rows, columns: Mapping[str, Column]) -> bytes:
    """Rows as safetensors, which `decode` reads."""
    tensors: dict[str, np.ndarray] = {ROWS: rows}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            tensors |= {name: column.values, name + LENGTHS: column.lengths}
        else:
            tensors[name] = column
    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})


def decode(body: bytes) -> tuple[Rows | None, dict[str, Column]]:
    """The ids, if it has some, and the columns. ValueError for what is no safetensors, or lengths that do not fit."""
    try:
        tensors = load(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the body is no safetensors: {error}") from error
    rows = tensors.pop(ROWS, None)
    if rows is not None and (rows.dtype != np.int64 or rows.ndim != 1):
        raise ValueError(f"{ROWS} must be int64 [k], not {rows.dtype} {list(rows.shape)}")
    lengths = {name: tensors.pop(name) for name in list(tensors) if name.endswith(LENGTHS)}
    columns: dict[str, Column] = dict(tensors)
    for name, counts in lengths.items():
        column = name.removesuffix(LENGTHS)
        if column not in tensors:
            raise ValueError(f"{name} is there, and {column!r} is not")
        columns[column] = Ragged(tensors[column], counts)
    return rows, columns
