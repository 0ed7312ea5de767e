"""A batch through all roles, each as it is, over one queue in one process; only the rollout may be a stand-in."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.protocols import TrainBatch
from harness.rl.advantages import advantages_of, group_advantages, needs_whole_batch
from harness.rl.kl import RewardKL
from harness.rl.token_advantages import token_advantages_of
from harness.runtime.virtual_runtime import run_virtual
from harness.tasks import Sample, Score, Task, sample_of, score_of
from harness.tasks.characters import Reverse
from harness.transfer_queue import Batch, Column, Ragged
from harness.workers.actor import ActorRole
from harness.workers.dataflow import partition_name
from harness.workers.readers import FifoReader, RankQueue
from harness.workers.reward_scorers import HostScorer
from harness.workers.stages import (
    AdvantageStage,
    OldLogProbStage,
    ReferenceStage,
    RewardStage,
    StageRole,
    TrainersLogProbStage,
    columns_compared,
)
from tests.support.policy_batches import algorithm
from tests.support.role_setting import (
    CPU,
    GROUP,
    GROUPS,
    ROWS,
    SMALL,
    TASK,
    CountingQueue,
    FixedWeights,
    TickingClock,
    rollout_role,
    settle,
    torch_engine,
)
from tests.support.trained_groups import NotingTrainer

GRPO, DR_GRPO = (advantages_of(algorithm(normalise_std=divide)) for divide in (True, False))

MICRO_BATCH = 2 * GROUP


class KeepingTrainer(NotingTrainer):
    """Keeps what it was given, and after how many micro-batches it stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[TrainBatch] = []
        self.steps: list[int] = []

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(batch)
        return await super().accumulate(batch)

    async def step(self) -> dict[str, float]:
        self.steps.append(len(self.batches))
        return await super().step()


def stage_options(queue: CountingQueue, rows: int, minimum: int | None = None) -> dict[str, object]:
    """The arguments of every stage."""
    return {"queue": queue, "clock": TickingClock(), "name": "0", "rows": rows, "minimum": minimum or rows}


def scorer() -> TorchLogProb:
    return TorchLogProb(build_model(SMALL), temperature=1.0, device=CPU)


def actor(queue: CountingQueue, engine: NotingTrainer) -> ActorRole:
    reader = FifoReader(queue, rank=0, rows=MICRO_BATCH)
    return ActorRole(engine, TickingClock(), rank=0, reader=reader, device=CPU)


class Stages:
    def __init__(self, queue: CountingQueue) -> None:
        self.reward = RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1))
        self.advantages = AdvantageStage(group_size=GROUP, advantages=GRPO, **stage_options(queue, ROWS, GROUP))
        self.reference = ReferenceStage(scorer(), **stage_options(queue, MICRO_BATCH))
        self.old = OldLogProbStage(scorer(), CPU, **stage_options(queue, MICRO_BATCH))

    async def process(self, iteration: int) -> list[object]:
        every = (self.reward, self.advantages, self.reference, self.old)
        return [span for spans in await asyncio.gather(*(s.process(iteration) for s in every)) for span in spans]


async def test_every_column_that_training_reads_belongs_to_its_row() -> None:
    queue, trainer = CountingQueue(), KeepingTrainer()
    await queue.admit(0)
    rollout = rollout_role(torch_engine(), queue)
    await asyncio.gather(actor(queue, trainer).train(0), Stages(queue).process(0), rollout.generate(0))
    row, scored = 0, scorer()
    for batch in trainer.batches:
        scores = []
        for prompt, response in zip(batch.prompts.rows(), batch.responses.rows(), strict=True):
            problem = TASK.problem(row // GROUP, seed=0)
            assert prompt.tolist() == problem.prompt.tolist()
            scores.append((await score_of(TASK, sample_of(TASK, prompt, response, problem.answer))).reward)
            row += 1
        expected = GRPO(torch.tensor(scores).view(-1, GROUP), None).flatten()
        np.testing.assert_array_equal(batch.advantages, expected.numpy())
        scores_now = await scored.log_probs(batch.prompts, batch.responses)
        for column in (batch.ref_log_probs, batch.old_log_probs):
            assert column is not None and column.lengths.tolist() == batch.responses.lengths.tolist()
            np.testing.assert_array_equal(column.values, scores_now.values)
        np.testing.assert_allclose(batch.behaviour_log_probs.values, scores_now.values, rtol=1e-4, atol=1e-5)
        assert batch.old_versions is not None and batch.old_versions.tolist() == [0] * len(batch.responses)
    assert row == ROWS


async def test_rewards_do_not_wait_for_a_whole_group_but_advantages_do() -> None:
    queue = CountingQueue()
    await queue.admit(0)
    stages = Stages(queue)
    running = asyncio.create_task(stages.process(0))
    await queue.respond([0, 1, 5])
    await settle()
    written = (await queue.describe())["partitions"]["train_0"]["written"]
    assert (written["reward"], written["advantage"]) == (3, 0)
    await queue.respond([2, 3])
    await settle()
    written = (await queue.describe())["partitions"]["train_0"]["written"]
    assert (written["reward"], written["advantage"]) == (5, GROUP)
    await queue.respond([4, *range(6, ROWS)])
    await running


async def test_training_begins_with_the_first_micro_batch_and_steps_after_the_last() -> None:
    queue, trainer = CountingQueue(roles=("rollout", "actor")), KeepingTrainer()
    await queue.admit(0)
    reward = RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1))
    advantages = AdvantageStage(group_size=GROUP, advantages=DR_GRPO, **stage_options(queue, ROWS, GROUP))
    running = asyncio.gather(actor(queue, trainer).train(0), reward.process(0), advantages.process(0))
    await queue.respond(range(MICRO_BATCH))
    await settle()
    assert (len(trainer.batches), trainer.steps) == (1, [])
    await queue.respond(range(MICRO_BATCH, ROWS))
    await running
    assert trainer.steps == [ROWS // MICRO_BATCH]
    assert trainer.batches[0].ref_log_probs is None and trainer.batches[0].old_log_probs is None


def scored_here(task: Task) -> HostScorer:
    return HostScorer(task, failure_reward=0.0, timeout_s=60)


class Measuring(Reverse):
    """Says how long a response is, and whether it stops, where it is long."""

    extra_metrics = ("length", "stops")

    def score(self, sample: Sample) -> Score:
        score = super().score(sample)
        stops = {"stops": float(sample.stopped)} if sample.tokens > 3 else {}
        return Score(score.reward, score.exact_match, {"length": float(sample.tokens)} | stops)


async def test_extra_values_of_scores_reach_what_is_recorded() -> None:
    queue = CountingQueue(roles=("rollout", "actor"), score_extras=True)
    rows = await queue.admit(0)
    await queue.respond(rows)
    await RewardStage(Measuring(), scored_here(Measuring()), **stage_options(queue, ROWS, 1)).process(0)
    batch = await queue.read("record")
    length, stops = batch.ragged("score_extras").values.reshape(-1, 2).T
    assert length.tolist() == batch.ragged("response").lengths.tolist()
    assert np.isnan(stops).tolist() == [tokens <= 3 for tokens in length]


async def test_an_extra_value_that_the_task_does_not_declare_is_refused() -> None:
    class Undeclared(Measuring):
        extra_metrics = ("stops",)

    queue = CountingQueue(score_extras=True)
    await queue.respond(await queue.admit(0))
    with pytest.raises(ValueError, match="extra value 'length', which its task does not declare"):
        await RewardStage(Undeclared(), scored_here(Undeclared()), **stage_options(queue, ROWS, 1)).process(0)


class FarFromZero(Reverse):
    """Rewards that differ by little beside what they are."""

    def score(self, sample: Sample) -> Score:
        return replace(super().score(sample), reward=1e4 + sample.tokens / 100)


async def test_advantages_of_large_rewards_are_those_of_what_they_differ_by() -> None:
    """Of which float32, which has three decimals there, would take some."""
    queue = CountingQueue(roles=("rollout", "actor"))
    await queue.respond(await queue.admit(0))
    advantages = AdvantageStage(group_size=GROUP, advantages=GRPO, **stage_options(queue, ROWS, GROUP))
    reward = RewardStage(FarFromZero(), scored_here(FarFromZero()), **stage_options(queue, ROWS, 1))
    await asyncio.gather(*(stage.process(0) for stage in (reward, advantages)))
    batch = await queue.read("actor")
    lengths = torch.from_numpy(batch.ragged("response").lengths).view(-1, GROUP) / 100
    np.testing.assert_allclose(batch.dense("advantage"), group_advantages(lengths).flatten(), rtol=1e-5)


def by_length(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return rewards + lengths


async def test_rewards_are_shaped_before_they_are_compared_and_reported_as_they_were() -> None:
    queue = CountingQueue(roles=("rollout", "actor"), advantages_read=("loss_mask",))
    await queue.respond(await queue.admit(0))
    await RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1)).process(0)

    stage = AdvantageStage(group_size=GROUP, advantages=DR_GRPO, shaping=by_length, **stage_options(queue, ROWS, GROUP))
    await stage.process(0)
    batch = await queue.read("actor")
    tokens = torch.tensor([int(mask.sum()) for mask in batch.ragged("loss_mask").rows()])
    shaped = (torch.from_numpy(batch.dense("reward")) + tokens).view(-1, GROUP)
    expected = group_advantages(shaped, divide_by_std=False).flatten()
    np.testing.assert_array_equal(batch.dense("advantage"), expected.numpy())


async def test_batches_that_are_compared_whole_come_whole_and_in_order_to_a_stream() -> None:
    queue = CountingQueue(roles=("rollout", "actor"), advantages_read=("loss_mask",), batches_compared=True)
    compared = []

    def noting(rewards: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        assert lengths is not None and lengths.shape == rewards.shape == (GROUPS, GROUP)
        compared.append(rewards)
        return rewards

    stage = AdvantageStage(group_size=GROUP, advantages=noting, **stage_options(queue, ROWS, ROWS))
    running = asyncio.create_task(stage.stream())
    reward = asyncio.create_task(RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1)).stream())
    for iteration in (0, 1):
        await queue.admit(iteration)
    await queue.respond(range(ROWS, 2 * ROWS), 1)
    await queue.respond(range(ROWS - 1))
    await settle()
    assert not compared, "the first batch lacks a sample, and the second has to wait for it"
    await queue.respond([ROWS - 1])
    await queue.close()
    assert [span.iteration for span in await running] == [0, 1]
    await reward


async def test_a_kl_in_the_reward_is_of_the_policy_that_sampled_to_the_reference_and_follows_its_target() -> None:
    """Two batches: of the second, the coefficient is what the KL of the first made of it."""
    followed = algorithm(kl="k2", kl_in="reward", kl_coef=0.5, kl_target=1e-3, kl_horizon=4 * ROWS)
    queue = CountingQueue(advantages_read=columns_compared(followed), batches_compared=needs_whole_batch(followed))
    coefficients = []

    def as_they_are(rewards: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        return rewards

    kl, options = RewardKL(followed), stage_options(queue, ROWS, ROWS)
    advantages = AdvantageStage(group_size=GROUP, advantages=as_they_are, reward_kl=kl, **options)
    reward = RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1))
    reference = ReferenceStage(scorer(), **stage_options(queue, MICRO_BATCH))
    old = OldLogProbStage(scorer(), CPU, **stage_options(queue, MICRO_BATCH))
    for iteration in (0, 1):
        coefficients.append(kl.coefficient)
        await queue.respond(await queue.admit(iteration), iteration)
        await asyncio.gather(*(stage.process(iteration) for stage in (reward, reference, old, advantages)))
        batch = await queue.read("actor", iteration)
        sampled, reference_ = batch.ragged("log_probs").rows(), batch.ragged("ref_log_probs").rows()
        costs = [0.5 * float(((one - other) ** 2).sum()) for one, other in zip(sampled, reference_, strict=True)]
        expected = batch.dense("reward") - coefficients[-1] * np.array(costs)
        np.testing.assert_allclose(batch.dense("advantage"), expected, rtol=1e-5, atol=1e-6)
        assert batch.dense("kl_coef").tolist() == [pytest.approx(coefficients[-1])] * ROWS
    assert coefficients == [0.5, pytest.approx(0.5 * (1 + 0.2 / 4))]


async def test_publishing_before_the_transport_is_open_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before the transport was opened"):
        await actor(CountingQueue(), KeepingTrainer()).send(1)


# --- loads and computations take their time on a simulated clock ------------------------------------------------------


class SlowScorer:
    """A log-prob engine that computes and loads until the test ends it, and writes down what it did."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.end = asyncio.Event()

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        await self._take_time("score")
        return Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        list(weights)
        await self._take_time("load")

    async def _take_time(self, what: str) -> None:
        self.log.append(f"{what} begins")
        await self.end.wait()
        self.log.append(f"{what} ends")


async def slow_stage() -> tuple[OldLogProbStage, SlowScorer, CountingQueue]:
    """It has joined, version 1 is in its host memory, and a micro-batch waits for it."""
    queue, engine = CountingQueue(), SlowScorer()
    stage = OldLogProbStage(engine, CPU, **stage_options(queue, MICRO_BATCH))
    await stage.use(FixedWeights())
    await queue.admit(0)
    await queue.respond(range(MICRO_BATCH))
    (span,) = await stage.stage(1)
    assert (span.role, span.kind, span.version, span.iteration) == ("actor_fwd", "stage_weights", 1, 0)
    return stage, engine, queue


async def test_weights_that_come_during_a_computation_are_loaded_after_it() -> None:
    stage, engine, queue = await slow_stage()
    working = asyncio.create_task(stage.process(0))
    await settle()
    swapping = asyncio.create_task(stage.swap(1))
    await settle()
    assert engine.log == ["score begins"] and stage.version == 0
    assert "actor_fwd[0].load waits for the weights of version 1" in await stage.waiting()
    engine.end.set()
    (span,) = await swapping
    await settle()
    assert engine.log == ["score begins", "score ends", "load begins", "load ends"]
    assert (span.kind, span.version) == ("load_weights", 1)
    await queue.respond(range(MICRO_BATCH, ROWS))
    spans = await working
    assert [s.version for s in spans if s.kind == "old_log_prob"] == [0, 1, 1]


async def test_rows_that_come_during_a_load_are_scored_by_what_was_loaded() -> None:
    stage, engine, queue = await slow_stage()
    swapping = asyncio.create_task(stage.swap(1))
    await settle()
    scoring = asyncio.create_task(stage.compute(await queue.read("actor_fwd", count=MICRO_BATCH)))
    await settle()
    assert engine.log == ["load begins"]
    engine.end.set()
    await swapping
    assert (await scoring)["old_version"].tolist() == [1] * MICRO_BATCH
    assert engine.log == ["load begins", "load ends", "score begins", "score ends"]


# --- a stage over all batches at once ---------------------------------------------------------------------------------


class NotingStage(StageRole):
    """A reference that computes nothing, and keeps the rows of each micro-batch."""

    role = kind = "reference"

    def __init__(self, queue: Any, rows: int = 2 * GROUP, pauses: Sequence[float] = (), name: str = "0") -> None:
        super().__init__(queue, TickingClock(), name=name, rows=rows, minimum=rows)
        self.seen: list[list[int]] = []
        self.pauses = iter(pauses)

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        self.seen.append(batch.rows.tolist())
        await asyncio.sleep(next(self.pauses, 0.0))
        lengths = batch.ragged("response").lengths
        return {"ref_log_probs": Ragged(np.zeros(lengths.sum(), np.float32), lengths)}


def rows_of(iteration: int) -> range:
    return range(iteration * ROWS, (iteration + 1) * ROWS)


async def test_a_stream_takes_whatever_is_ready_and_ends_when_the_queue_is_closed_and_done() -> None:
    queue = CountingQueue(order="completion")
    stage = NotingStage(queue)
    running = asyncio.create_task(stage.stream())
    for iteration in (0, 1):
        await queue.admit(iteration)
    await queue.respond(rows_of(1), 1)
    await settle()
    assert [rows[0] // ROWS for rows in stage.seen] == [1] * 3, "a batch is worked on before one that came earlier"
    await queue.respond(rows_of(0), 0)
    await settle()
    assert not running.done()
    await queue.close()
    spans = await running
    assert sorted(row for rows in stage.seen for row in rows) == list(range(2 * ROWS))
    assert [span.iteration for span in spans] == [1] * 3 + [0] * 3
    written = (await queue.describe())["partitions"]
    assert [written[partition_name(i)]["written"]["ref_log_probs"] for i in (0, 1)] == [ROWS, ROWS]


async def test_spans_are_handed_out_while_a_stream_goes_on_and_each_once() -> None:
    queue = CountingQueue()
    stage = NotingStage(queue)
    running = asyncio.create_task(stage.stream())
    await queue.admit(0)
    await queue.respond(range(2 * GROUP))
    await settle()
    assert len(await stage.take_spans()) == 1
    assert await stage.take_spans() == []
    await queue.respond(range(2 * GROUP, ROWS))
    await queue.close()
    assert len(await running) == 2


async def test_a_stage_says_what_it_waits_for() -> None:
    queue = CountingQueue()
    stage = NotingStage(queue)
    await queue.admit(0)
    running = asyncio.create_task(stage.process(0))
    await settle()
    assert await stage.waiting() == ["reference[0].work waits for rows of train_0"]
    await queue.respond(rows_of(0), 0)
    await running
    assert await stage.waiting() == []


# --- beside the actor -------------------------------------------------------------------------------------------------


async def test_the_trainers_parameters_score_as_the_version_of_the_trainers_last_step() -> None:
    queue, trainer = CountingQueue(), KeepingTrainer()
    role = actor(queue, trainer)
    stage = TrainersLogProbStage(scorer(), lambda: role.version, **stage_options(queue, MICRO_BATCH))
    others = [
        RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1)),
        AdvantageStage(group_size=GROUP, advantages=GRPO, **stage_options(queue, ROWS, GROUP)),
        ReferenceStage(scorer(), **stage_options(queue, MICRO_BATCH)),
    ]
    for iteration in range(2):
        await queue.admit(iteration)
        await queue.respond(rows_of(iteration), iteration)
        beside = [other.process(iteration) for other in others]
        spans, report, *_ = await asyncio.gather(stage.process(iteration), role.train(iteration), *beside)
        assert {span.version for span in spans} == {iteration} and report.sums["scored_lag"] == 0
        assert role.version == iteration + 1
    versions = [batch.old_versions.tolist() for batch in trainer.batches if batch.old_versions is not None]
    assert versions == [[0] * MICRO_BATCH] * 3 + [[1] * MICRO_BATCH] * 3


@pytest.mark.parametrize("beside", [True, False])
async def test_advantages_of_tokens_are_made_of_what_actor_fwd_computes_group_by_group(beside: bool) -> None:
    with_baseline = algorithm(advantage="optimal_token_baseline")
    by_token = token_advantages_of(with_baseline)
    queue = CountingQueue(roles=("rollout", "actor", "actor_fwd"), advantages_read=columns_compared(with_baseline))
    assert by_token is not None and not needs_whole_batch(with_baseline)
    options = {"gradient_squares": True, **stage_options(queue, MICRO_BATCH)}
    old = TrainersLogProbStage(scorer(), lambda: 0, **options) if beside else OldLogProbStage(scorer(), CPU, **options)
    rows = await queue.admit(0)
    stages = [
        RewardStage(TASK, scored_here(TASK), **stage_options(queue, ROWS, 1)),
        AdvantageStage(group_size=GROUP, by_token=by_token, shaping=by_length, **stage_options(queue, ROWS, GROUP)),
        old,
    ]
    running = [asyncio.create_task(stage.process(0)) for stage in stages]
    await queue.respond(rows[:MICRO_BATCH])
    await settle()
    assert (await queue.describe())["partitions"]["train_0"]["written"]["advantage"] == MICRO_BATCH
    await queue.respond(rows[MICRO_BATCH:])
    await asyncio.gather(*running)
    batch = await queue.read("actor")
    engine, mask = scorer(), batch.ragged("loss_mask")
    log_probs, squares = await engine.gradient_squares(batch.ragged("prompt"), batch.ragged("response"))
    np.testing.assert_allclose(batch.ragged("old_log_probs").values, log_probs.values, rtol=1e-4, atol=1e-5)
    tokens = torch.from_numpy(mask.lengths).view(-1, GROUP)  # all were sampled
    rewards = by_length(torch.from_numpy(batch.dense("reward")).view(-1, GROUP), tokens)
    columns = (torch.from_numpy(part) for part in (squares.values, mask.values, mask.lengths))
    expected = by_token.columns(rewards, *columns)["advantage"]
    np.testing.assert_allclose(batch.ragged("advantage").values, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert batch.ragged("advantage").lengths.tolist() == mask.lengths.tolist() and expected.ne(0).any()


PAUSES = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.5, 7.0]), max_size=18)


@given(st.data(), st.sampled_from([1, 2, 3, 6]), st.booleans())
def test_the_kth_micro_batches_of_all_ranks_belong_together(data: st.DataObject, ranks: int, stream: bool) -> None:
    """A micro-batch of a group each, which all ranks score together."""
    orders = [data.draw(st.permutations(range(GROUPS))) for _ in range(3)]
    pauses = [data.draw(PAUSES) for _ in range(ranks)]
    between = data.draw(PAUSES)

    async def main() -> list[list[list[int]]]:
        queue = CountingQueue(training_ranks=ranks, beside_actor=("reference",))
        views = [RankQueue(queue, rank=rank) for rank in range(ranks)]
        stages = [NotingStage(view, GROUP, pauses[rank], str(rank)) for rank, view in enumerate(views)]

        async def work(stage: NotingStage) -> None:
            if stream:
                await stage.stream()
            else:
                for iteration in range(3):
                    await stage.process(iteration)

        waits = iter(between)
        async with asyncio.TaskGroup() as tasks:
            for stage in stages:
                tasks.create_task(work(stage))
            for iteration, order in enumerate(orders):
                await queue.admit(iteration)
                for group in order:
                    first = iteration * ROWS + group * GROUP
                    await queue.respond(range(first, first + GROUP), iteration)
                    await asyncio.sleep(next(waits, 0.0))
            await queue.close()
        written = (await queue.describe())["partitions"]
        assert [written[partition_name(i)]["written"]["ref_log_probs"] for i in range(3)] == [ROWS] * 3
        return [stage.seen for stage in stages]

    seen = run_virtual(main())
    together = [sorted(sum(parts, [])) for parts in zip(*seen, strict=True)]
    assert together == [list(range(at, at + ranks * GROUP)) for at in range(0, 3 * ROWS, ranks * GROUP)]
