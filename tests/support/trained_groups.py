"""A training rank that computes nothing, what it reads, and which groups it was given."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from harness.protocols import TrainBatch
from harness.transfer_queue import Column
from harness.workers.dataflow import text_column
from harness.workers.training import TrainReport
from tests.support.role_setting import GROUP, responses


class NotingTrainer:
    """A train engine that keeps what it was given, and computes while `free` is not set."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.free = asyncio.Event()
        self.free.set()

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        self.sizes.append(len(batch.responses))
        await self.free.wait()
        return {}

    def rank_tokens(self, batch: TrainBatch) -> list[int]:
        return [len(batch.prompts.values) + len(batch.responses.values)]

    async def step(self) -> dict[str, float]:
        return {"grad_norm": 1.0}

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.ones(3)}

    def holders(self) -> dict[str, tuple[int, ...]]:
        return {}


def columns(rows: Sequence[int]) -> Mapping[str, Column]:
    """All that rollout, reward and advantages write."""
    return responses(rows) | {
        "reward": np.zeros(len(rows), np.float64),
        "exact_match": np.zeros(len(rows), np.bool_),
        "reward_failure": text_column([""] * len(rows)),
        "advantage": np.zeros(len(rows), np.float32),
    }


def groups_of(report: TrainReport) -> list[int]:
    rows = np.concatenate([part.rows for part in report.trained])
    groups = rows.reshape(-1, GROUP)
    assert (groups == groups[:, :1] + np.arange(GROUP)).all(), "a group was torn"
    return (groups[:, 0] // GROUP).tolist()
