"""The rows of a queue that was saved, for a queue that may be of another spec."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.partition import Partition
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.rows.columns import Column, Rows
from harness.transfer_queue.rows.frames import BatchAssignment
from harness.transfer_queue.snapshots.files import SNAPSHOT, DamagedSnapshot, FileHeader, Folder, read_records
from harness.transfer_queue.snapshots.snapshot import read_snapshot
from harness.transfer_queue.storage.inline import LocalStorage


@dataclass(frozen=True)
class SavedRows:
    """Rows int64 [k] of one partition, in its order, and their columns."""

    partition: str
    rows: Rows
    columns: Mapping[str, Column]


def saved_rows(folder: str | os.PathLike[str], columns: Sequence[str]) -> Iterator[SavedRows]:
    """Rows of each partition that had all of these columns when the queue was saved. ValueError if none was saved here;
    DamagedFile, which is one, for what was not written like this."""
    files = Folder(folder)
    number = files.current() if files.path.is_dir() else None
    if number is None:
        raise ValueError(f"no queue was saved in {folder}")
    path = files.snapshot(number)
    spec = _spec_of(path)
    storage, controller = LocalStorage(), Controller(spec)
    state, frames = read_snapshot(path, spec, storage)
    controller.restore(state["controller"], frames)
    for name in frames:
        partition = controller.partition(name)
        positions = _with_all(partition, columns)
        if positions.size:
            located = partition.locate(positions, columns)
            rows = partition.rows[positions]
            yield SavedRows(name, rows, storage.read(BatchAssignment(0, name, rows, *located), spec.columns))


def _spec_of(path: os.PathLike[str]) -> QueueSpec:
    """The spec that the file says."""
    try:
        first = next(read_records(path)).message  # type: ignore[arg-type]
        header = msgspec.msgpack.decode(first, type=FileHeader)
        if header.kind != SNAPSHOT:
            raise DamagedSnapshot(f"{path} is a {header.kind}, not a {SNAPSHOT}")
        return msgspec.convert(header.spec, QueueSpec)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise DamagedSnapshot(f"{path} does not begin as the snapshot of a queue") from error


def _with_all(partition: Partition, columns: Sequence[str]) -> Rows:
    lacking = partition.lacking(np.arange(partition.rows.size), columns)
    positions: Rows = np.flatnonzero(~lacking)
    return positions
