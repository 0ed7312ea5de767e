"""Prompts and their verifiable rewards."""

import json
import os
from pathlib import Path

from harness.config import ConfigError, JobConfig
from harness.config.model_folder import HUB, local_folder
from harness.config.plugins import make
from harness.config.registries import find
from harness.tasks.buffer import DataBuffer, Dealer, buffer_of
from harness.tasks.data import JobFacts
from harness.tasks.environment import Environment, Step, environment_of, observation_tokens, transcript
from harness.tasks.generation import Conversation, generated
from harness.tasks.reward import Rewarded, reward_of, score_of
from harness.tasks.rewards.reading import final_answer, normalised
from harness.tasks.task import (
    MEMBERS,
    Problem,
    Sample,
    Score,
    Task,
    checked_score,
    extra_metrics,
    extra_values,
    number_of,
    sample_of,
)
from harness.tasks.tokenizer import Tokenizer, load_tokenizer


def make_task(config: JobConfig) -> Task:
    """The task, with the reward that the settings name. Raises ConfigError for what cannot be such a one."""
    chosen = config.task
    factory = find("task", chosen.name)
    try:
        given = {
            "tokenizer": tokenizer_of(config),
            "context": config.model.max_length,
            "job": JobFacts(
                config.algorithm.batch_groups,
                config.max_tokens or 0,
                chosen.reward,
                json.dumps(chosen.reward_options, sort_keys=True),
                chosen.pay_truncated,
            ),
        }
        task: Task = make(factory, chosen.options, "task", chosen.name, **given)
        if missing := [name for name in MEMBERS if not hasattr(task, name)]:
            raise ConfigError(f"task={chosen.name} lacks {', '.join(missing)}; write what harness.tasks.Task asks for")
        if chosen.generate is not None:
            turns, timeout_s = chosen.generate_turns, chosen.generate_timeout_s
            task = generated(task, chosen.generate, chosen.generate_options, turns=turns, timeout_s=timeout_s)
        reward = None
        if chosen.reward is not None:
            reward = reward_of(chosen.reward, chosen.reward_options, pay_truncated=chosen.pay_truncated)
        task = Rewarded(task, reward, chosen.pay_truncated)
        extra_metrics(task)
        environment_of(task)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"task={chosen.name}: {error}") from error
    return task


def make_buffer(config: JobConfig) -> DataBuffer | None:
    """The source of problems that the settings name, None where they name none. Raises ConfigError for what cannot
    be."""
    chosen = config.task
    if chosen.buffer is None:
        if chosen.buffer_state is not None:
            raise ConfigError(f"task.buffer_state={chosen.buffer_state} is of no buffer; set task.buffer, too")
        return None
    return buffer_of(chosen.buffer, chosen.buffer_options, chosen.buffer_state)


_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
"""Files of a model's own tokenizer, in forms that are not read."""


def tokenizer_of(config: JobConfig) -> Tokenizer:
    """`model.tokenizer`, or that of the model's folder, where it has one; otherwise the shipped one of 32 characters.
    Raises ConfigError where there is none at the place that is named, or it cannot be read."""
    named, folder = config.model.tokenizer, config.model.checkpoint
    if named is None and folder is None:
        return load_tokenizer()
    setting = "model.checkpoint" if named is None else "model.tokenizer"
    source = named or str(folder)
    alone = named is not None and not named.startswith(HUB)  # a tokenizer needs no model beside it
    found = Path(os.path.expanduser(source)) if alone else local_folder(source, weights=False, setting=setting)
    if named is None and not (found / "tokenizer.json").is_file():
        if other := next((name for name in _OTHER_TOKENIZERS if (found / name).is_file()), None):
            raise ConfigError(
                f"{setting}={source} has {other} and no tokenizer.json; load its tokenizer with transformers and save "
                "it there with save_pretrained"
            )
        return load_tokenizer()
    try:
        return load_tokenizer(found)
    except ValueError as error:
        raise ConfigError(f"{setting}={source}: {error}") from error


def max_tokens(config: JobConfig, task: Task) -> int:
    """Longest response: the job's setting, or the task's own."""
    return config.max_tokens or task.max_response_tokens
