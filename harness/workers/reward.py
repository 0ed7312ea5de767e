"""Rewards and advantages: the two roles that need no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from harness.rl.advantages import group_advantages
from harness.tasks import Task, extra_metrics, extra_values
from harness.transfer_queue import Batch, Column, Ragged
from harness.workers.stage import Stage


class RewardStage(Stage):
    """Scores each response by the task's own rule."""

    role = kind = "reward"

    def __init__(self, task: Task, **stage: Any) -> None:
        super().__init__(**stage)
        self.task = task
        self.extra_names = extra_metrics(task)

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        responses, answers = batch.columns["response"], batch.columns["answer"]
        assert isinstance(responses, Ragged) and isinstance(answers, Ragged)
        scores = [
            self.task.score(response, answer) for response, answer in zip(responses.rows(), answers.rows(), strict=True)
        ]
        columns: dict[str, Column] = {
            "reward": np.array([score.reward for score in scores], np.float32),
            "exact_match": np.array([score.exact_match for score in scores], np.bool_),
        }
        if self.extra_names:
            columns["score_extras"] = Ragged.from_rows(list(extra_values(scores, self.extra_names)))
        return columns


class AdvantageStage(Stage):
    """Compares the samples of a group with each other; takes groups whole."""

    role = kind = "advantages"

    def __init__(self, *, group_size: int, divide_by_std: bool, **stage: Any) -> None:
        super().__init__(**stage)
        self.group_size, self.divide_by_std = group_size, divide_by_std

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        rewards = torch.from_numpy(batch.columns["reward"]).view(-1, self.group_size)
        return {"advantage": group_advantages(rewards, divide_by_std=self.divide_by_std).flatten().numpy()}
