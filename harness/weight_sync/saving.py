"""Weights in files, as transformers and the engines read them: one, or shards and an index of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from engines.loading import apart, file_names
from harness.config.model_folder import INDEX
from harness.weight_sync.plan import gathered

SHARD_BYTES = 5_000_000_000
"""Weights above this are cut into files of at most as much; a larger tensor has one for itself."""


def save_weights(folder: Path, parameters: Mapping[str, torch.Tensor], *, write: bool, most: int = SHARD_BYTES) -> None:
    """All parameters, gathered; every rank calls it, and the one with `write` set writes, a shard at a time: so that
    no more than one of them is in host memory. `folder` is there."""
    from safetensors.torch import save_file

    shards = cut(parameters, most)
    for file, names in shards.items():
        full: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = gathered(parameters[name])
            if write:
                full |= {file_name: part.cpu().clone() for file_name, part in apart([(name, tensor)])}
        if write:
            save_file(full, folder / file, metadata={"format": "pt"})
    if write and len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(_bytes, parameters.values()))},
            "weight_map": {
                file_name: file
                for file, names in shards.items()
                for name in names
                for file_name in file_names(name, tuple(parameters[name].shape))
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def cut(parameters: Mapping[str, torch.Tensor], most: int) -> dict[str, list[str]]:
    """Files, and the names of the tensors in each, in the order of the parameters."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in parameters.items():
        if parts[-1] and size + _bytes(tensor) > most:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += _bytes(tensor)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{k:05}-of-{len(parts):05}.safetensors": names for k, names in enumerate(parts, start=1)}


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the full tensor, wherever its shards are."""
    return tensor.numel() * tensor.dtype.itemsize
