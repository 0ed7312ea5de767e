"""Plain data and arrays as bytes and back: msgpack, so that no code travels; and what each file begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.transfer_queue.spec import QueueSpec

VERSION = 1
_ARRAY = 1  # type number of the extension: three characters of dtype, then the items


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or len(value.dtype.str) != 3:
            raise NotImplementedError(f"an array {value.dtype} {list(value.shape)} has no place in a file")
        return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} has no place in a file")


def _unpack(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"extension {code} is unknown")
    return np.frombuffer(data[3:], bytes(data[:3]).decode()).copy()


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode = msgspec.msgpack.Decoder(ext_hook=_unpack).decode


class Start(msgspec.Struct, frozen=True):
    """The first message of a file. after: the number of the journal that it continues."""

    kind: str
    spec: dict[str, Any]
    after: int | None = None
    version: int = VERSION

    @classmethod
    def of(cls, kind: str, spec: QueueSpec, after: int | None = None) -> Start:
        return cls(kind, msgspec.to_builtins(spec), after)

    @classmethod
    def read(cls, message: bytes, path: Path, kind: str, spec: QueueSpec) -> Start:
        """ValueError unless the file is of this kind and version, and of a queue of this spec."""
        version = decode(message).get("version")
        if version != VERSION:
            raise ValueError(f"{path} has version {version} of the format; this code reads version {VERSION}")
        start = msgspec.msgpack.decode(message, type=cls)
        if start.kind != kind:
            raise ValueError(f"{path} is a {start.kind}, not a {kind}")
        differences = _differences(start.spec, msgspec.msgpack.decode(encode(msgspec.to_builtins(spec))))
        if differences:
            raise ValueError(f"{path} is of another queue: {'; '.join(differences)}")
        return start


def _differences(there: Any, here: Any, where: str = "spec") -> list[str]:
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return [] if there == here else [f"{where} is {there!r} there, {here!r} here"]
    lines = []
    for key in [*there, *(key for key in here if key not in there)]:
        if key in there and key in here:
            lines += _differences(there[key], here[key], f"{where}.{key}")
        else:
            lines.append(f"{where}.{key} is only {'there' if key in there else 'here'}")
    return lines
