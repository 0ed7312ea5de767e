"""In which order the actor and the critic read, what they learn, and how weights are handed over."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import AlgorithmConfig
from harness.protocols import TrainBatch, ValueBatch
from harness.rl.token_advantages import token_advantages_of
from harness.transfer_queue import Column, Ragged
from harness.workers.actor import ActorRole, CriticRole, train_batch
from harness.workers.dataflow import CRITIC_TRAINING, partition_name, text_column
from harness.workers.readers import CompletionReader, FifoReader, MicroBatchReader
from harness.workers.stages import AdvantageStage, columns_compared
from harness.workers.training import ONE_STEP, LossMask, Updates
from harness.workers.turns import DeviceTurns
from tests.support.role_setting import CPU, GROUP, GROUPS, ROWS, CountingQueue, TickingClock, settle
from tests.support.trained_groups import NotingTrainer, columns, groups_of

ROLES = ("rollout", "actor")
MICRO_BATCH = 2 * GROUP
LIMIT = 2 * GROUPS
"""A dispatch limit that lets all of two batches start."""


class Setting:
    """Two batches of groups, started by one engine, that the test completes group by group."""

    def __init__(self, batch: int = GROUPS) -> None:
        self.queue = CountingQueue(ROLES, order="completion")
        self.trainer = NotingTrainer()
        self.reader = CompletionReader(self.queue, rows=MICRO_BATCH, group_size=GROUP, batch=batch)
        self.actor = actor(self.reader, self.trainer)

    async def admit(self) -> None:
        for iteration in (0, 1):
            await self.queue.admit(iteration)

    async def complete(self, *groups: int) -> None:
        for group in groups:
            rows = range(group * GROUP, (group + 1) * GROUP)
            await self.queue.put(partition_name(group // GROUPS), rows, columns(rows))
        await settle()


def actor(reader: MicroBatchReader, engine: NotingTrainer) -> ActorRole:
    return ActorRole(engine, TickingClock(), rank=0, reader=reader, device=CPU)


async def answered(order: str = "fifo", **more: Column) -> CountingQueue:
    """A queue with a batch that all has been written of; more: in place of what `columns` says."""
    queue = CountingQueue(ROLES, order=order)
    await queue.admit(0)
    await queue.put(partition_name(0), range(ROWS), columns(range(ROWS)) | more)
    return queue


async def test_responses_without_a_score_have_no_loss_nor_ones_that_were_cut_off_where_they_are_masked() -> None:
    queue = await answered(finish_reason=np.arange(ROWS, dtype=np.int8) % 2)  # every second one is `length`
    batch = await queue.read("actor")
    scored = np.where(batch.rows == 0, np.nan, batch.dense("reward"))
    unscored = train_batch(replace(batch, columns={**batch.columns, "reward": scored}), 0).mask
    assert unscored is not None and [row.any() for row in unscored.rows()] == [row != 0 for row in batch.rows]
    plain, masked = train_batch(batch, 0).mask, train_batch(batch, 0, LossMask(truncated=True)).mask
    assert plain is not None and masked is not None
    for place, (before, after) in enumerate(zip(plain.rows(), masked.rows(), strict=True)):
        np.testing.assert_array_equal(after, before if place % 2 == 0 else np.zeros_like(before))


async def test_tokens_that_lag_by_more_than_the_limit_have_no_loss_and_none_is_masked_where_all_are_young() -> None:
    queue = await answered()
    batch = await queue.read("actor")
    lengths = batch.ragged("versions").lengths
    versions = Ragged.from_rows([np.sort(np.arange(n, dtype=np.int32) * 3 % 5) for n in lengths])
    batch = replace(batch, columns={**batch.columns, "versions": versions})
    every, young, fresh = (train_batch(batch, 4, LossMask(max_staleness=most)) for most in (None, 4, 1))
    for found, least in ((every, 0), (young, 0), (fresh, 3)):
        assert found.mask is not None and found.lags is not None
        np.testing.assert_array_equal(found.mask.values, batch.ragged("loss_mask").values & (versions.values >= least))
        np.testing.assert_array_equal(found.lags.values, 4 - versions.values)
    assert not fresh.mask.values.all() and fresh.mask.values.any()  # type: ignore[union-attr]


async def test_samples_that_others_are_compared_with_are_read_told_and_not_trained() -> None:
    queue, trainer = await answered(reward=np.arange(ROWS, dtype=np.float64)), NotingTrainer()
    reader = FifoReader(queue, rank=0, rows=GROUP)
    updates = Updates(rows=ROWS // 2, epochs=2)
    role = ActorRole(trainer, TickingClock(), rank=0, reader=reader, device=CPU, updates=updates, baseline_of=GROUP)
    report = await role.train(0)
    assert set(trainer.sizes) == {GROUP - 1} and len(report.steps) == 4
    assert report.baselines == {row: float(row) for row in range(0, ROWS, GROUP)}
    assert [row for part in report.trained for row in part.rows] == [row for row in range(ROWS) if row % GROUP]
    assert report.sums["baseline_reward"] / report.sums["baselines"] == np.mean(range(0, ROWS, GROUP))


async def test_of_ranks_that_share_layers_one_tells_of_samples_and_each_of_its_time() -> None:
    reader = FifoReader(await answered(), rank=0, rows=GROUP)
    role = ActorRole(NotingTrainer(), TickingClock(), rank=1, reader=reader, device=CPU, reports=False)
    report = await role.train(0)
    assert not (report.trained or report.sums or report.baselines) and report.steps and report.spans


# --- completion order ------------------------------------------------------------------------------------------------


async def test_groups_are_trained_as_they_complete_whatever_their_batch_until_there_are_enough() -> None:
    setting = Setting(batch=5)
    await setting.admit()
    training = asyncio.create_task(setting.actor.train(0))
    order = [7, 2, 11, 0, 5]
    for group in order:
        await setting.complete(group)
    report = await training
    assert groups_of(report) == order
    assert report.steps == [{"grad_norm": 1.0}]
    await setting.complete(1, 3, 4, 6, 8)
    assert sorted(groups_of(await setting.actor.train(1))) == [1, 3, 4, 6, 8]


async def test_a_micro_batch_is_what_is_there_up_to_its_size_and_the_last_one_what_is_left_to_take() -> None:
    setting = Setting(batch=5)
    await setting.admit()
    setting.trainer.free.clear()
    training = asyncio.create_task(setting.actor.train(0))
    await setting.complete(3)
    await setting.complete(0, 1, 2, 4, 5)  # while the first is computed; one more than it takes
    setting.trainer.free.set()
    report = await training
    assert setting.trainer.sizes[0] == GROUP and max(setting.trainer.sizes) == MICRO_BATCH
    assert len(groups_of(report)) == 5


async def test_the_next_micro_batch_is_asked_for_while_one_is_computed() -> None:
    setting = Setting(batch=2)
    await setting.admit()
    setting.trainer.free.clear()
    training = asyncio.create_task(setting.actor.train(0))
    await setting.complete(4)
    assert await setting.actor.waiting() == ["actor[0].train waits for rows of batch 0"]
    assert len(await setting.queue.waiting()) == 1
    setting.trainer.free.set()
    await setting.complete(1)
    assert groups_of(await training) == [4, 1]
    assert await setting.actor.waiting() == []


async def test_what_is_due_later_leaves_room_for_others_now() -> None:
    """Two were started under limit 2 and are due in six, so that all of the next three may be others."""
    setting = Setting(batch=3)
    await setting.admit()
    await setting.queue.start(2, below=2)
    await setting.queue.start(8, below=LIMIT)
    training = asyncio.create_task(setting.actor.train(0, first=[(2, 6)]))
    await setting.complete(5, 6, 7)
    assert groups_of(await training) == [5, 6, 7]
    late = asyncio.create_task(setting.actor.train(1, first=[(2, 3)]))
    await setting.complete(8, 9)
    await setting.complete(1)
    await setting.complete(0)
    assert groups_of(await late) == [8, 1, 0]


async def test_a_queue_that_ends_before_the_batch_is_whole_is_an_error() -> None:
    setting = Setting(batch=GROUPS + 1)
    await setting.queue.admit(0)
    await setting.complete(*range(GROUPS))
    await setting.queue.close()
    with pytest.raises(RuntimeError, match="iteration 3 lacks 1 of its 7 groups, and the queue has no more"):
        await setting.actor.train(3)


# --- as admitted -----------------------------------------------------------------------------------------------------


async def test_groups_read_as_they_were_admitted_know_no_other_turn() -> None:
    role = actor(FifoReader(await answered(), rank=0, rows=MICRO_BATCH), NotingTrainer())
    with pytest.raises(ValueError, match="needs completion order"):
        await role.train(0, first=[(2, 3)])
    assert groups_of(await role.train(0)) == list(range(GROUPS))


# --- several steps a batch -------------------------------------------------------------------------------------------


class CountingTrainer(NotingTrainer):
    """Notes groups and steps in their order; its log-probs are the number of steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []
        self.proximal: list[float] = []

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        self.done.append(len(batch.responses) // GROUP)
        if batch.proximal_log_probs is not None:
            self.proximal += batch.proximal_log_probs.values.tolist()
        return await super().accumulate(batch)

    async def step(self) -> dict[str, float]:
        self.done.append("step")
        return await super().step()

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        steps = float(self.done.count("step"))
        return Ragged(np.full(len(responses.values), steps, np.float32), responses.lengths)


def stepping(queue: CountingQueue, trainer: CountingTrainer, updates: Updates) -> ActorRole:
    reader = FifoReader(queue, rank=0, rows=GROUP)
    return ActorRole(trainer, TickingClock(), rank=0, reader=reader, device=CPU, updates=updates)


async def test_a_step_follows_each_mini_batch_as_its_rows_arrive_and_epochs_repeat_them_in_order() -> None:
    queue, trainer = CountingQueue(ROLES), CountingTrainer()
    await queue.admit(0)
    role = stepping(queue, trainer, Updates(rows=3 * GROUP, epochs=2))
    training = asyncio.create_task(role.train(0))
    first = range(4 * GROUP)
    await queue.put(partition_name(0), first, columns(first))
    await settle()
    assert trainer.done == [1, 1, 1, "step", 1], "the first step waits for its own rows only"
    assert role.version == 0
    rest = range(4 * GROUP, ROWS)
    await queue.put(partition_name(0), rest, columns(rest))
    report = await training
    assert trainer.done == 2 * [1, 1, 1, "step", 1, 1, 1, "step"]
    assert (groups_of(report), len(report.steps), role.version) == (list(range(GROUPS)), 4, 1)


async def test_the_proximal_policy_is_that_before_the_first_step_of_the_batch() -> None:
    queue, trainer = CountingQueue(ROLES), CountingTrainer()
    for iteration in (0, 1):
        await queue.admit(iteration)
        rows = range(iteration * ROWS, (iteration + 1) * ROWS)
        await queue.put(partition_name(iteration), rows, columns(rows))
    role = stepping(queue, trainer, Updates(rows=2 * GROUP, epochs=2, whole_batch=True, scorer=trainer))
    await role.train(0)
    assert trainer.done.count("step") == 6 and set(trainer.proximal) == {0.0}
    trainer.proximal.clear()
    await role.train(1)
    assert trainer.done.count("step") == 12 and set(trainer.proximal) == {6.0}


async def test_nobody_computes_on_the_device_between_two_steps_where_the_whole_batch_is_waited_for() -> None:
    queue, trainer = CountingQueue(ROLES), CountingTrainer()
    turns = DeviceTurns()
    role = stepping(queue, trainer, Updates(rows=2 * GROUP, whole_batch=True))
    role.turns = turns
    await queue.admit(0)
    first = range(ROWS - GROUP)
    await queue.put(partition_name(0), first, columns(first))
    training = asyncio.create_task(role.train(0))
    await settle()
    assert trainer.done == [], "the last group may still be scored by these weights"
    trainer.free.clear()
    last = range(ROWS - GROUP, ROWS)
    await queue.put(partition_name(0), last, columns(last))
    await settle()
    seen: list[int] = []

    async def other() -> None:
        async with turns.turn("actor_fwd[0].work"):
            seen.append(trainer.done.count("step"))

    waiting = asyncio.create_task(other())
    await settle()
    trainer.free.set()
    await asyncio.gather(training, waiting)
    assert seen == [3]


async def test_no_micro_batch_in_completion_order_goes_beyond_its_mini_batch() -> None:
    queue, trainer = await answered("completion"), CountingTrainer()
    reader = CompletionReader(queue, rows=MICRO_BATCH, group_size=GROUP, batch=GROUPS, mini_batches=2)
    role = ActorRole(trainer, TickingClock(), rank=0, reader=reader, device=CPU, updates=Updates(rows=3 * GROUP))
    await role.train(0)
    assert trainer.done == [2, 1, "step", 2, 1, "step"]


async def test_full_micro_batches_are_put_together_from_groups_of_several_partitions_as_these_are_completed() -> None:
    setting = Setting(batch=5)
    reader = CompletionReader(setting.queue, rows=MICRO_BATCH, group_size=GROUP, batch=5, full=True)
    setting.actor = actor(reader, setting.trainer)
    await setting.admit()
    await setting.queue.start(2 * GROUPS, below=LIMIT)
    training = asyncio.create_task(setting.actor.train(0))
    for group in (0, GROUPS, 1, 2, GROUPS + 1):
        await setting.complete(group)
    report = await training
    assert groups_of(report) == [0, GROUPS, 1, 2, GROUPS + 1]
    assert [len(part.rows) for part in report.trained] == [2 * GROUP, 2 * GROUP, GROUP]


async def test_a_micro_batch_that_goes_beyond_a_mini_batch_is_an_error() -> None:
    reader = FifoReader(await answered(), rank=0, rows=MICRO_BATCH)
    updates = Updates(rows=3 * GROUP)
    role = ActorRole(NotingTrainer(), TickingClock(), rank=0, reader=reader, device=CPU, updates=updates)
    with pytest.raises(RuntimeError, match=f"{GROUP} rows beyond a mini-batch of {3 * GROUP}"):
        await role.train(0)


# --- weights ---------------------------------------------------------------------------------------------------------


class NotingSender:
    """Lets `send` end when the test says so."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.end = asyncio.Event()

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        assert list(parameters) == ["weight"]
        self.sent.append(version)
        await self.end.wait()


class NotingHostSender(NotingSender):
    async def ready(self) -> None: ...

    async def wait_arrived(self, version: int) -> None:
        if version not in self.sent:
            raise ValueError(f"version {version} was not sent")

    async def resend(self, version: int) -> None: ...


async def test_publishing_ends_when_the_sender_does_and_says_that_it_waits() -> None:
    role, sender = Setting().actor, NotingSender()
    await role.use(sender)
    publishing = asyncio.create_task(role.send(4))
    await settle()
    assert await role.waiting() == ["actor[0].send waits for version 4 to be taken"]
    sender.end.set()
    (span,) = await publishing
    assert (span.kind, span.version, span.iteration) == ("publish_weights", 4, 3)
    await role.wait_arrived(4)


async def test_only_a_sender_that_goes_on_in_the_background_is_asked_what_has_arrived() -> None:
    role = Setting().actor
    await role.use(NotingSender())
    await role.wait_arrived(1)
    await role.use(NotingHostSender())
    with pytest.raises(ValueError, match="version 1 was not sent"):
        await role.wait_arrived(1)


async def test_training_that_fails_leaves_no_request_for_more_rows_behind() -> None:
    class Failing(NotingTrainer):
        async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
            raise FloatingPointError("not finite")

    setting = Setting()
    await setting.admit()
    await setting.queue.start(2, LIMIT)
    await setting.complete(0)
    before = asyncio.all_tasks()
    with pytest.raises(FloatingPointError) as failure:  # which knows the frames that it went through, and all in them
        await actor(setting.reader, Failing()).train(0)
    await settle()
    assert asyncio.all_tasks() == before and failure.value


# -- the critic: values for advantages, and what was made of them to learn from


GAE = AlgorithmConfig("test", 6, GROUP, 2, learning_rate=1e-3, advantage="gae", normalise_std=False)
CRITIC_ROLES = ("rollout", "actor", "critic")


class CountingCritic:
    """Finds every token worth the number of steps that it has made; keeps what it was given."""

    def __init__(self) -> None:
        self.steps = 0
        self.batches: list[ValueBatch] = []

    async def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        await asyncio.sleep(0)
        return Ragged(np.full(len(responses.values), self.steps, np.float32), responses.lengths)

    async def accumulate(self, batch: ValueBatch) -> dict[str, float]:
        await asyncio.sleep(0)
        self.batches.append(batch)
        return {"tokens": float(batch.mask.values.sum())}

    def rank_tokens(self, batch: ValueBatch) -> list[int]:
        return [len(batch.prompts.values) + len(batch.responses.values)]

    async def step(self) -> dict[str, float]:
        await asyncio.sleep(0)
        self.steps += 1
        return {"grad_norm": 1.0}

    def named_parameters(self) -> dict[str, object]:
        return {}

    def holders(self) -> dict[str, tuple[int, ...]]:
        return {}


class CriticSetting:
    """A critic and the advantages of its values, over a queue in which responses and rewards are."""

    def __init__(self, updates: Updates = ONE_STEP) -> None:
        read = columns_compared(GAE)
        self.queue, self.engine = CountingQueue(CRITIC_ROLES, advantages_read=read), CountingCritic()
        given = {"queue": self.queue, "clock": TickingClock(), "name": "0"}
        reader = FifoReader(self.queue, rank=0, rows=MICRO_BATCH, task=CRITIC_TRAINING)
        self.critic = CriticRole(
            self.engine,  # type: ignore[arg-type]
            reader,
            rank=0,
            updates=updates,
            turns=DeviceTurns(),
            rows=MICRO_BATCH,
            minimum=MICRO_BATCH,
            **given,
        )
        given |= {"rows": MICRO_BATCH, "minimum": GROUP}
        self.advantages = AdvantageStage(group_size=GROUP, by_token=token_advantages_of(GAE), **given)

    async def batch(self, iteration: int) -> list[int]:
        rows = await self.queue.admit(iteration)
        await self.queue.respond(rows, iteration)
        scores = {"reward": np.array(rows, np.float64), "exact_match": np.zeros(ROWS, np.bool_)}
        await self.queue.put(f"train_{iteration}", rows, scores | {"reward_failure": text_column([""] * ROWS)})
        return rows


async def test_values_become_advantages_and_returns_that_the_critic_learns_from() -> None:
    setting = CriticSetting()
    for iteration in range(2):
        rows = await setting.batch(iteration)
        values = (setting.critic.process(iteration), setting.advantages.process(iteration))
        report, *_ = await asyncio.gather(setting.critic.train(iteration), *values)
        trained = await setting.queue.read("actor", iteration)
        for row, advantages in zip(rows, trained.ragged("advantage").rows(), strict=True):
            assert (advantages == row - iteration).all(), "the reward less the value, which is the steps made before"
        batches = setting.engine.batches[-ROWS // MICRO_BATCH :]
        assert {value for batch in batches for value in batch.values.values.tolist()} == {iteration}
        returns = [returns[-1] for batch in batches for returns in batch.returns.rows()]
        assert returns == rows
        assert report.sums["lag"] == 0 and report.sums["samples"] == ROWS and report.steps == [{"grad_norm": 1.0}]
        assert {span.kind for span in report.spans} == {"update_critic", "wait_for_samples"}


async def test_no_value_is_by_something_between_two_versions() -> None:
    """Several steps a batch: the rows of the next one come while they are made."""
    steps = Updates(rows=MICRO_BATCH, epochs=2, whole_batch=True)
    setting = CriticSetting(steps)
    for iteration in range(2):
        await setting.batch(iteration)
    made = 2 * ROWS // MICRO_BATCH
    values = [stage.process(iteration) for iteration in range(2) for stage in (setting.critic, setting.advantages)]
    await asyncio.gather(setting.critic.train(0), *values)
    report = await setting.critic.train(1)
    assert setting.engine.steps == 2 * made
    batches = setting.engine.batches[ROWS // MICRO_BATCH * 2 :]
    assert {float(value) for batch in batches for value in batch.values.values} <= {0.0, float(made)}
    assert report.sums["lag"] in range(ROWS + 1)
