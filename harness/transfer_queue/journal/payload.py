"""The buffers of frames on their way to a file and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.transfer_queue.frames import Frame, pack, unpack
from harness.transfer_queue.journal.records import Piece
from harness.transfer_queue.spec import QueueSpec
from harness.transfer_queue.storage.inline import inline_buffers
from harness.transfer_queue.storage.protocol import Keeper, Storage


@dataclass(frozen=True, slots=True)
class Payload:
    """sizes: bytes of each column's buffer; pieces: the buffers, back to back, in any number of pieces."""

    sizes: dict[str, int]
    pieces: list[Piece]


def at_hand(frame: Frame) -> Payload | None:
    """The payload of a frame that carries it itself; None if a storage has it."""
    if isinstance(frame.place, bytes):
        return Payload(dict(frame.sizes), [frame.place])
    if not isinstance(frame.place, Mapping):
        return None
    packed = {name: [_bytes_of(array) for array in pack(column)] for name, column in frame.place.items()}
    sizes = {name: sum(map(len, pieces)) for name, pieces in packed.items()}
    return Payload(sizes, [piece for pieces in packed.values() for piece in pieces])


async def fetch(keeper: Keeper, partition: str, frame: Frame) -> Payload:
    """The payload, wherever it is."""
    carried = at_hand(frame)
    if carried is not None:
        return carried
    buffers = await keeper.fetch(partition, frame)
    return Payload(dict(frame.sizes), [buffers[name].data for name in frame.sizes])


def restored(
    partition: str, rows: int, sizes: Mapping[str, int], payload: bytes, spec: QueueSpec, storage: Storage | None
) -> Frame:
    """A frame of this payload: written to the storage, or without one carried by itself. ValueError if it cannot be of
    this spec."""
    frame = Frame(rows, sizes, payload)
    frame.check(spec.columns)
    if storage is None:
        return frame
    buffers = inline_buffers(frame)
    return storage.write(partition, {name: unpack(buffers[name], spec.columns[name], rows) for name in sizes})


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
