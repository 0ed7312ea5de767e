"""The queue's schema for one job: the columns that each role reads and writes.

    prompts ─ prompt, answer, admitted_at ─┐
    rollout ─ response, loss_mask, log_probs, versions, engine, started_at, first_token_at, finished_at, finish_reason,
       │      turns, environment_reward, failure, (routes)
       ├─> reward      ─ reward, exact_match, reward_failure, (score_extras) ─> advantages ─ advantage, (kl_coef)
       │                   └─> (filter ─ passed ─> prompts ─ kept): all below and advantages wait for kept
       ├─> reference   ─ ref_log_probs
       ├─> actor_fwd   ─ old_log_probs, old_version, (gradient_squares: read by advantages)
       ├─> critic      ─ values, value_version: read by advantages, which then write returns, and by the critic again
       └─> actor reads all of them

One row is one sample; `response`, `loss_mask`, `log_probs`, `versions`, `ref_log_probs`, `old_log_probs`,
`gradient_squares`, `values`, `returns` and, where it is made of squares or values, `advantage` have a value per token,
`score_extras` one for each name in `extra_metrics` of the task, `routes` as many for each token of prompt and response
as there are layers times experts of a token. `response` is all that follows the prompt, with what an
environment wrote; `loss_mask` is True where the policy sampled. `finish_reason` is a place in
`harness.protocols.FINISH_REASONS`; `environment_reward` is NaN where there is none, and so is `reward` where a sample
could not be scored: `reward_failure` says why, `failure` why its environment failed, both "" elsewhere.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from harness.config.registries import ORDERS
from harness.protocols import FINISH_REASONS, Completion
from harness.transfer_queue import Batch, Column, ColumnSpec, QueueSpec, Ragged, TaskSpec
from schedules import Order

PROMPT_COLUMNS = {
    "prompt": ColumnSpec("int64", ragged=True),
    "answer": ColumnSpec("uint8", ragged=True),  # UTF-8
    "admitted_at": ColumnSpec("float64"),
}
ROLLOUT_COLUMNS = {
    "response": ColumnSpec("int64", ragged=True),
    "log_probs": ColumnSpec("float32", ragged=True),
    "versions": ColumnSpec("int32", ragged=True),
    "engine": ColumnSpec("int32"),
    "started_at": ColumnSpec("float64"),
    "first_token_at": ColumnSpec("float64"),
    "finished_at": ColumnSpec("float64"),
    "loss_mask": ColumnSpec("bool", ragged=True),
    "finish_reason": ColumnSpec("int8"),
    "turns": ColumnSpec("int32"),
    "environment_reward": ColumnSpec("float32"),
    "failure": ColumnSpec("uint8", ragged=True),  # UTF-8
}
SCORED = ("response", "loss_mask", "finish_reason", "turns", "environment_reward", "failure")
"""Columns of rollout that rewards are made of."""
REWARD_COLUMNS = {
    "reward": ColumnSpec("float64"),  # as it was given: of large ones small differences count
    "exact_match": ColumnSpec("bool"),
    "reward_failure": ColumnSpec("uint8", ragged=True),  # UTF-8
}
FOR_REWARDS = ("answer", "environment_reward", "failure")
"""Columns that nobody reads after rewards."""
EXTRA_COLUMNS = {"score_extras": ColumnSpec("float64", ragged=True)}
ADVANTAGE_COLUMNS = {"advantage": ColumnSpec("float32")}
REWARD_KL_COLUMNS = {"kl_coef": ColumnSpec("float32")}  # with which the KL was taken off the reward
REFERENCE_COLUMNS = {"ref_log_probs": ColumnSpec("float32", ragged=True)}
FILTER_COLUMNS = {
    "sample": ColumnSpec("int64"),  # whose row this is now: others had it before, and were refused
    "passed": ColumnSpec("bool"),
    "kept": ColumnSpec("bool"),
}
VALUE_COLUMNS = {"values": ColumnSpec("float32", ragged=True), "value_version": ColumnSpec("int32")}
RETURN_COLUMNS = {"returns": ColumnSpec("float32", ragged=True)}
TOKEN_ADVANTAGE_COLUMNS = {"advantage": ColumnSpec("float32", ragged=True)}  # where it is made of such columns
OLD_COLUMNS = {"old_log_probs": ColumnSpec("float32", ragged=True), "old_version": ColumnSpec("int32")}
ROUTES = "routes"
"""The column of rollout that has the experts of each token (`harness.protocols.Completion`)."""
SQUARE_COLUMNS = {"gradient_squares": ColumnSpec("float32", ragged=True)}

CRITIC_TRAINING = "critic_training"
"""The task by which the critic reads rows a second time, to learn from them."""
RECORD = "record"
"""The role on the host, and the task, by which rows are read once more when they have been trained, to be written
down."""
REFUSED = "refused"
"""The task by which the same role reads rows whose group is refused, before their places are dealt another."""
RECORDED = (
    "prompt",
    "admitted_at",
    *(column for column in ROLLOUT_COLUMNS if column not in FOR_REWARDS),
    *REWARD_COLUMNS,
)
"""Columns that are recorded, besides `score_extras` where scores have such."""
TOKENS = ("prompt", "response")
"""Columns whose lengths are a sample's tokens: by these, ranks that share a micro-batch have as much to do."""
OF_VALUES = ("prompt", "response", "loss_mask", "finish_reason", "reward", *VALUE_COLUMNS, "returns")
"""Columns that the critic learns from."""

_PARTITION = "train_"


def text_column(texts: Sequence[str]) -> Ragged:
    """Texts as a column, uint8."""
    return Ragged.from_rows([np.frombuffer(text.encode(), np.uint8) for text in texts])


def texts_of(column: Ragged) -> list[str]:
    """The inverse of `text_column`."""
    return [row.tobytes().decode() for row in column.rows()]


@dataclass(frozen=True)
class Numbering:
    """Groups as the queue numbers them, and as schedules do: behind each `batch` of these there are `spares` more."""

    batch: int
    spares: int = 0

    def of(self, below: int) -> int:
        """The first group of the queue that is beyond those under `below`: spares belong to whole batches only."""
        return below // self.batch * (self.batch + self.spares) + below % self.batch


def samples_in(batch: Batch) -> np.ndarray:
    """The samples that these rows hold, int64 [rows]: their ids are the rows', unless a filter had others there
    before."""
    return batch.dense("sample") if "sample" in batch.columns else batch.rows


def as_sampled(batch: Batch) -> tuple[Ragged, ...]:
    """Prompts, responses and, where these are in the queue, the experts that they went to, as scorers read them."""
    return tuple(batch.ragged(name) for name in (*TOKENS, ROUTES) if name in batch.columns)


def partition_name(iteration: int) -> str:
    """The partition that holds the batch of an iteration."""
    return f"{_PARTITION}{iteration}"


def iteration_of(partition: str) -> int:
    """The iteration whose batch this partition holds: the inverse of `partition_name`. ValueError for another name."""
    iteration = partition.removeprefix(_PARTITION)
    if iteration == partition or not iteration.isdecimal():
        raise ValueError(f"partition {partition!r} holds no batch: its name is not {_PARTITION}<iteration>")
    return int(iteration)


@dataclass(frozen=True)
class JobShape:
    """The facts that the queue of a job depends on, a field for each.

    roles: of placement.DEVICE_ROLES; reward and advantages are always there. training_ranks, critic_ranks: of worlds
    each of which reads its share. capacity_rows: the queue's cap, in samples.
    """

    roles: Collection[str]
    training_ranks: int
    capacity_rows: int
    order: Order = "fifo"
    """"fifo": forward passes and training take rows first in, first out; then a micro-batch holds the same rows
    whatever the timing, and the same seed gives the same bits. "completion": forward passes take whatever is ready,
    training takes groups in the order in which they became ready, of whatever batch; of several ranks the first one
    reads for all (harness/workers/dealing.py). Any other order is a policy of the queue by its name or import path,
    which training follows instead. Rewards are per sample, so they always take whatever is ready."""
    score_extras: bool = False
    """Whether scores have extra values."""
    beside_actor: Collection[str] = ()
    """Roles (of "reference" and "actor_fwd") that share the training world: each of its ranks reads a share of every
    micro-batch."""
    environment: bool = False
    """Whether rollout plays with one, which reads what rewards read."""
    advantages_read: Sequence[str] = ()
    """Columns that advantages are made of besides rewards."""
    batches_compared: bool = False
    """Whether advantages take batches whole, and in order."""
    filter_reads: Sequence[str] | None = None
    """Columns that the filter is made of besides rewards; None: there is none. With one, a group goes to no role after
    it before it is `kept`; until then its rows may begin again, and rollout, rewards and filter wait for them."""
    drops_stragglers: bool = False
    """Whether rows may begin again, too, where a sample of a group took too long."""
    redeals_failed: bool = False
    """Whether they may where a sample of a group could not be scored."""
    critic_ranks: int = 1
    awaits_completion: bool = False
    """Whether the schedule waits for groups to be complete."""
    routes: Literal["uint8", "int16"] | None = None
    """The dtype of the experts that rollout chose, which training, and what scores for it, choose again; None: they
    choose for themselves."""
    window: int | None = None
    """Samples from the oldest untrained one on that may be trained; None: all of them."""


def queue_spec(shape: JobShape) -> QueueSpec:
    """The columns and tasks of a job's queue. Ranks get equally many groups of a micro-batch each, of nearly equally
    many tokens in all: which follows from these lengths alone, whatever the timing."""
    training_ranks = shape.training_ranks if shape.order == "fifo" else 1
    forward, training = ("fifo", "fifo") if shape.order == "fifo" else ("ready", ORDERS.get(shape.order, shape.order))
    columns = PROMPT_COLUMNS | ROLLOUT_COLUMNS | REWARD_COLUMNS | ADVANTAGE_COLUMNS
    trained = [*PROMPT_COLUMNS, *ROLLOUT_COLUMNS, *REWARD_COLUMNS, *ADVANTAGE_COLUMNS]
    trained = [column for column in trained if column not in FOR_REWARDS]

    def shared(columns: Sequence[str], policy: str, ranks: int) -> TaskSpec:
        balance: dict[str, Any] = {"split": "balanced", "weight": TOKENS} if ranks > 1 else {}
        return TaskSpec(tuple(columns), policy=policy, ranks=ranks, whole_groups=True, **balance)

    def scored(role: str) -> TaskSpec:
        read = (*TOKENS, ROUTES) if shape.routes and role == "actor_fwd" else TOKENS
        return shared(read, forward, training_ranks if role in shape.beside_actor else 1)

    tasks = {
        "rollout": TaskSpec(
            ("prompt", "answer") if shape.environment else ("prompt",), whole_groups=True, writes=tuple(ROLLOUT_COLUMNS)
        ),
        "reward": TaskSpec(("prompt", "answer", *SCORED), policy="ready", writes=("reward",)),
        "advantages": TaskSpec(
            ("reward", *shape.advantages_read),
            policy="fifo" if shape.batches_compared else "ready",
            whole_groups=True,
            writes=("advantage",),
        ),
    }
    if shape.routes is not None:
        columns |= {ROUTES: ColumnSpec(shape.routes, ragged=True)}
        trained.append(ROUTES)
    if "gradient_squares" in shape.advantages_read:
        columns |= SQUARE_COLUMNS | TOKEN_ADVANTAGE_COLUMNS
    if "ref_log_probs" in shape.advantages_read:
        columns |= REWARD_KL_COLUMNS
        trained += REWARD_KL_COLUMNS
    if "reference" in shape.roles:
        columns |= REFERENCE_COLUMNS
        trained += REFERENCE_COLUMNS
        tasks["reference"] = scored("reference")
    if "actor_fwd" in shape.roles:
        columns |= OLD_COLUMNS
        trained += OLD_COLUMNS
        tasks["actor_fwd"] = scored("actor_fwd")
    if shape.score_extras:
        columns |= EXTRA_COLUMNS
        trained += EXTRA_COLUMNS
    if "critic" in shape.roles:
        columns |= VALUE_COLUMNS | RETURN_COLUMNS | TOKEN_ADVANTAGE_COLUMNS
        tasks["critic"] = shared(TOKENS, forward, shape.critic_ranks)
        tasks[CRITIC_TRAINING] = shared(OF_VALUES, training, shape.critic_ranks)
    tasks[RECORD] = TaskSpec(
        (*RECORDED, *(EXTRA_COLUMNS if shape.score_extras else ())), policy="ready", lease_s=math.inf, background=True
    )
    tasks["actor"] = replace(shared(trained, training, training_ranks), window=shape.window)
    if shape.awaits_completion:
        tasks[COMPLETE] = TaskSpec(("finish_reason",), policy=training, whole_groups=True, window=shape.window)
    if shape.filter_reads is not None or shape.drops_stragglers or shape.redeals_failed:
        columns |= FILTER_COLUMNS
        tasks = _refilled(tasks, shape.filter_reads, shape.drops_stragglers)
    return QueueSpec(columns, tasks, shape.capacity_rows)


COMPLETE = "complete"
"""The task by which the driver hears that groups are complete, and kept."""
VERDICTS = "verdicts"
"""The task of the queue by which whoever deals prompts hears what the filter says, and how samples ended."""


def _refilled(
    tasks: Mapping[str, TaskSpec], filter_reads: Sequence[str] | None, drops_stragglers: bool
) -> dict[str, TaskSpec]:
    """The tasks with a decision between reward and all that follows: whether a group is kept."""
    heard = (
        "reward",
        "reward_failure",
        *(() if filter_reads is None else ("passed",)),
        *(("finish_reason",) if drops_stragglers else ()),
    )
    before = {
        "rollout": replace(tasks["rollout"], columns=(*tasks["rollout"].columns, "sample")),
        "reward": tasks["reward"],
        VERDICTS: TaskSpec(heard, policy="ready", whole_groups=True),
        REFUSED: TaskSpec((*tasks[RECORD].columns, "sample"), policy="ready", background=True),
    }
    if filter_reads is not None:
        before["filter"] = TaskSpec(("reward", *filter_reads), policy="ready", whole_groups=True, writes=("passed",))
    after = {
        name: replace(task, columns=(*task.columns, *(("sample",) if name in ("actor", RECORD) else ()), "kept"))
        for name, task in tasks.items()
        if name not in before
    }
    return {name: replace(task, settled_by="kept") for name, task in before.items()} | after


def rollout_columns(completed: Sequence[Completion], engine: int) -> dict[str, Column]:
    """Columns that rollout writes of samples that this engine finished."""
    return _routes(completed) | {
        "response": Ragged.from_rows([c.tokens for c in completed]),
        "log_probs": Ragged.from_rows([c.log_probs for c in completed]),
        "versions": Ragged.from_rows([c.versions for c in completed]),
        "engine": np.full(len(completed), engine, np.int32),
        "started_at": np.array([c.started_at for c in completed], np.float64),
        "first_token_at": np.array([c.first_token_at for c in completed], np.float64),
        "finished_at": np.array([c.finished_at for c in completed], np.float64),
        "loss_mask": Ragged.from_rows([_mask(c) for c in completed]),
        "finish_reason": np.array([FINISH_REASONS.index(c.finish_reason) for c in completed], np.int8),
        "turns": np.array([c.turns for c in completed], np.int32),
        "environment_reward": np.array([c.environment_reward for c in completed], np.float32),
        "failure": text_column([c.failure for c in completed]),
    }


def _routes(completed: Sequence[Completion]) -> dict[str, Column]:
    found = next((c.routes for c in completed if c.routes is not None), None)
    if found is None:
        return {}
    none = found[:0]
    return {ROUTES: Ragged.from_rows([(none if c.routes is None else c.routes).ravel() for c in completed])}


def _mask(completion: Completion) -> np.ndarray:
    """bool [L]: True where the policy sampled."""
    return np.ones(len(completion.tokens), np.bool_) if completion.mask is None else completion.mask
