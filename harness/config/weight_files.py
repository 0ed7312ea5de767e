"""Weight files of a model's folder, by their headers alone: which tensors they hold, of which shapes and types; and
bytes of a few of them. Needs no torch.

A safetensors file begins with the length of its header, uint64 in little-endian order, and the header, a JSON object:
for each tensor its dtype, its shape, and where its bytes are behind the header
(https://github.com/huggingface/safetensors#format). Files of pickles (.bin, .pt) are never read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.fields import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes, as the library has it
_CHUNK = 1 << 20

_EXPONENTS = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}
_EXPONENTS["F64"] = (np.uint64, 0x7FF0000000000000)
"""Types that weights are read in: integers of their size, and the bits of the exponent, all set in NaN and infinity."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. start, end: of its bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes, at most 1 MiB at a time."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            for left in range(self.end - self.start, 0, -_CHUNK):
                yield file.read(min(left, _CHUNK))

    @property
    def is_float(self) -> bool:
        """Whether it is of a type that weights are read in."""
        return self.dtype in _EXPONENTS

    @property
    def finite(self) -> bool:
        """Whether all of its numbers are."""
        integers, exponent = _EXPONENTS[self.dtype]
        wanted = integers(exponent)
        return not any(((np.frombuffer(chunk, integers) & wanted) == wanted).any() for chunk in self.chunks())


def stored_tensors(folder: Path, where: str) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name: of the files that its index names, else of model.safetensors. where: begins the
    messages.

    Raises ConfigError for a file that is missing, cut off or none of this format, and an index that does not say what
    its files hold.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            there = some(sorted(file.name for file in folder.glob("*.safetensors"))) or "no *.safetensors"
            raise ConfigError(
                f"{where} holds {there}, and neither {SINGLE} nor {INDEX}; name a folder with a whole model"
            )
        return _header(folder / SINGLE, where)
    placed = _index(index, where)
    if (folder / SINGLE).is_file() and SINGLE not in placed.values():
        raise ConfigError(
            f"{where}: {INDEX} names other files than {SINGLE}, which is there, too; remove one of the two"
        )
    found: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(placed.values()):
        if not (folder / name).is_file():
            raise ConfigError(f"{where}: {name}, which {INDEX} names, is not there; download or copy it again")
        held = _header(folder / name, where)
        for tensor in held:
            if placed.get(tensor) != name:
                says = f"has it in {placed[tensor]}" if tensor in placed else "does not name it"
                raise ConfigError(f"{where}: {name} holds {tensor}, and {INDEX} {says}; save the model again")
        found |= held
    if lacking := sorted(placed.keys() - found.keys()):
        raise ConfigError(
            f"{where}: {placed[lacking[0]]} lacks {some(lacking)}, which {INDEX} has there; save the model again"
        )
    return found


def some(names: list[str]) -> str:
    """The first few of these names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _index(path: Path, where: str) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {path.name} is no index of weights ({error!r}); copy it again") from error
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(f"{where}: {path.name} has no weight_map of tensors and files; copy it again")
    for file in placed.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{where}: {path.name} names {file}, which is no .safetensors file of this folder")
    return placed


def _header(path: Path, where: str) -> dict[str, StoredTensor]:
    def bad(why: str) -> ConfigError:
        return ConfigError(f"{where}: {path.name} {why}; download or copy it again")

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise bad(f"is cut off or no safetensors file: it has {size:,} bytes, and a header of {length:,}")
        try:
            header = json.loads(file.read(length))
            tensors = {name: _stored(path, 8 + length, told) for name, told in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise bad(f"has a header that cannot be read ({error!r:.100})") from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise bad(f"is {'cut off' if size < end else 'too long'}: it has {size:,} bytes, by its header {end:,}")
    for name, tensor in tensors.items():
        if not tensor.is_float:
            continue
        integers, _ = _EXPONENTS[tensor.dtype]
        if tensor.end - tensor.start != math.prod(tensor.shape) * np.dtype(integers).itemsize:
            raise bad(f"gives {name} {tensor.end - tensor.start:,} bytes, which its shape {list(tensor.shape)} has not")
    return tensors


def _stored(path: Path, behind: int, told: Mapping[str, Any]) -> StoredTensor:
    start, end = (int(offset) for offset in told["data_offsets"])
    return StoredTensor(
        path, str(told["dtype"]), tuple(int(size) for size in told["shape"]), behind + start, behind + end
    )


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(one.chunks(), other.chunks(), strict=True))
