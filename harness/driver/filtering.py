"""Dynamic sampling: the place of a group that a filter refuses is dealt another prompt, until its group is kept.

    prompts -- prompt --> rollout --> reward --> filter
       ^  |                                        | passed
       |  +-- kept: to advantages, log-probs, actor|
       +---------------- begin_again --------------+

A place is a group's rows in the queue. It stays in its batch whatever it is dealt, so a schedule, its bounds and the
order of training know nothing of a filter; and which prompt a place is dealt next is decided by the place alone, not by
when it was refused: without staleness every schedule trains the same groups in the same order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.config import ConfigError
from harness.driver.pools import StagePool
from harness.driver.prompts import PromptSource
from harness.metrics.samples import DEALT_AGAIN
from harness.tasks import Problem
from harness.transfer_queue import Batch, Column
from harness.workers.dataflow import VERDICTS

_MOST_DEALS = 1 << 8  # of one place, that ids have room for


class RefilledPrompts(PromptSource):
    """Also hears what the filter says of each group, and deals again. name, rounds: of the filter, and how many times a
    batch may be generated for it."""

    def __init__(self, *args: Any, name: str, rounds: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name, self._rounds = name, rounds
        self._deals: dict[int, int] = {}  # of places: how often each was dealt another prompt
        self._places = Counter[str]()  # by partition
        self._refused = Counter[str]()
        self._stale: set[int] = set()  # places whose groups will not be trained anyway
        self._deciding = asyncio.Lock()  # what becomes of a group

    async def refill(self) -> None:
        """Consumes what the filter says; produces kept groups, and prompts. Ends when the prompts are closed and every
        group is kept. Raises ConfigError where a batch is generated too often."""
        most, n = self.batch * self.group_size, self.group_size
        while (batch := await self.queue.get(VERDICTS, most, minimum=n, consumer="prompts")) is not None:
            async with self._deciding:
                await self._decide(batch)

    async def drop(self, started_below: int) -> int:
        async with self._deciding:
            return await super().drop(started_below)

    def first_sample(self, group: int) -> int:
        return (group + self._deals.get(group, 0) * DEALT_AGAIN) * self.group_size

    def _problem(self, group: int) -> Problem:
        """Those that are dealt later come after all that are planned."""
        number = group + self._deals.get(group, 0) * self.planned
        return self.dealer.problem(number, self.first_sample(group))

    def _columns(self, groups: Sequence[int], problems: Sequence[Problem]) -> dict[str, Column]:
        samples = np.concatenate([np.arange(self.group_size) + self.first_sample(group) for group in groups])
        return super()._columns(groups, problems) | {"sample": samples}

    def _now_stale(self, groups: Sequence[int]) -> None:
        self._stale.update(groups)

    def _new_partition(self, name: str, groups: int) -> None:
        self._places[name] = groups

    async def _decide(self, batch: Batch) -> None:
        n = self.group_size
        groups = (batch.rows[::n] // n).tolist()
        refused = [
            group
            for group, passed in zip(groups, batch.dense("passed")[::n].tolist(), strict=True)
            if not passed and group not in self._stale
        ]
        if kept := [group for group in groups if group not in refused]:
            rows = self._rows(kept)
            await self.queue.put(batch.partition, rows, {"kept": np.ones(len(rows), np.bool_)})
        if refused:
            of_groups = batch.dense("reward").reshape(-1, n).tolist()
            await self._deal_again(batch.partition, refused, dict(zip(groups, of_groups, strict=True)))

    async def _deal_again(self, partition: str, groups: Sequence[int], rewards: Mapping[int, list[float]]) -> None:
        self._check_rounds(partition, groups)
        for group in groups:
            first = self.first_sample(group)
            self.dealer.told(first, rewards[group])
            self.observer.dropped(range(first, first + self.group_size), "filtered")
            self._deals[group] = self._deals.get(group, 0) + 1
        await self.queue.begin_again(partition, self._rows(groups))
        await self._put(partition, groups, [self._problem(group) for group in groups])

    def _check_rounds(self, partition: str, groups: Sequence[int]) -> None:
        self._refused[partition] += len(groups)
        places = self._places[partition]
        dealt = self._refused[partition] + places
        if dealt > self._rounds * places or max(self._deals.get(group, 0) for group in groups) + 1 >= _MOST_DEALS:
            raise ConfigError(
                f"algorithm.filter={self._name} refused {self._refused[partition]} of {dealt} groups that were dealt "
                f"for the {places} of batch {partition.removeprefix('train_')}, and "
                f"algorithm.filter_rounds={self._rounds}; give it problems that are neither too easy nor too hard, or "
                "raise algorithm.filter_rounds"
            )


class WholeRunPool(StagePool):
    """A stage that works from the beginning of a run to its end, whatever a schedule asks: where a filter follows, it
    is part of what makes a batch, and not of what is done with one."""

    async def process(self, iteration: int) -> None:
        """Whoever reads what it writes waits for it."""

    async def stream(self) -> None:
        """It does."""

    async def work(self) -> None:
        """Until the prompts are closed and done."""
        await super().stream()
