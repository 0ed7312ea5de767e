"""The state of training: weights, AdamW's moments, the number of steps, and the random state, in a file of each rank.

A file is safetensors: numbers by name, and in its header where each lies in the whole tensor; nothing is unpickled.
Every rank writes the parts that it holds and reads those that it needs, whichever rank wrote them: another number of
ranks, or another mesh, may go on.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from engines.torch.first_weights import Part, local_part, part_of_tensor

FORMAT = "cadence training state 1"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Place:
    """The place of a file's tensor in the whole one."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True)
class _Header:
    rank: int
    ranks: int
    places: dict[str, Place]


_HEADER = TypeAdapter(_Header)


@dataclass(frozen=True)
class TrainingState:
    """One rank's share at one moment, in host memory."""

    rank: int
    ranks: int
    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, Place]

    def write(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Write this rank's file, which is on the disk when this returns: name -> (bytes, SHA-256). Raises
        FileExistsError where it is there already."""
        from safetensors.torch import save_file

        path = folder / f"rank-{self.rank:05}.safetensors"
        if path.exists():
            raise FileExistsError(f"{path} is there already; save into a new folder")
        header = _HEADER.dump_json(_Header(self.rank, self.ranks, dict(self.places))).decode()
        save_file(dict(self.tensors), path, metadata={"format": FORMAT, "state": header})
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        return {path.name: (path.stat().st_size, digest)}


def training_state(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW, step: torch.Tensor, *, rank: int, ranks: int
) -> TrainingState:
    """A copy of this rank's share, as it is now. step: steps so far, int64 []."""
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Place] = {}
    for name, tensor in _named(parameters, optimizer, step).items():
        part, here = part_of_tensor(tensor), local_part(tensor).detach()
        if here.numel():
            tensors[name] = here.to("cpu", copy=True).contiguous()
            places[name] = Place(tuple(tensor.shape), tuple(cut.start for cut in part))
    random = torch.get_rng_state()
    tensors[f"random.{rank}"], places[f"random.{rank}"] = random, Place(tuple(random.shape), (0,))
    return TrainingState(rank, ranks, tensors, places)


@torch.no_grad()
def load_training(
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    step: torch.Tensor,
    *,
    rank: int,
    ranks: int,
) -> None:
    """Replace weights, moments and the number of steps so far (int64 []) by those of `folder`, in place; the random
    state, too, where as many ranks wrote it.

    Raises FileNotFoundError where a rank's file is missing, ValueError where a file is none of this format, or of
    another model.
    """
    with SavedState(folder) as saved:
        for name, tensor in _named(parameters, optimizer, step).items():
            saved.read(name, tuple(tensor.shape), part_of_tensor(tensor), local_part(tensor).detach())
        if saved.ranks == ranks:
            torch.set_rng_state(saved.whole(f"random.{rank}"))


class SavedState:
    """All ranks' files of a folder, opened while the context lasts: no more is read than what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks = folder, 0
        self._stack = ExitStack()
        self._files: dict[str, list[tuple[Any, Place, tuple[int, ...]]]] = {}

    def __enter__(self) -> Self:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self.folder.glob("rank-*.safetensors"))
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                header = self._header(path, file.metadata() or {})
            except (SafetensorError, ValidationError) as error:
                raise ValueError(f"{path} holds no state of training: {error}") from error
            self.ranks = header.ranks
            for name, place in header.places.items():
                there = tuple(file.get_slice(name).get_shape())
                parts = self._files.setdefault(name, [])
                if all((place.start, there) != (other.start, size) for _, other, size in parts):  # else it is the same
                    parts.append((file, place, there))
        if not paths or len(paths) != self.ranks:
            raise FileNotFoundError(f"{self.folder} holds {len(paths)} of the files of {self.ranks or 'any'} ranks")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...], wanted: Part, into: torch.Tensor) -> None:
        """Fill `into` with this part of a tensor of this shape. ValueError where it is not all there."""
        if not into.numel():
            return
        if name not in self._files:
            raise ValueError(f"{self.folder} is of another model: it has no {name}")
        covered = 0
        for file, place, there in self._files[name]:
            if place.shape != shape:
                raise ValueError(
                    f"{self.folder} is of another model: {name} has shape {list(place.shape)} there, {list(shape)} here"
                )
            if (cuts := _overlap(wanted, place.start, there)) is None:
                continue
            from_file, here = cuts
            into[here] = file.get_slice(name)[from_file] if shape else file.get_tensor(name)
            covered += into[here].numel()
        if covered != into.numel():
            raise ValueError(f"{self.folder} lacks a part of {name}: {covered} of {into.numel()} numbers are there")

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that one rank wrote whole."""
        ((file, _, _),) = self._files[name]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    @staticmethod
    def _header(path: Path, metadata: Mapping[str, str]) -> _Header:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is of format {metadata.get('format')!r}; this code reads {FORMAT!r}")
        return _HEADER.validate_json(metadata.get("state", ""))


def _overlap(wanted: Part, start: Sequence[int], size: Sequence[int]) -> tuple[Part, Part] | None:
    """The part that both have, counted from the file's first and from the wanted first; None where that is nothing."""
    from_file, here = list[slice](), list[slice]()
    for cut, first, length in zip(wanted, start, size, strict=True):
        low, high = max(cut.start, first), min(cut.stop, first + length)
        if low >= high:
            return None
        from_file.append(slice(low - first, high - first))
        here.append(slice(low - cut.start, high - cut.start))
    return tuple(from_file), tuple(here)


@torch.no_grad()
def _named(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW, step: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """The tensors themselves, by names; moments that AdamW would make at its first step are made now."""
    named = dict(_with_moments(parameters, optimizer))
    return named | {"training.steps": step}


def _with_moments(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        yield f"weight.{name}", parameter
        for moment in _MOMENTS:
            yield f"{moment}.{name}", optimizer.state[parameter][moment]
