"""Folders of models: the policy that a run starts from, made once per model and recipe, then kept under results/; and
that of its final weights, which transformers, vLLM and SGLang load, with a card that says what made it."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from harness.config import ModelConfig
from harness.config.job import trained_in_iteration
from harness.config.model_folder import HUB, local_folder
from harness.metrics.atomic_files import Lock
from harness.tasks import Task, Tokenizer

RECIPE = 1
"""Raise this when the warm start's arithmetic changes, so that kept weights are made anew."""
_MADE_WITHIN_S = 1800.0  # by another process: a minute or two on a machine that is not busy
_COMPARED = 256  # problems that distinguish tasks of one name
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *("vocab.*", "merges.txt", "tokenizer.model"),
)


def initial_model(model: ModelConfig, task: Task, results: Path, *, in_files: bool = False) -> ModelConfig:
    """`model` with a folder to start from, where it has a checkpoint, asks for a warm start, or is to lie in files
    because engines read them; itself otherwise.

    A repository of the hub is downloaded, once. What is made, which is deterministic, is made on first use and cached
    under `results`/cache, once for all engines and runs, also for those that ask at the same time. Raises ConfigError
    as `local_folder`.
    """
    if model.checkpoint is not None:
        here = replace(model, checkpoint=str(local_folder(model.checkpoint)))
        if model.checkpoint.startswith(HUB):  # others were checked at the door
            from engines.torch.model import check_weights

            check_weights(here)
        return here
    if not (model.warm_start or in_files):
        return model
    what, made_from = "drawn", [RECIPE, asdict(model)]
    if model.warm_start:
        what, made_from = task.name, [*made_from, task.name, _problems(task)]
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
    folder = results.resolve() / "cache" / f"{model.name}-{what}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    busy = f"another process has been making weights for {_MADE_WITHIN_S:g} s; see whether it lives, and try again"
    with Lock(folder.parent / ".lock", within_s=_MADE_WITHIN_S, busy=busy):
        if not folder.exists():
            _make(model, task, folder)
    return replace(model, checkpoint=str(folder))


def _problems(task: Task) -> list[list[Any]]:
    """Problems that the task asks for, in part: two files of problems must not share a warm start."""
    problems = [task.problem(group, 0) for group in range(_COMPARED)]
    return [[problem.prompt.tolist(), problem.answer] for problem in problems]


def _make(model: ModelConfig, task: Task, folder: Path) -> None:
    from transformers.utils import logging

    from engines.torch.model import build_model
    from harness.rl.warm_start import warm_start

    logging.disable_progress_bar()
    policy = build_model(model, seed=0)
    if model.warm_start:
        warm_start(policy, task)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        policy.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


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
