"""The experts of a layer under two names: transformers computes with all of them in one tensor, `gate_up_proj`
[experts, 2 ff, hidden] and `down_proj` [experts, hidden, ff]; files, vLLM and SGLang have each expert's projections by
themselves, as Qwen3's and OLMoE's checkpoints name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

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
