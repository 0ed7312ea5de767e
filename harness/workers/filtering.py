"""The role that says which groups are trained: it reads what was scored, group by group, and writes `passed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from harness.protocols import TRUNCATED
from harness.rl.filters import Filter
from harness.transfer_queue import Batch, Column
from harness.workers.stages import StageRole


class Judge(Protocol):
    """Decides which groups are trained."""

    def __call__(self, batch: Batch) -> np.ndarray:
        """Decide which groups to keep, of whole groups: bool [groups]."""


class RewardJudge:
    """Judges by a function of rewards. given: which of `harness.rl.filters.GIVEN` it reads."""

    def __init__(self, keep: Filter, given: tuple[str, ...], group_size: int) -> None:
        self._keep, self._given, self._group_size = keep, given, group_size

    def __call__(self, batch: Batch) -> np.ndarray:
        made = {"exact_match": _exact_match, "lengths": _lengths, "truncated": _truncated}
        given = {name: self._grouped(made[name](batch)) for name in self._given}
        rewards = self._grouped(batch.dense("reward"))
        kept, scored = np.zeros(len(rewards), np.bool_), ~rewards.isnan()
        for group in scored.any(dim=1).nonzero().flatten().tolist():
            there = scored[group]
            of_group = {name: of[group, there][None] for name, of in given.items()}
            kept[group] = bool(self._keep(rewards[group, there][None], **of_group))
        return kept

    def _grouped(self, column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).view(-1, self._group_size)


class DrawnJudge:
    """Judges where nothing is said and rewarded: each group is refused with this probability, drawn by its number. The
    same whatever the schedule and the time."""

    def __init__(self, share: float, seed: int, group_size: int) -> None:
        self._share, self._seed, self._group_size = share, seed, group_size

    def __call__(self, batch: Batch) -> np.ndarray:
        groups = batch.dense("sample")[:: self._group_size] // self._group_size
        return np.array([self._draw(group) >= self._share for group in groups.tolist()], np.bool_)

    def _draw(self, group: int) -> float:
        key = np.array([self._seed ^ _FILTER, group], dtype=np.uint64)
        return float(np.random.Generator(np.random.Philox(key=key)).random())


_FILTER = 0x66696C746572  # keys the generator


class FilterStage(StageRole):
    """Judges groups as soon as they are scored."""

    role = kind = "filter"

    def __init__(self, *, judge: Judge, group_size: int, **stage: Any) -> None:
        super().__init__(**stage)
        self.judge, self.group_size = judge, group_size

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        return {"passed": np.repeat(self.judge(batch), self.group_size)}


def _exact_match(batch: Batch) -> np.ndarray:
    return batch.dense("exact_match")


def _lengths(batch: Batch) -> np.ndarray:
    return np.array([int(mask.sum()) for mask in batch.ragged("loss_mask").rows()], np.int64)


def _truncated(batch: Batch) -> np.ndarray:
    return np.isin(batch.dense("finish_reason"), TRUNCATED)
