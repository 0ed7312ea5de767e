"""The whole queue in one file: its state as of one moment, then frame after frame, then a mark that this was all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from harness.transfer_queue.frames import Frame
from harness.transfer_queue.journal.encoding import Start, decode, encode
from harness.transfer_queue.journal.payload import fetch, restored
from harness.transfer_queue.journal.records import DamagedFile, Piece, RecordWriter, read_records
from harness.transfer_queue.service import QueueService
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.protocol import Storage

KIND = "transfer queue snapshot"
_BATCH_BYTES = 4 << 20  # so much is in memory twice
_BATCH_RECORDS = 256

Work = Callable[[Callable[[], None]], Awaitable[None]]
"""Does what blocks: in a thread, or at once where there can be none."""


async def write_snapshot(
    path: Path, service: QueueService, state: bytes, frames: Sequence[tuple[str, Frame]], work: Work
) -> None:
    """state, frames: of a moment of the service, the state encoded, the frames kept meanwhile. Returns when it is on
    the disk; on any error there is no such file."""
    writer = RecordWriter(path)
    try:
        writer.append(encode(Start.of(KIND, service.spec)))
        writer.append(state)
        batch: list[tuple[bytes, Sequence[Piece]]] = []
        size = 0
        for partition, frame in frames:
            payload = await fetch(service.keeper, partition, frame)
            batch.append((encode((partition, frame.rows, payload.sizes)), payload.pieces))
            size += sum(payload.sizes.values())
            if size >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
                await _finish(work, _appends(writer, batch))
                batch, size = [], 0
        batch.append((encode(None), ()))  # the end
        await _finish(work, _appends(writer, batch))
        await _finish(work, writer.sync)
    except BaseException:
        writer.remove()
        raise
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
    """The state, and the frames by partition. ValueError for a file of another spec, DamagedFile for a damaged one."""
    records = read_records(path)
    frames: dict[str, list[Frame]] = {}
    try:
        Start.read(next(records).message, path, KIND, spec)
        state = decode(next(records).message)
        while (message := decode((record := next(records)).message)) is not None:
            partition, rows, sizes = message
            frame = restored(partition, rows, sizes, record.payload, spec, storage)
            frames.setdefault(partition, []).append(frame)
    except StopIteration:
        raise DamagedFile(f"{path} is damaged: it ends before all frames came") from None
    return state, frames
