"""A model for an engine that reads a folder, and replacing the weights of one, which is never used in between."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from engines.host_memory import host_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOGETHER = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_APART = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Piece(NamedTuple):
    """One projection of one expert: its name in files, and rows [start, stop) of its expert in the whole tensor."""

    name: str
    expert: int
    start: int
    stop: int


def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """The parts in files that a parameter of the model consists of; empty where it belongs to no layer's experts."""
    found = _TOGETHER.fullmatch(name)
    if found is None or len(shape) != 3:
        return []
    experts, projections = found[1], _PROJECTIONS[found[2]]
    rows = shape[1] // len(projections)
    return [
        Piece(f"{experts}.{expert}.{projection}.weight", expert, place * rows, (place + 1) * rows)
        for expert in range(shape[0])
        for place, projection in enumerate(projections)
    ]


def file_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Names of all pieces of a parameter; its own name where it has none."""
    return [piece.name for piece in pieces(name, shape)] or [name]


def file_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in files, from those of a model's parameters: the inverse of `together`."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        of_experts = pieces(name, shape)
        found |= {piece.name: (piece.stop - piece.start, shape[2]) for piece in of_experts}
        if not of_experts:
            found[name] = shape
    return found


def apart(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, whole, by their names in files; those of experts are views."""
    for name, tensor in weights:
        of_experts = pieces(name, tuple(tensor.shape))
        for piece in of_experts:
            yield piece.name, tensor[piece.expert, piece.start : piece.stop]
        if not of_experts:
            yield name, tensor


def together(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters, from those of the tensors in files. What does not fit keeps its name."""
    found: dict[str, tuple[int, ...]] = {}
    layers: dict[str, dict[str, list[tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        one = _APART.fullmatch(name)
        if one is None:
            found[name] = shape
        else:
            layers.setdefault(one[1], {}).setdefault(one[3], []).append(shape)
    for experts, of in layers.items():
        for whole, projections in _PROJECTIONS.items():
            each = [of.get(projection, []) for projection in projections]
            if len({tuple(shapes) for shapes in each}) == 1 and len(set(each[0])) == 1:
                rows, columns = each[0][0]
                found[f"{experts}.{whole}"] = (len(each[0]), rows * len(projections), columns)
    return found


T = TypeVar("T")


class ExpectedWeights:
    """Names and shapes of a complete set of the weights that a model gets: all but frozen ones, which it begins with.
    Does not keep the model. `owner` begins every message."""

    def __init__(self, model: torch.nn.Module, owner: str) -> None:
        learnt = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
        self._shapes = {name: tuple(p.shape) for name, p in learnt}
        self._required = {name for name, p in model.named_parameters() if p.requires_grad}
        self._owner = owner

    def checked(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The (name, full tensor) pairs that fit, as they come.

        The iterable is read to its end even where a tensor does not fit, so that a collective behind it completes.

        Raises:
            ValueError: at the end; names are unknown or missing, or shapes are wrong: all of them in one message. A
                parameter that is tied to another one may be missing.
        """
        came, wrong = set[str](), list[str]()
        for name, tensor in weights:
            came.add(name)
            misfit = self._misfit(name, tuple(tensor.shape))
            if misfit is None:
                yield name, tensor
            else:
                wrong.append(misfit)
        self._require_none(wrong, came, f"the weights of version {version}")

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError as `checked` where tensors of these shapes do not fit."""
        misfits = (self._misfit(name, shape) for name, shape in shapes.items())
        self._require_none([misfit for misfit in misfits if misfit is not None], set(shapes), "the trainer's weights")

    def _misfit(self, name: str, shape: tuple[int, ...]) -> str | None:
        expected = self._shapes.get(name)
        if expected is None:
            return f"{name} is unknown"
        return None if expected == shape else f"{name} has shape {shape}, not {expected}"

    def _require_none(self, wrong: list[str], came: set[str], what: str) -> None:
        wrong = wrong + [f"{name} is missing" for name in sorted(self._required - came)]
        if wrong:
            raise ValueError(f"{self._owner}: {what} do not fit: {'; '.join(wrong)}")


def only_partly(owner: str, version: int) -> str:
    """Why an engine does not generate: a load broke off after some weights were in place."""
    return f"{owner}: version {version} was put in place in part only; load a complete set of weights"


async def next_bucket(travelling: Iterator[T]) -> T | None:
    """The next bucket, read in a thread, since that may wait in a collective; None after the last one. Cancelled, it
    waits for the thread, so that there is one reader at a time."""
    reading = asyncio.ensure_future(asyncio.to_thread(next, travelling, None))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait([reading])
        raise


class ModelWeights:
    """The weights of a model. `owner` begins every message.

    A new set is put in place tensor by tensor as it comes, so that nothing is held twice. `incomplete` says so from the
    first of them on until the last one is there: after a set that did not come whole, until another one has.
    """

    incomplete: str | None = None

    def __init__(self, model: torch.nn.Module, owner: str) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._expected, self._owner = ExpectedWeights(model, owner), owner

    @torch.no_grad()
    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all parameters but frozen ones by (name, full tensor) pairs. Raises ValueError as
        `ExpectedWeights.checked`, which reads them."""
        for name, tensor in self._expected.checked(version, weights):
            self.incomplete = only_partly(self._owner, version)
            self._parameters[name].copy_(tensor)
        self.incomplete = None

    def require_complete(self) -> None:
        """Raises RuntimeError where the weights are of two versions."""
        if self.incomplete is not None:
            raise RuntimeError(self.incomplete)


@torch.no_grad()
def rest_on_host(model: torch.nn.Module) -> None:
    """Move a model's weights from a GPU to host memory that is pinned: they go there and back at the speed of the link,
    and what is loaded meanwhile arrives there. What is on the host already stays as it is."""
    moved = [parameter for parameter in model.parameters() if parameter.is_cuda]
    for parameter, host in zip(moved, host_buffers([each.nbytes for each in moved], pinned=True), strict=True):
        parameter.data = host.view(parameter.dtype).view(parameter.shape).copy_(parameter.data)


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's config.json and weights, tied ones once, whichever rank of a training world this process is:
    transformers' own `save_pretrained` writes on the first one only.

    Of a model that is only outlined, parameters on meta, the files that it was read from are linked: nothing is copied.
    Of one with adapters it is the base, which is frozen.

    There is no end-of-sequence token in it: what ends a sample is for its sampling parameters to say, and a server
    would add the model's own.
    """
    from safetensors.torch import save_file

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.eos_token_id = None
    config.save_pretrained(folder)
    if all(parameter.is_meta for parameter in model.parameters()):
        _link_weights(Path(model.config.name_or_path), folder)
        return
    named = dict(model.named_parameters())
    base = {name: parameter for name, parameter in named.items() if not parameter.requires_grad} or named
    whole = ((name, parameter.detach().cpu().contiguous()) for name, parameter in base.items())
    # In a file no two tensors share memory, as experts do.
    weights = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in apart(whole)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _link_weights(source: Path, folder: Path) -> None:
    from harness.config.model_folder import INDEX, SINGLE, weight_map

    index = source / INDEX
    names = {INDEX, *weight_map(index, str(source)).values()} if index.is_file() else {SINGLE}
    for name in names:
        (folder / name).symlink_to((source / name).resolve())
