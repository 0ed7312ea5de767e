"""A model in files, as transformers and the engines read it: its configuration, and weights in one file, or in shards
with an index of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engines.loading import apart, file_names
from harness.config import ModelConfig, TrainingConfig
from harness.config.model_folder import INDEX, read_config
from harness.weight_sync.plan import Holders, all_gathered

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GENERATION = "generation_config.json"

SHARD_BYTES = 5_000_000_000
"""Weights above this are cut into files of at most as much; a larger tensor has one for itself."""


def save_weights(
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    *,
    write: bool,
    most: int = SHARD_BYTES,
    holders: Holders | None = None,
) -> None:
    """All parameters, gathered; every rank calls it, and the one with `write` set writes, a shard at a time: so that
    no more than one of them is in host memory. `folder` is there."""
    from safetensors.torch import save_file

    shards = cut(parameters, most)
    for file, names in shards.items():
        full: dict[str, torch.Tensor] = {}
        for name, tensor in all_gathered({name: parameters[name] for name in names}, holders or {}):
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


def save_adapters(
    folder: Path, parameters: Mapping[str, torch.Tensor], base: str, training: TrainingConfig, *, write: bool
) -> None:
    """Adapters as PEFT 0.18 writes and reads them, and what they are of; called as `save_weights`. base: the folder or
    repository of the model that they stand beside."""
    from safetensors.torch import save_file

    adapters = {f"base_model.model.{name}": full.cpu() for name, full in all_gathered(parameters, {})}
    if not write:
        return
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": training.lora_rank,
        "lora_alpha": training.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in parameters}),
        "inference_mode": True,
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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


def write_policy_config(folder: Path, model: ModelConfig, stop_tokens: Sequence[int], pad_token: int) -> None:
    """Write what is to be known of a policy beside its weights. model: its checkpoint, if any, is a folder here;
    stop_tokens: what ended samples in training; pad_token: where the checkpoint does not say how to generate."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    start = None if model.checkpoint is None else Path(model.checkpoint)
    config = _config_of(model)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if model.float32_logits and model.dtype != "float32":
        config.head_dtype = "float32"
    config.eos_token_id = config.eos_token_id if config.eos_token_id is not None else stop_tokens[0]
    config.save_pretrained(folder)
    if start is not None and (start / _GENERATION).is_file():
        generation = GenerationConfig.from_pretrained(start)
    else:
        generation = GenerationConfig(pad_token_id=pad_token)
    generation.eos_token_id = list(stop_tokens)
    generation.save_pretrained(folder)


def write_critic_config(folder: Path, model: ModelConfig) -> None:
    """Write the same of a critic, which transformers loads to classify tokens, where it has such a model of this
    architecture: its one label is a token's value."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    config = _config_of(model)
    config.num_labels = 1
    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


def _config_of(model: ModelConfig) -> PretrainedConfig:
    """The configuration of a model: that of the folder that it starts from, else one of these settings."""
    from engines.torch.model import transformers_config

    config = transformers_config(model) if model.checkpoint is None else read_config(Path(model.checkpoint), model.name)
    config.dtype = model.dtype
    return config
