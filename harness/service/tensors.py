"""The trainer's weights as files: the newest versions, each whole or not there. And columns of rows
as safetensors: tensors by name, and nothing that could be run.

A dense column is a tensor [k, *shape]; a ragged one its values back to back [sum(lengths)], beside `<column>.lengths`,
int64 [k]. `rows`, int64 [k], are the ids of the rows."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from harness.transfer_queue.rows.columns import Column, Ragged, Rows

_KEPT = 2  # versions: a reader may still open the one before


class WeightFiles:
    """The files of a job's weights. folder: of nobody else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, version: int) -> Path:
        """The place of a version's file, whether it is there or not."""
        return self._folder / f"version_{version}.safetensors"

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """A file aside, which `keep` makes a version of; without, it is gone afterwards."""
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            yield file.file

    def check(self, file: IO[bytes]) -> None:
        """ValueError for what is no safetensors."""
        file.flush()
        try:
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="numpy") as held:
                held.keys()
        except SafetensorError as error:
            raise ValueError(f"the weights are no safetensors: {error}") from error

    def keep(self, file: IO[bytes], version: int) -> None:
        """Make this file that of the version; of older ones few stay."""
        os.link(str(file.name), self.path(version))
        self.path(version - _KEPT).unlink(missing_ok=True)


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
