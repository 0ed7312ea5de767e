"""The policy that a run starts from: made once per model and recipe, then kept under results/."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.config import ModelConfig
from harness.config.model_folder import HUB, local_folder
from harness.metrics.atomic_files import Lock
from harness.tasks import Task

RECIPE = 1
"""Raise this when the warm start's arithmetic changes, so that kept weights are made anew."""
_MADE_WITHIN_S = 1800.0  # by another process: a minute or two on a machine that is not busy
_COMPARED = 256  # problems that distinguish tasks of one name


def initial_model(
    model: ModelConfig,
    task: Task,
    results: Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    in_files: bool = False,
) -> ModelConfig:
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
            _make(model, task, folder, progress)
    return replace(model, checkpoint=str(folder))


def _problems(task: Task) -> list[list[Any]]:
    """Problems that the task asks for, in part: two files of problems must not share a warm start."""
    problems = [task.problem(group, 0) for group in range(_COMPARED)]
    return [[problem.prompt.tolist(), problem.answer] for problem in problems]


def _make(model: ModelConfig, task: Task, folder: Path, progress: Callable[[int, int], None] | None) -> None:
    from transformers.utils import logging

    from engines.torch.model import build_model
    from harness.rl.warm_start import warm_start

    logging.disable_progress_bar()
    policy = build_model(model, seed=0)
    if model.warm_start:
        warm_start(policy, task, progress=progress)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        policy.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
