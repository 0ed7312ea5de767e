"""Dynamic sampling: the place of a group that a filter refuses is dealt another prompt, until its group is kept; so is
that of a group that took too long, where `engine.on_straggler=drop`, and of one in which a sample could not be scored,
where `task.on_failed_score=redeal`.

    prompts -- prompt --> rollout --> reward --> filter
       ^  |                                        | passed
       |  +-- kept: to advantages, log-probs, actor|
       +---------------- begin_again --------------+

A place is a group's rows in the queue. It stays in its batch whatever it is dealt, so a schedule, its bounds and the
order of training know nothing of a filter; and which prompt a place is dealt next is decided by the place alone, not by
when it was refused: without staleness every schedule trains the same groups in the same order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.config import JobConfig
from harness.driver.checkpoint_files import Refusal
from harness.driver.places import Decisions, Places, Verdict
from harness.driver.pools import StagePool
from harness.driver.prompts import PromptSource
from harness.metrics.ledger import DropReason
from harness.protocols import FINISH_REASONS
from harness.transfer_queue import Batch, TransferQueue
from harness.workers.dataflow import VERDICTS, iteration_of, texts_of


@dataclass(frozen=True)
class Refuses:
    """A reason for which groups are refused. setting: that it is of; refuses: of rows that were scored, bool [rows],
    those of groups that it refuses, or one of them; fix: where it refuses too many."""

    drop: DropReason
    setting: str
    fix: str
    refuses: Callable[[Batch], np.ndarray]


def refusals_of(config: JobConfig) -> list[Refuses]:
    """The last of those that refuse a group says what becomes of it."""
    reasons = []
    if config.algorithm.filters:
        setting = f"algorithm.filter={config.algorithm.filter}"
        fix = "give it problems that are neither too easy nor too hard"
        reasons.append(Refuses("filtered", setting, fix, lambda batch: ~batch.dense("passed")))
    if config.engine.on_straggler == "drop":
        setting = f"engine.on_straggler=drop after engine.sample_limit_s={config.engine.sample_limit_s:g}"
        cut = FINISH_REASONS.index("cut")
        fix = "raise engine.sample_limit_s"
        reasons.append(Refuses("straggler", setting, fix, lambda batch: batch.dense("finish_reason") == cut))
    if config.task.on_failed_score == "redeal":
        setting, fix = "task.on_failed_score=redeal", "see why samples cannot be scored"
        reasons.append(Refuses("failed", setting, fix, lambda batch: np.isnan(batch.dense("reward"))))
    return reasons


def places_of(config: JobConfig) -> Places:
    """The places of a job whose groups may be refused."""
    algorithm, reasons = config.algorithm, refusals_of(config)
    who, fix = " and ".join(one.setting for one in reasons), ", or ".join(one.fix for one in reasons)
    return Places(algorithm.spare_groups, algorithm.filter_rounds, who, fix)


class Refill:
    """The loop that hears what the filter says of each group, and how its samples ended, and deals again.

    reasons: for which groups are refused, of which the last that refuses a group counts.
    """

    def __init__(self, prompts: PromptSource, queue: TransferQueue, places: Places, reasons: Sequence[Refuses]) -> None:
        self._prompts, self._queue, self._places, self._reasons = prompts, queue, places, reasons

    async def run(self) -> None:
        """Consumes what is said of groups; produces kept ones, and prompts. Ends when the prompts are closed and every
        group is kept. Raises ConfigError where a batch is generated too often."""
        n = self._prompts.group_size
        most = self._prompts.batch * n
        while (batch := await self._queue.get(VERDICTS, most, minimum=n, consumer="prompts")) is not None:
            async with self._prompts.deciding:
                await self._decide(batch)

    async def _decide(self, batch: Batch) -> None:
        """Decide on a batch. Whoever observes hears of all of it at once, before anybody is handed what is kept."""
        name, prompts, verdicts = batch.partition, self._prompts, self._verdicts(batch)
        now = prompts.clock.now()
        self._places.failure = next(filter(None, texts_of(batch.ragged("reward_failure"))), self._places.failure)
        found = self._places.judge(iteration_of(name), verdicts)
        again = [prompts.deal_again(_refusal(name, group, now, found)) for group in found.again]
        for group in found.refused:
            prompts.refuse(_refusal(name, group, now, found, replaced=True))
        prompts.leave(found.spare)
        # First, so that it is there when the iteration is recorded.
        await prompts.keep([*found.again, *found.given_up])
        await self._settle(name, found.kept, True)
        if found.refused or found.spare:
            await self._queue.give_up(name, prompts.rows([*found.refused, *found.spare]))
        await self._settle(name, found.given_up, False)
        if again:
            await self._queue.begin_again(name, prompts.rows(found.again))
            await prompts.write(name, found.again, again, [now] * len(again))

    def _verdicts(self, batch: Batch) -> dict[int, Verdict]:
        """Verdicts by group."""
        n = self._prompts.group_size
        groups = (batch.rows[::n] // n).tolist()
        refused: dict[int, DropReason] = {}
        for reason in self._reasons:
            refuses = np.any(reason.refuses(batch).reshape(-1, n), axis=1)
            refused |= {groups[place]: reason.drop for place in np.flatnonzero(refuses).tolist()}
        rewards = batch.dense("reward").reshape(-1, n).tolist()
        return {
            group: Verdict(refused.get(group), list(map(_number, group_rewards)))
            for group, group_rewards in zip(groups, rewards, strict=True)
        }

    async def _settle(self, partition: str, groups: Sequence[int], kept: bool) -> None:
        if groups:
            rows = self._prompts.rows(groups)
            await self._queue.put(partition, rows, {"kept": np.full(len(rows), kept)})


def _refusal(partition: str, group: int, at: float, found: Decisions, *, replaced: bool = False) -> Refusal:
    verdict = found.verdicts[group]
    assert verdict.reason is not None, "it was refused"
    return Refusal(iteration_of(partition), group, at, verdict.rewards, verdict.reason, replaced)


def _number(reward: float) -> float | None:
    return reward if math.isfinite(reward) else None


class WholeRunPool(StagePool):
    """A stage that works from the beginning of a run to its end, whatever a schedule asks: where a filter follows, it
    is part of what makes a batch, and not of what is done with one."""

    async def process(self, iteration: int) -> None:
        """Do nothing: whoever reads what it writes waits for it."""

    async def stream(self) -> None:
        """Do nothing: it streams already."""

    async def work(self) -> None:
        """Work until the prompts are closed and done."""
        await super().stream()
