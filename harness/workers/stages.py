"""The roles between rollout and training: reward, advantages, and log-probabilities under the initial policy
(reference) or a recent one (actor_fwd). All share one loop: read, compute, write."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from harness.config import AlgorithmConfig
from harness.protocols import FINISH_REASONS, TRUNCATED, Clock, Completion, LogProbEngine, Scorer, Span
from harness.rl.advantages import Advantages, compares_lengths, parts_compared
from harness.rl.filters import Filter
from harness.rl.kl import RewardKL, less_costs
from harness.rl.shaping import Shaping
from harness.rl.token_advantages import TokenAdvantages, token_advantages_of
from harness.runtime.runtime import open_ended
from harness.tasks import Problem, Sample, Task, extra_metrics, extra_values, sample_of
from harness.transfer_queue import Batch, Column, Ragged, TransferQueue
from harness.weight_sync.endpoints import ReceivingWorker
from harness.workers.dataflow import as_sampled, iteration_of, partition_name, rollout_columns, text_column, texts_of
from harness.workers.dealing import DealtQueue
from harness.workers.readers import RankQueue
from harness.workers.reward_scorers import FailureLog, HostScorer, RewardPool, Scored, score_of_failures
from harness.workers.turns import NO_TURNS, ComputingRole, Turns, abandon


class StageRole(ComputingRole, ABC):
    """One worker of a role between rollout and training.

    role: the task it is in the queue; kind: what its spans are called; rows: the micro-batch, in samples;
    turns: on its device; ahead: ask for the next micro-batch while one is computed, where no other worker could compute
    it instead.

    It waits for rows as long as it takes: a worker that dies ends the run, and a run in which nobody computes anything
    ends itself (`watch_progress`).
    """

    role: str
    kind: str

    def __init__(
        self,
        queue: TransferQueue | RankQueue | DealtQueue,
        clock: Clock,
        *,
        name: str,
        rows: int,
        minimum: int,
        turns: Turns = NO_TURNS,
        ahead: bool = False,
    ) -> None:
        super().__init__(f"{self.role}[{name}]", turns)
        self.queue, self.clock, self.name, self.ahead = queue, clock, name, ahead
        self.rows, self.minimum = rows, minimum
        self.version = 0
        self._spans: list[Span] = []

    @open_ended
    async def process(self, iteration: int) -> list[Span]:
        """Work through one batch; returns when none of its rows is left."""
        await self._work(partition_name(iteration))
        return await self.take_spans()

    @open_ended
    async def stream(self) -> list[Span]:
        """Work through every batch, whichever has rows, until the queue is closed and exhausted.

        Returns the last spans only: `take_spans` hands the others out while the run goes on.
        """
        await self._work(None)
        return await self.take_spans()

    async def take_spans(self) -> list[Span]:
        """Spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    async def _work(self, partition: str | None) -> None:
        """Consumes this role's inputs, of one partition or of all, and produces its outputs.

        Waits for rows only; the roles before it unblock it. Result and the next request leave together, unless that was
        asked ahead: the queue takes the calls of one process in order, and if it refuses the result, that error ends
        the run.
        """
        batch = await self._fetch(partition)
        while batch is not None:
            following = None
            if self.ahead:
                following = asyncio.create_task(self._fetch(partition))
                await asyncio.sleep(0)  # lets the request leave before the computation takes the process
            iteration = iteration_of(batch.partition)
            try:
                async with self.turn("work"):
                    start = self.clock.now()
                    columns = await self.compute(batch)
                    end = self.clock.now()
            except BaseException:
                if following is not None:
                    abandon(following)
                raise
            self._spans.append(Span(self.role, self.name, self.kind, start, end, self.version, iteration))
            _, batch = await asyncio.gather(
                self.queue.put(batch.partition, batch.rows, columns), following or self._fetch(partition)
            )

    async def _fetch(self, partition: str | None) -> Batch | None:
        with self.waits("work", f"rows of {partition or 'any batch'}"):
            return await self.queue.get(
                self.role,
                self.rows,
                minimum=self.minimum,
                partition=partition,
                consumer=self.waits.owner,  # its own: what it had goes to another where it dies
            )

    @abstractmethod
    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        """The columns that this role adds to these rows."""


@dataclass(frozen=True)
class Judged:
    """Scores of responses, in lists of one length: the reward, NaN where there is none, whether it is right, the extra
    values of the score in the order of their names, and why it could not be scored, "" where it was."""

    rewards: list[float] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    extras: list[list[float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def joined(self, more: Judged) -> Judged:
        """Scores of these, and of more behind them."""
        return Judged(
            self.rewards + more.rewards,
            self.exact + more.exact,
            self.extras + more.extras,
            self.failures + more.failures,
        )


class RewardStage(StageRole):
    """Scores each response. One that cannot be scored, or whose environment failed, has no score: its reward is NaN, or
    `task.failure_reward`, and `reward_failure` says why. sample_s: simulated seconds for each, one after the other."""

    role = kind = "reward"

    def __init__(
        self,
        task: Task,
        scorer: HostScorer | RewardPool,
        *,
        reward: str = "",
        failure_reward: float | None = None,
        sample_s: float = 0.0,
        **stage: Any,
    ) -> None:
        super().__init__(**stage)
        self.task, self.scorer, self.sample_s = task, scorer, sample_s
        self._unscored = score_of_failures(failure_reward)
        self._failures = FailureLog(reward)
        self.extra_names = extra_metrics(task)

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        if self.sample_s:
            await self.clock.sleep(len(batch.rows) * self.sample_s)
        samples, ended = samples_of(self.task, batch), texts_of(batch.ragged("failure"))
        of_rest = iter(await self.scorer.scores([one for one, why in zip(samples, ended, strict=True) if not why]))
        scored = [Scored(self._unscored, why) if why else next(of_rest) for why in ended]
        scores = [one.score for one in scored]
        columns: dict[str, Column] = {
            "reward": np.array([score.reward for score in scores], np.float64),
            "exact_match": np.array([score.exact_match for score in scores], np.bool_),
            "reward_failure": text_column(self._failures.told(samples, scored)),
        }
        if self.extra_names:
            columns["score_extras"] = Ragged.from_rows(list(extra_values(scores, self.extra_names)))
        return columns

    @open_ended
    async def evaluate(self, problems: list[Problem], completions: list[Completion]) -> Judged:
        """The scores of responses that are in no queue; a problem for each."""
        columns: dict[str, Column] = {
            "prompt": Ragged.from_rows([problem.prompt for problem in problems]),
            "answer": text_column([problem.answer for problem in problems]),
            **rollout_columns(completions, engine=0),
        }
        scored = await self.compute(Batch("held out", np.arange(len(problems)), columns, lease=0))
        rewards, exact = scored["reward"], scored["exact_match"]
        assert isinstance(rewards, np.ndarray) and isinstance(exact, np.ndarray)
        extras = scored["score_extras"].rows() if self.extra_names else [()] * len(problems)  # type: ignore[union-attr]
        failures = scored["reward_failure"]
        assert isinstance(failures, Ragged)
        told = [list(map(float, values)) for values in extras]
        return Judged(rewards.tolist(), exact.tolist(), told, texts_of(failures))

    def close(self) -> None:
        """Ends the processes that score."""
        self.scorer.close()


class AdvantageStage(StageRole):
    """Shapes rewards, and compares the samples of a group with each other, or token by token; takes groups whole, or
    batches (`minimum`)."""

    role = kind = "advantages"

    def __init__(
        self,
        *,
        group_size: int,
        advantages: Advantages | None = None,
        by_token: TokenAdvantages | None = None,
        shaping: Shaping | None = None,
        reward_kl: RewardKL | None = None,
        parts: Sequence[int] = (),
        **stage: Any,
    ) -> None:
        """advantages: of responses; by_token: of their tokens instead; parts: places of the extra values that are
        compared in the place of rewards."""
        super().__init__(**stage)
        self.parts = list(parts)
        self.group_size, self.advantages, self.by_token = group_size, advantages, by_token
        self.shaping, self.reward_kl = shaping, reward_kl
        self._coefficients: dict[int, float] = {}  # of the KL, before each batch that a checkpoint may begin with

    async def kl_coefficient(self, iteration: int) -> float:
        """The coefficient by which this batch was made, or will be: all before it are. Forgets those of older
        batches."""
        assert self.reward_kl is not None, "asked where it goes from batch to batch"
        self._coefficients = {of: value for of, value in self._coefficients.items() if of >= iteration}
        return self._coefficients.get(iteration, self.reward_kl.coefficient)

    async def go_on_with(self, kl_coefficient: float) -> None:
        """The next batch is made with it."""
        assert self.reward_kl is not None, "there is one where there is a coefficient"
        self.reward_kl.coefficient = kl_coefficient

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        rewards = torch.from_numpy(batch.columns["reward"]).view(-1, self.group_size)
        lengths, told = None, dict[str, Column]()
        if "loss_mask" in batch.columns:
            lengths = torch.from_numpy(_lengths(batch)).view(-1, self.group_size)
        if self.shaping is not None:
            assert lengths is not None, "the queue's task asks for them where rewards are shaped"
            rewards = self.shaping(rewards, lengths)
        costs: torch.Tensor | None = None  # of tokens
        if self.reward_kl is not None:
            columns = (batch.ragged(name) for name in ("log_probs", "ref_log_probs", "loss_mask"))
            log_probs, reference, mask = (torch.from_numpy(column.values) for column in columns)
            self._coefficients[iteration_of(batch.partition)] = self.reward_kl.coefficient
            told["kl_coef"] = np.full(len(batch.rows), self.reward_kl.coefficient, np.float32)
            costs = self.reward_kl(log_probs, reference, mask, _tokens(batch))
        if self.by_token is not None:
            return told | _by_token(self.by_token, rewards, batch, costs)
        assert self.advantages is not None, "advantages are of responses or of tokens"
        if costs is not None:
            rewards = less_costs(rewards, costs, _tokens(batch))
        extras = {}
        if self.parts:
            values = torch.from_numpy(batch.ragged("score_extras").values).view(*rewards.shape, -1)
            extras["extras"] = values[:, :, self.parts]
        advantages = self.advantages(rewards, lengths, **extras)
        if advantages.shape != rewards.shape:
            raise ValueError(f"advantages must be [groups, n] = {list(rewards.shape)}, not {list(advantages.shape)}")
        return told | {"advantage": advantages.float().flatten().numpy()}


def _tokens(batch: Batch) -> torch.Tensor:
    """Tokens of each response, an environment's too, int64 [k]."""
    return torch.from_numpy(batch.ragged("loss_mask").lengths)


def _by_token(
    advantages: TokenAdvantages, rewards: torch.Tensor, batch: Batch, costs: torch.Tensor | None
) -> dict[str, Column]:
    mask, made_of = batch.ragged("loss_mask"), batch.ragged(advantages.made_of)
    columns = (torch.from_numpy(part) for part in (made_of.values, mask.values))
    found = advantages.columns(rewards, *columns, _tokens(batch), costs)
    return {name: Ragged(values.numpy(), mask.lengths) for name, values in found.items()}


def columns_compared(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Columns of the queue that advantages are made of, besides rewards."""
    by_token = token_advantages_of(algorithm)
    of_tokens = () if by_token is None else (by_token.made_of,)
    if algorithm.has_reward_kl:
        return ("loss_mask", "log_probs", "ref_log_probs", *of_tokens)
    if parts_compared(algorithm):
        return ("loss_mask", "score_extras")
    return ("loss_mask", *of_tokens) if algorithm.shaping or compares_lengths(algorithm) else ()


class ReferenceStage(StageRole):
    """The initial policy, for the KL of the trained one to it."""

    role = kind = "reference"

    def __init__(self, engine: Scorer, **stage: Any) -> None:
        super().__init__(**stage)
        self.engine = engine

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        return {"ref_log_probs": await self.engine.log_probs(*prompts_and_responses(batch))}


class OldLogProbStage(StageRole, ReceivingWorker):
    """The trainer's own arithmetic at the newest version it has seen, to compare the engine's log-probs with.

    `old_version` says which version that was, so that only tokens sampled by the same one are compared.
    """

    role, kind = "actor_fwd", "old_log_prob"

    def __init__(
        self, engine: LogProbEngine, device: torch.device, *, gradient_squares: bool = False, **stage: Any
    ) -> None:
        """gradient_squares: whether advantages are made of them."""
        super().__init__(**stage)
        self.engine, self.device, self.gradient_squares = engine, device, gradient_squares
        self._engine_is_free = asyncio.Lock()  # on a simulated clock, calls come in while the engine computes

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        async with self._engine_is_free:
            scores = await _old_scores(self.engine, batch, self.gradient_squares)
            return {**scores, "old_version": np.full(len(batch.rows), self.version, np.int32)}

    async def _load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Span]:
        """Load weights between two micro-batches, never inside one."""
        with self.waits("load", f"the weights of version {version}"):
            async with self.turns.turn(f"{self.waits.owner}.load"), self._engine_is_free:
                start = self.clock.now()
                await self.engine.load_weights(version, weights)
                self.version = version
                return [Span(self.role, self.name, "load_weights", start, self.clock.now(), version, version - 1)]


class TrainersLogProbStage(StageRole):
    """The same beside the actor: by the trainer's own parameters, as its last step left them. Nothing is sent.

    trainer_version: of those parameters, asked right before they are used; no step comes in between, as stage and
    trainer take turns.
    """

    role, kind = "actor_fwd", "old_log_prob"

    def __init__(
        self, engine: Scorer, trainer_version: Callable[[], int], *, gradient_squares: bool = False, **stage: Any
    ) -> None:
        """gradient_squares: whether advantages are made of them."""
        super().__init__(**stage)
        self.engine, self._trainer_version, self.gradient_squares = engine, trainer_version, gradient_squares

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        self.version = self._trainer_version()
        scores = await _old_scores(self.engine, batch, self.gradient_squares)
        return {**scores, "old_version": np.full(len(batch.rows), self.version, np.int32)}


async def _old_scores(engine: Scorer, batch: Batch, gradient_squares: bool) -> dict[str, Column]:
    if not gradient_squares:
        return {"old_log_probs": await engine.log_probs(*as_sampled(batch))}
    log_probs, squares = await engine.gradient_squares(*as_sampled(batch))
    return {"old_log_probs": log_probs, "gradient_squares": squares}


def samples_of(task: Task, batch: Batch) -> list[Sample]:
    """Samples for rewards, of rows that have rollout's columns."""
    prompts, responses = (column.rows() for column in prompts_and_responses(batch))
    masks, answers = batch.ragged("loss_mask").rows(), texts_of(batch.ragged("answer"))
    of_rows = (batch.dense(name).tolist() for name in ("finish_reason", "turns", "environment_reward"))
    samples = []
    for prompt, response, mask, answer, reason, turns, reward in zip(
        prompts, responses, masks, answers, *of_rows, strict=True
    ):
        sample = sample_of(task, prompt, response, answer)
        samples.append(
            replace(
                sample,
                stopped=sample.stopped and FINISH_REASONS[reason] == "stop",
                tokens=int(mask.sum()),
                turns=turns,
                environment_reward=None if math.isnan(reward) else reward,
            )
        )
    return samples


def completed_sample(task: Task, problem: Problem, completion: Completion) -> Sample:
    """The same of one response that is in no queue."""
    columns: dict[str, Column] = {
        "prompt": Ragged.from_rows([problem.prompt]),
        "answer": text_column([problem.answer]),
        **rollout_columns([completion], engine=0),
    }
    (sample,) = samples_of(task, Batch("held out", np.arange(1), columns, lease=0))
    return sample


def prompts_and_responses(batch: Batch) -> tuple[Ragged, Ragged]:
    """The two columns that scoring reads."""
    return batch.ragged("prompt"), batch.ragged("response")


Judge = Callable[[Batch], np.ndarray]
"""Decides which groups are trained, of whole groups: bool [groups]."""


class RewardJudge:
    """Judges by a function of rewards. given: which of `harness.rl.filters.GIVEN` it reads."""

    def __init__(self, keep: Filter, given: tuple[str, ...], group_size: int) -> None:
        self._keep, self._given, self._group_size = keep, given, group_size

    def __call__(self, batch: Batch) -> np.ndarray:
        made: dict[str, Callable[[], np.ndarray]] = {
            "exact_match": lambda: batch.dense("exact_match"),
            "lengths": lambda: _lengths(batch),
            "truncated": lambda: np.isin(batch.dense("finish_reason"), TRUNCATED),
        }
        given = {name: self._grouped(made[name]()) for name in self._given}
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
        return np.array([self.keeps(group) for group in groups.tolist()], np.bool_)

    def keeps(self, group: int) -> bool:
        """Whether the group of this number is kept."""
        key = np.array([self._seed ^ _FILTER, group], dtype=np.uint64)
        return float(np.random.Generator(np.random.Philox(key=key)).random()) >= self._share


_FILTER = 0x66696C746572  # keys the generator


class FilterStage(StageRole):
    """Judges groups as soon as they are scored."""

    role = kind = "filter"

    def __init__(self, *, judge: Judge, group_size: int, **stage: Any) -> None:
        super().__init__(**stage)
        self.judge, self.group_size = judge, group_size

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        return {"passed": np.repeat(self.judge(batch), self.group_size)}


def _lengths(batch: Batch) -> np.ndarray:
    """Sampled tokens of each, int64 [rows]."""
    return np.array([int(mask.sum()) for mask in batch.ragged("loss_mask").rows()], np.int64)
