"""The weights that a model starts with, read or drawn tensor by tensor, each process only what it keeps.

A model is outlined first: its modules with parameters that have shapes and no memory. It may then be cut, into shards
or by layers; and `fill` gives what is left of every parameter its memory and its values. So no process, and no device,
holds more than its part of the model and one tensor besides: of a folder the bytes of that part are read; what is drawn
is drawn whole, a tensor at a time, since the numbers are those of one random stream, on however many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from engines.loading import Piece, pieces, together
from harness.config.model_folder import INDEX, SINGLE, weight_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = tuple[slice, ...]
"""A slice for each dimension of a tensor."""


class FirstWeights(Protocol):
    """A source of parameters' values."""

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, part) of each wanted parameter, in any order; a tensor is valid until the next is asked for."""


@dataclass(frozen=True)
class Outline:
    """A model whose parameters are on meta; where their values are; and the dtype that these are rounded to, whatever
    dtype the parameters have by then."""

    model: PreTrainedModel
    weights: FirstWeights
    dtype: torch.dtype

    @property
    def in_files(self) -> bool:
        """Whether the weights lie in safetensors files under the model's own names."""
        return getattr(self.weights, "in_files", False)

    def fill(self, device: torch.device | str) -> PreTrainedModel:
        """Give every parameter of `model`, DTensors too, its memory on `device` and its values; tied ones stay tied.
        Buffers stay where they are. Raises ValueError for a number that is not finite."""
        filled = {parameter: _parameter_like(parameter, device) for parameter in self.model.parameters()}
        here, wanted = {}, {}
        for name, parameter in self.model.named_parameters():
            new = filled[parameter].data
            here[name] = local_part(new)
            if here[name].numel():
                wanted[name] = part_of_tensor(new)
        for name, part in self.parts(wanted):
            here[name].copy_(part)
        _replace(self.model, filled)
        return self.model

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, part) of each wanted parameter in `dtype`, as `FirstWeights.parts`. Raises ValueError for a number
        that is not finite."""
        for name, part in self.weights.parts(wanted):
            if not torch.stack(torch.aminmax(part)).isfinite().all():  # of several numbers NaN is least and largest
                raise ValueError(
                    f"{name} in {self.model.config.name_or_path} holds NaN or infinity; name another checkpoint"
                )
            yield name, part.to(self.dtype)


class WholeWeights:
    """The weights of a model that has them all on the host, and is left without: for what transformers alone can
    read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = {name: parameter.data for name, parameter in model.named_parameters()}
        to_meta(model)

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in wanted.items():
            yield name, self._tensors[name][part]


class SavedWeights:
    """Weights in safetensors files, of which only the wanted parts are read. files: by names of tensors, experts each
    by itself."""

    in_files = True

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        of_experts = {
            name: _overlapping(pieces(name, self.shapes[name]), part)
            for name, part in wanted.items()
            if name not in self._files
        }
        needed = [piece.name for found in of_experts.values() for piece in found]
        with _opened({self._files[name] for name in (*needed, *(wanted.keys() - of_experts.keys()))}) as handles:
            for name, part in wanted.items():
                if name not in of_experts:
                    yield name, handles[self._files[name]].get_slice(name)[part]
                else:
                    experts, rows, columns = part
                    read = [
                        handles[self._files[piece.name]].get_slice(piece.name)[_rows(piece, rows), columns]
                        for piece in of_experts[name]
                    ]
                    yield name, torch.cat(read).view(experts.stop - experts.start, rows.stop - rows.start, -1)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter in the files."""
        with _opened(set(self._files.values())) as handles:
            return together(
                {name: tuple(handles[file].get_slice(name).get_shape()) for name, file in self._files.items()}
            )


def _overlapping(of_experts: Sequence[Piece], part: Part) -> list[Piece]:
    """The pieces that share elements with the part."""
    experts, rows, _ = part
    return [
        piece
        for piece in of_experts
        if experts.start <= piece.expert < experts.stop and piece.start < rows.stop and rows.start < piece.stop
    ]


def _rows(piece: Piece, wanted: slice) -> slice:
    """The wanted rows that the piece has, counted from its first."""
    return slice(max(wanted.start, piece.start) - piece.start, min(wanted.stop, piece.stop) - piece.start)


@contextmanager
def _opened(files: set[Path]) -> Iterator[dict[Path, Any]]:
    from safetensors import safe_open

    with ExitStack() as stack:
        yield {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}


def saved_weights(folder: Path) -> SavedWeights | None:
    """Weights of a folder as transformers writes it; None where its files are named otherwise."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return SavedWeights({name: folder / file for name, file in weight_map(index, str(folder)).items()})
    if not single.is_file():
        return None
    with _opened({single}) as handles:
        return SavedWeights(dict.fromkeys(handles[single].keys(), single))


class DrawnWeights:
    """Numbers of one random stream: `draws`, carried out in their order, each in the same room of memory, the
    largest's. After those that `last` names, a parameter's value stands there. constants: parameters that are none of
    them."""

    def __init__(
        self, draws: Sequence[Draw], last: Mapping[str, int], constants: Mapping[str, torch.Tensor], seed: int
    ) -> None:
        self._draws, self._constants, self._seed = draws, constants, seed
        self._named = {number: name for name, number in last.items()}

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        """Parts drawn on torch's default device, with a generator of their own."""
        for name in wanted.keys() & self._constants.keys():
            yield name, self._constants[name][wanted[name]]
        device = torch.get_default_device()
        generator = torch.Generator(device).manual_seed(self._seed)
        room = torch.empty(max((draw.bytes for draw in self._draws), default=0), dtype=torch.uint8, device=device)
        for number, draw in enumerate(self._draws):
            name = self._named.get(number, "")
            if name in wanted or draw.random:
                drawn = draw.on(room[: draw.bytes].view(draw.dtype).view(draw.shape), generator)
                if name in wanted:
                    yield name, drawn[wanted[name]]


class Draw:
    """One call that fills a tensor."""

    def __init__(self, fill: Callable[..., torch.Tensor], target: torch.Tensor, arguments: Sequence[Any]) -> None:
        self._fill, self._arguments = fill, arguments
        self.shape, self.dtype, self.random = tuple(target.shape), target.dtype, fill in _RANDOM
        self.bytes = target.nbytes

    def on(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Fill a tensor as the model would have filled it."""
        return self._fill(tensor, *self._arguments, **({"generator": generator} if self.random else {}))


_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_FILLS = (*_RANDOM, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class _Outlining(TorchDispatchMode):
    """A mode in which models are made: tensors to be filled get no memory, and what fills them is noted. Buffers that
    are computed, such as rotary frequencies, are."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self.targets: list[torch.Tensor] = []  # of draws; held so that no two of them have the same storage

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten.empty.memory_format:
            return op(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        if op in _RANDOM or (op in _FILLS and args[0].is_meta):  # a router begins as zeros, and is drawn all the same
            self.draws.append(Draw(op, args[0], args[1:]))
            self.targets.append(args[0].detach())
            return args[0]
        return op(*args, **kwargs)


def without_weights(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Call `make` and return its model with parameters on meta, however it would have filled them. Its buffers are
    there."""
    with _Outlining():
        model = make()
    to_meta(model)
    return model


def outlined(make: Callable[[], PreTrainedModel], seed: int) -> tuple[PreTrainedModel, DrawnWeights]:
    """The model that `make` returns, with its parameters on meta, and the values that they would have had: those of
    torch's global generator after `manual_seed(seed)`. Its buffers are there. The global random state stays as it was.

    Raises NotImplementedError where a parameter's value is not drawn all at once.
    """
    with _Outlining() as outlining:
        model = make()
    last = {_storage(target): number for number, target in enumerate(outlining.targets)}
    numbers, constants = {}, {}
    for name, parameter in list(model.named_parameters()):
        number = last.get(_storage(parameter))
        if number is None and not parameter.is_meta:
            constants[name] = parameter.data
        elif number is None or outlining.draws[number].shape != tuple(parameter.shape):
            raise NotImplementedError(f"{type(model).__name__} draws {name} in parts; give a folder with weights")
        else:
            numbers[name] = number
    to_meta(model)
    return model, DrawnWeights(outlining.draws, numbers, constants, seed)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def to_meta(model: torch.nn.Module) -> None:
    """Leave a model's parameters nothing but their shapes."""
    _replace(model, {parameter: _parameter_like(parameter, "meta") for parameter in model.parameters()})


def _parameter_like(parameter: torch.nn.Parameter, device: torch.device | str) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of_tensor(tensor: torch.Tensor) -> Part:
    """Slices of the whole tensor that this process holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    return _slices(*compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements))


def parts_of_ranks(tensor: DTensor) -> Mapping[int, Part]:
    """Slices of the whole tensor that each rank holds, in the order of ranks; several may hold the same."""
    return _parts_of_ranks(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@cache
def _parts_of_ranks(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[int, Part]:
    places = {int(mesh.mesh[place]): list(place) for place in product(*map(range, mesh.shape))}
    return {
        rank: _slices(*_compute_local_shape_and_global_offset(shape, mesh.shape, place, placements))
        for rank, place in sorted(places.items())
    }


def _slices(sizes: Sequence[int], starts: Sequence[int]) -> Part:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _replace(model: torch.nn.Module, by: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Replace a parameter everywhere in `model`, also where one is tied to another."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, by[parameter])
