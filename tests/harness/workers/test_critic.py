"""The critic's two loops over one queue: values for advantages, and what was made of them to learn from."""

import asyncio

import numpy as np

from harness.config import AlgorithmConfig
from harness.protocols import ValueBatch
from harness.rl.token_advantages import token_advantages_of
from harness.transfer_queue import Ragged
from harness.workers.actor import CriticRole
from harness.workers.dataflow import CRITIC_TRAINING, text_column
from harness.workers.readers import FifoReader
from harness.workers.stages import AdvantageStage, columns_compared
from harness.workers.training import ONE_STEP, Updates
from harness.workers.turns import DeviceTurns
from tests.support.role_setting import GROUP, ROWS, CountingQueue, TickingClock

MICRO_BATCH = 2 * GROUP
GAE = AlgorithmConfig("test", 6, GROUP, 2, learning_rate=1e-3, advantage="gae", normalise_std=False)
ROLES = ("rollout", "actor", "critic")


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


class Setting:
    """A critic and the advantages of its values, over a queue in which responses and rewards are."""

    def __init__(self, updates: Updates = ONE_STEP) -> None:
        read = columns_compared(GAE)
        self.queue, self.engine = CountingQueue(ROLES, advantages_read=read), CountingCritic()
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
        self.advantages = AdvantageStage(
            group_size=GROUP, by_token=token_advantages_of(GAE), rows=MICRO_BATCH, minimum=GROUP, **given
        )

    async def batch(self, iteration: int) -> list[int]:
        rows = await self.queue.admit(iteration)
        await self.queue.respond(rows, iteration)
        scores = {"reward": np.array(rows, np.float64), "exact_match": np.zeros(ROWS, np.bool_)}
        await self.queue.put(f"train_{iteration}", rows, scores | {"reward_failure": text_column([""] * ROWS)})
        return rows


async def test_values_become_advantages_and_returns_that_the_critic_learns_from() -> None:
    setting = Setting()
    for iteration in range(2):
        rows = await setting.batch(iteration)
        report, *_ = await asyncio.gather(
            setting.critic.train(iteration), setting.critic.process(iteration), setting.advantages.process(iteration)
        )
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
    setting = Setting(steps)
    for iteration in range(2):
        await setting.batch(iteration)
    made = 2 * ROWS // MICRO_BATCH
    await asyncio.gather(
        setting.critic.train(0),
        setting.critic.process(0),
        setting.advantages.process(0),
        setting.critic.process(1),
        setting.advantages.process(1),
    )
    report = await setting.critic.train(1)
    assert setting.engine.steps == 2 * made
    batches = setting.engine.batches[ROWS // MICRO_BATCH * 2 :]
    assert {float(value) for batch in batches for value in batch.values.values} <= {0.0, float(made)}
    assert report.sums["lag"] in range(ROWS + 1)
