"""TensorBoard's event files, without TensorBoard: records with their lengths around them, each a protocol buffer.

Format: record_writer.h, event.proto and summary.proto of TensorFlow 2.20; torch.utils.tensorboard has `simple_value`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from harness.config import ConfigError

_LARGEST = 1 << 24  # bytes of a record; images and graphs are not read


def read_events(path: Path, data: bytes, notes: list[str]) -> Iterator[tuple[int, str, float]]:
    """Step, name and value of each scalar. A record that is cut off at the end is left out, and said in `notes`. Raises
    ConfigError for another kind of file, with the byte from which on it is none."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        if length > _LARGEST and at + length + 16 > len(data):
            raise ConfigError(f"{path}: no event file from byte {at:,} on: a record of {length:,} bytes; copy it again")
        if at + 16 + length > len(data):
            notes.append(f"the record at byte {at:,} is cut off, and left out")
            return
        try:
            yield from _scalars(data[at + 12 : at + 12 + length])
        except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path}: no event at byte {at:,}; copy it again") from error
        at += 16 + length


def _scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    fields = list(_fields(event))
    step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
    for summary in _messages(event, 5):
        for one in _messages(summary, 1):
            parts = dict(_fields(one))
            value = parts.get(2)
            for tensor in _messages(one, 8):
                inside = dict(_fields(tensor))
                value = inside.get(5, inside.get(4))  # float_val, or its bytes
            if isinstance(value, bytes) and len(value) == 4 and isinstance(name := parts.get(1), bytes):
                yield step, name.decode(), struct.unpack("<f", value)[0]


def _messages(message: bytes, field: int) -> list[bytes]:
    return [value for number, value in _fields(message) if number == field and isinstance(value, bytes)]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: varints as integers, all others as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _varint(message, at)
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"wire type {key & 7}")
        if at + size > len(message):
            raise ValueError("a field beyond its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at + shift // 7] & 127) << shift
        if data[at + shift // 7] < 128:
            return value, at + shift // 7 + 1
    raise ValueError("a varint of more than ten bytes")
