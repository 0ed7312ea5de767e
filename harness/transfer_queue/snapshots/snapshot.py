"""Saving a queue to a folder and loading it.

A snapshot is one file: the state as of one moment, then frame after frame, then a mark that this was all.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.partition import Partition
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.rows.columns import Column, Rows
from harness.transfer_queue.rows.frames import BatchAssignment, Frame, pack, unpack
from harness.transfer_queue.service.service import QueueService, loop_time
from harness.transfer_queue.snapshots.files import (
    SNAPSHOT,
    DamagedSnapshot,
    FileHeader,
    Piece,
    RecordWriter,
    decode,
    encode,
    locked,
    read_records,
    replaced,
    saved_in,
)
from harness.transfer_queue.storage.inline import LocalStorage, inline_buffers
from harness.transfer_queue.storage.protocol import PayloadStore, Storage

_BATCH_BYTES = 4 << 20  # so much is in memory twice
_BATCH_RECORDS = 256

Work = Callable[[Callable[[], None]], Awaitable[None]]
"""Does what blocks: in a thread, or at once where there can be none."""


@dataclass(frozen=True, slots=True)
class Payload:
    """sizes: bytes of each column's buffer; pieces: the buffers, back to back, in any number of pieces."""

    sizes: dict[str, int]
    pieces: list[Piece]


async def fetch(store: PayloadStore, partition: str, frame: Frame) -> Payload:
    """The payload: from the frame, if it carries that itself, or from the store."""
    if isinstance(frame.place, bytes):
        return Payload(dict(frame.sizes), [frame.place])
    if isinstance(frame.place, Mapping):
        arrays = {name: pack(column) for name, column in frame.place.items()}
        pieces: list[Piece] = [array.reshape(-1).view(np.uint8).data for some in arrays.values() for array in some]
        return Payload({name: sum(array.nbytes for array in some) for name, some in arrays.items()}, pieces)
    buffers = await store.fetch(partition, frame)
    return Payload(dict(frame.sizes), [buffers[name].data for name in frame.sizes])


def restored(
    partition: str, rows: int, sizes: dict[str, int], payload: bytes, spec: QueueSpec, storage: Storage | None
) -> Frame:
    """A frame of this payload: written to the storage, or without one carried by itself. ValueError if it cannot be of
    this spec."""
    frame = Frame(rows, sizes, payload)
    frame.check(spec.columns)
    if storage is None:
        return frame
    buffers = inline_buffers(frame)
    return storage.write(partition, {name: unpack(buffers[name], spec.columns[name], rows) for name in sizes})


async def write_snapshot(
    path: Path, service: QueueService, state: bytes, frames: Sequence[tuple[str, Frame]], work: Work
) -> None:
    """state, frames: of a moment of the service, the state encoded, the frames kept meanwhile. Returns when it is on
    the disk."""
    writer = RecordWriter(path)
    try:
        writer.append(encode(FileHeader.of(service.spec)))
        writer.append(state)
        batch: list[tuple[bytes, Sequence[Piece]]] = []
        size = 0
        for partition, frame in frames:
            payload = await fetch(service.store, partition, frame)
            batch.append((encode((partition, frame.rows, payload.sizes)), payload.pieces))
            size += sum(payload.sizes.values())
            if size >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
                await _finish(work, _appends(writer, batch))
                batch, size = [], 0
        batch.append((encode(None), ()))  # the end
        await _finish(work, _appends(writer, batch))
        await _finish(work, writer.sync)
    finally:
        writer.close()


def _appends(writer: RecordWriter, batch: Sequence[tuple[bytes, Sequence[Piece]]]) -> Callable[[], None]:
    def append() -> None:
        for message, payload in batch:
            writer.append(message, payload)

    return append


async def _finish(work: Work, step: Callable[[], None]) -> None:
    """Also when cancelled: a thread cannot be, and the file is not to be closed under it."""
    running = asyncio.ensure_future(work(step))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def read_snapshot(
    path: Path, spec: QueueSpec, storage: Storage | None
) -> tuple[dict[str, Any], dict[str, list[Frame]]]:
    """The state, and the frames by partition. ValueError for a file of another spec, DamagedSnapshot where it is
    damaged."""
    records = read_records(path)
    frames: dict[str, list[Frame]] = {}
    try:
        FileHeader.check(next(records).message, path, spec)
        state = decode(next(records).message)
        while (message := decode((record := next(records)).message)) is not None:
            partition, rows, sizes = message
            frame = restored(partition, rows, sizes, record.payload, spec, storage)
            frames.setdefault(partition, []).append(frame)
    except StopIteration:
        raise DamagedSnapshot(f"{path} is damaged: it ends before all frames came") from None
    return state, frames


async def at_once(step: Callable[[], None]) -> None:
    """Work for an event loop that knows no threads; others run between the steps."""
    step()
    await asyncio.sleep(0)


async def save(service: QueueService, folder: str | os.PathLike[str], work: Work = asyncio.to_thread) -> None:
    """The queue as it is now, in a folder (made if need be) that holds one queue: what it held counts until all is on
    the disk. Puts and gets go on meanwhile. ValueError while another is saved there."""
    with replaced(Path(folder)) as path, service.moment() as (state, frames):
        await write_snapshot(path, service, encode(state), frames, work)


def load(
    spec: QueueSpec,
    store: PayloadStore,
    folder: str | os.PathLike[str],
    now: Callable[[], float] = loop_time,
    storage: Storage | None = None,
) -> QueueService:
    """The queue as it was when it was saved. The folder stays as it is.

    Open leases have as many seconds left as they had. Readers that still live may acknowledge them by their old
    numbers; of the others, `open_leases` names what is to be released, or lost. storage: where payload is written to;
    without one it stays in the memory of this process. ValueError if nothing was saved there, if it is of another spec,
    or in use; DamagedSnapshot, which is one, if it is damaged.
    """
    with locked(Path(folder)):
        state, frames = read_snapshot(saved_in(Path(folder)), spec, storage)
    controller = Controller(spec)
    controller.restore(state["controller"], frames)
    controller.shift(now() - state["now"])
    still_open = {lease.number for lease in controller.open_leases()}
    unconfirmed = {lease: partition for lease, partition in state["unconfirmed"] if lease in still_open}
    return QueueService(spec, store, now, controller, unconfirmed)


@dataclass(frozen=True)
class SavedRows:
    """Rows int64 [k] of one partition, in its order, and their columns."""

    partition: str
    rows: Rows
    columns: Mapping[str, Column]


def saved_rows(folder: str | os.PathLike[str], columns: Sequence[str]) -> Iterator[SavedRows]:
    """Rows of each partition that had all of these columns when the queue was saved. ValueError if none was saved here;
    DamagedSnapshot, which is one, for what was not written like this."""
    path = saved_in(Path(folder))
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


def _spec_of(path: Path) -> QueueSpec:
    """The spec that the file says."""
    try:
        first = next(read_records(path)).message
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
