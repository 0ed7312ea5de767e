"""The folder of a run's final weights: what transformers, vLLM and SGLang load, and a card that says what made it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from harness.config.job import trained_in_iteration
from harness.config.model_folder import HUB
from harness.tasks import Tokenizer

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *("vocab.*", "merges.txt", "tokenizer.model"),
)


def write_beside(folder: Path, tokenizer: Tokenizer, card: str) -> None:
    """The tokenizer's files and the card, beside weights and what a worker writes with them."""
    for pattern in _TOKENIZER:
        for file in tokenizer.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(manifest: Mapping[str, Any], config: Mapping[str, Any], learning_rate: float) -> str:
    """README.md of the folder: front matter as the hub reads it, and how the weights were made. config: config.yaml of
    the run; learning_rate: the highest."""
    asked, base = config["model"].get("checkpoint"), manifest["model"]
    library = "peft" if config.get("training", {}).get("lora_rank") else "transformers"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
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
