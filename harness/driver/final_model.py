"""The folder of a run's final weights: what transformers, vLLM and SGLang load, and a card that says what made it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from harness.config import ModelConfig
from harness.config.job import trained_in_iteration
from harness.config.model_folder import HUB, read_config
from harness.tasks import Tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *("vocab.*", "merges.txt", "tokenizer.model"),
)
_GENERATION = "generation_config.json"


def write_model_files(folder: Path, model: ModelConfig, tokenizer: Tokenizer, card: str) -> None:
    """All but the weights. model: whose checkpoint, if it has one, is a folder here."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    start = None if model.checkpoint is None else Path(model.checkpoint)
    config = _config_of(model)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if model.float32_logits and model.dtype != "float32":
        config.head_dtype = "float32"
    stops = tokenizer.stop_tokens
    config.eos_token_id = config.eos_token_id if config.eos_token_id is not None else stops[0]
    config.save_pretrained(folder)
    if start is not None and (start / _GENERATION).is_file():
        generation = GenerationConfig.from_pretrained(start)
    else:
        generation = GenerationConfig(pad_token_id=tokenizer.pad_token)
    generation.eos_token_id = list(stops)  # what ended samples in training
    generation.save_pretrained(folder)
    for pattern in _TOKENIZER:
        for file in tokenizer.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_critic_files(folder: Path, model: ModelConfig) -> None:
    """All but the weights of a critic, which transformers loads to classify tokens, where it has such a model of this
    architecture: its one label is a token's value. model: as for `write_model_files`."""
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


def model_card(manifest: Mapping[str, Any], config: Mapping[str, Any], learning_rate: float) -> str:
    """README.md of the folder: front matter as the hub reads it, and how the weights were made. config: config.yaml of
    the run; learning_rate: the highest."""
    asked, base = config["model"].get("checkpoint"), manifest["model"]
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["reinforcement-learning", "grpo", "cadence"]
    if asked is not None and asked.startswith(HUB):
        base = asked.removeprefix(HUB).partition("@")[0]
        front["base_model"] = base
    git = manifest.get("git") or {}
    algorithm = config["algorithm"]
    rows = {
        "starts from": asked or f"{base}, weights made for the run",
        "schedule": manifest["schedule"],
        "task": config["task"]["name"],
        "engine": manifest["engine"],
        "iterations": config["iterations"],
        "samples an iteration": trained_in_iteration(algorithm),
        "learning rate": f"{learning_rate:g}{' (auto)' if algorithm['learning_rate'] == 'auto' else ''}",
        "correction": algorithm["correction"],
        "seed": manifest["seed"],
        "run": f"{manifest['experiment']}/{manifest['cell']}/seed={manifest['seed']}",
        "commit": f"{git.get('commit', 'unknown')}{' with changes' if git.get('dirty') else ''}",
        "started": manifest["started_at"],
    }
    lines = ["---", yaml.safe_dump(front, sort_keys=False).rstrip(), "---", "", f"# {base}, trained by Cadence", ""]
    lines += ["Weights after the last iteration of a run of reinforcement learning.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    settings = "\n".join(
        ["", "## Settings", "", "```yaml", yaml.safe_dump(dict(config), sort_keys=False).rstrip(), "```"]
    )
    return "\n".join(lines) + "\n" + settings + "\n"
