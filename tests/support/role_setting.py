"""A job's roles over one queue in one process: what a real job is, without its workers."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.config import ModelConfig
from harness.config.registries import find
from harness.protocols import Clock, Completion, Request, RolloutEngine, Sampling, StopMode
from harness.tasks import Task
from harness.transfer_queue import Column, Ragged
from harness.transfer_queue.local import LocalQueue
from harness.workers.dataflow import JobShape, partition_name, queue_spec, rollout_columns, text_column
from harness.workers.episodes import Episodes
from harness.workers.rollout import Ports, RolloutRole, RolloutSettings
from harness.workers.turns import NO_TURNS, Turns

GROUP, GROUPS = 4, 6
ROWS = GROUP * GROUPS
SMALL = ModelConfig("small", 32, 1, 4, 2, 8, 64, 32, True, 64)
CPU = torch.device("cpu")
TASK: Task = find("task", "reverse")()
ALL_ROLES = ("rollout", "actor", "reference", "actor_fwd")


class TickingClock:
    """Each look at it is one second later."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


class CountingQueue(LocalQueue):
    """Remembers the responses that were put; `gate` holds such puts back while it is not set."""

    def __init__(self, roles: Iterable[str] = ALL_ROLES, training_ranks: int = 1, **spec: Any) -> None:
        told = {"training_ranks": training_ranks, "capacity_rows": 3 * ROWS, **spec}
        super().__init__(queue_spec(JobShape(list(roles), **told)))
        self.responses: list[list[int]] = []
        self.versions: dict[int, list[int]] = {}
        self.putting = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        if "response" in columns:
            self.responses.append(list(rows))
            versions = columns["versions"]
            assert isinstance(versions, Ragged)
            self.versions |= {row: part.tolist() for row, part in zip(rows, versions.rows(), strict=True)}
            self.putting.set()
            await self.gate.wait()
        await super().put(partition, rows, columns)

    def written(self) -> list[int]:
        """Every row of a response that was put, as often as it was."""
        return sorted(row for put in self.responses for row in put)

    async def admit(self, iteration: int, task: Task = TASK) -> list[int]:
        """One batch of prompts; its rows."""
        rows = list(range(iteration * ROWS, (iteration + 1) * ROWS))
        problems = [task.problem(row // GROUP, seed=0) for row in rows]
        await self.create_partition(partition_name(iteration), rows, GROUP)
        columns = {
            "prompt": Ragged.from_rows([problem.prompt for problem in problems]),
            "answer": text_column([problem.answer for problem in problems]),
            "admitted_at": np.zeros(ROWS),
        }
        await self.put(partition_name(iteration), rows, columns)
        return rows

    async def respond(self, rows: Sequence[int], iteration: int = 0) -> None:
        """Responses of these samples, as an engine writes them."""
        await self.put(partition_name(iteration), rows, responses(rows))

    async def start(self, groups: int, below: int) -> None:
        """An engine takes the next groups, under this dispatch limit."""
        await self.set_bound("rollout", "engine", below * GROUP)
        for _ in range(groups):
            assert await self.get("rollout", GROUP, consumer="engine", timeout_s=5) is not None

    async def read(self, task: str, iteration: int = 0, count: int = ROWS) -> Any:
        return await self.get(task, count, partition=partition_name(iteration), timeout_s=60)


class HandEngine:
    """A rollout engine that finishes what, and when, the test says."""

    def __init__(self, slots: int = ROWS) -> None:
        self.slots, self.version = slots, 0
        self.held: list[int] = []
        self.batches: list[list[int]] = []
        self.was_cut: list[list[int]] = []
        self.awake = self.kept_weights = True
        self.paused: StopMode | None = None
        self._done: asyncio.Queue[list[Completion]] = asyncio.Queue()

    @property
    def running(self) -> int:
        return len(self.held)

    waiting = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.held += [request.sample_id for request in requests]
        self.batches.append([request.sample_id for request in requests])

    def finish(self, sample_ids: Sequence[int]) -> None:
        self.held = [held for held in self.held if held not in sample_ids]
        self._done.put_nowait([completion(sample_id, self.version) for sample_id in sample_ids])

    async def finished(self) -> list[Completion]:
        return await self._done.get()

    async def pause(self, mode: StopMode) -> None:
        self.paused = mode

    def drop_cache(self) -> None: ...

    async def cut(self, sample_ids: Collection[int]) -> None:
        self.was_cut.append(sorted(sample_ids))

    async def resume(self) -> None:
        self.paused = None

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        list(weights)
        self.version = version

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self.awake, self.kept_weights = False, keep_weights

    async def wake(self) -> None:
        self.awake = True

    async def close(self) -> None: ...


def completion(sample_id: int, version: int) -> Completion:
    """A response of a length of its own."""
    tokens = np.arange(1, 2 + sample_id % 5, dtype=np.int64)
    log_probs = np.full(len(tokens), -1.0, np.float32)
    versions = np.full(len(tokens), version, np.int32)
    return Completion(sample_id, tokens, log_probs, versions, "stop", 1.0, 2.0)


def responses(rows: Iterable[int]) -> dict[str, Column]:
    """What an engine at version 0 writes of these samples."""
    return rollout_columns([completion(row, version=0) for row in rows], engine=0)


class FixedWeights:
    """A receiver of all transports: version v is the model drawn from seed v."""

    def __init__(self) -> None:
        self.there: list[int] = []

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        model = build_model(SMALL, seed=version)
        return ((name, parameter.detach()) for name, parameter in model.named_parameters())

    async def stage(self, version: int) -> None:
        self.there.append(version)

    def staged(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        assert version in self.there, f"version {version} was not staged"
        return self.receive(version)


def torch_engine(slots: int = 8, max_tokens: int = 12) -> TorchRollout:
    sampling = Sampling(max_tokens, stop_tokens=TASK.stop_tokens)
    return TorchRollout(build_model(SMALL), sampling=sampling, slots=slots, seed=0, clock=TickingClock())


def rollout_role(
    engine: RolloutEngine,
    queue: LocalQueue,
    *,
    index: int = 0,
    share: int = ROWS,
    stream_share: int = 100 * ROWS,
    shares_device: bool = False,
    turns: Turns = NO_TURNS,
    clock: Clock | None = None,
    episodes: Episodes | None = None,
    greedy: Sampling | None = None,
    puts_off: bool = False,
) -> RolloutRole:
    settings = RolloutSettings(
        index=index,
        group_size=GROUP,
        share=share,
        stream_share=stream_share,
        keep_cache=False,
        shares_device=shares_device,
        greedy=greedy,
        puts_off=puts_off,
    )
    return RolloutRole(engine, Ports(queue, clock or TickingClock(), CPU, turns, episodes), settings)


async def settle(turns: int = 50) -> None:
    """Let every task that can go on do so."""
    for _ in range(turns):
        await asyncio.sleep(0)
