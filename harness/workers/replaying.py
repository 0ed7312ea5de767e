"""Workers that do again what was recorded of a run (docs/replay.md): which samples an engine begins and by which
versions it samples their tokens, and in which micro-batches groups are trained."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config import ConfigError, JobConfig
from harness.config.placement import Placement
from harness.metrics.arrivals import (
    ARRIVALS,
    FORMAT,
    Arrivals,
    DamagedArrivals,
    Recording,
    RunOf,
    differences,
    read_arrivals,
)
from harness.protocols import Completion, Request, RolloutEngine, Sampling
from harness.transfer_queue import Batch, TransferQueue
from harness.workers.held_engine import WrappedEngine
from harness.workers.readers import Deadlines, joined

if TYPE_CHECKING:
    import torch

Runs = Sequence[tuple[int, int]]
"""(version, tokens) of each stretch of a response that one version sampled, in order."""


@dataclass(frozen=True)
class RecordedRollout:
    """The recording of one engine. groups: that were trained, in the order in which it began them; runs: of each of
    their samples; dropped: groups that were not trained, ascending, which any version may sample."""

    groups: Sequence[int]
    runs: Mapping[int, Runs]
    dropped: Sequence[int]


@dataclass(frozen=True)
class Replay:
    """A recorded run (harness/metrics/arrivals.py), as each part of a replay needs it. where: its folder, for messages;
    engines: of rollout; picklable."""

    recording: Recording
    where: str
    engines: int

    @classmethod
    def read(cls, folder: Path, config: JobConfig, seed: int, placement: Placement) -> Replay:
        """The recording of the run in this folder. Raises ConfigError where it is damaged, or of another run."""
        try:
            recording = read_arrivals(folder / ARRIVALS).with_whole_groups()
        except DamagedArrivals as error:
            raise ConfigError(f"replay: {error}; this run cannot be replayed") from error
        expected = RunOf(FORMAT, seed, config.iterations, config.algorithm.group_size)
        if recording.run != expected:
            raise ConfigError(f"replay: {folder / ARRIVALS} is of {recording.run}, and this run is {expected}")
        engines = len(placement.devices["rollout"]) // config.engine.tensor_parallel
        replay = cls(recording, str(folder), engines)
        if missing := sorted(engine for engine in replay._groups if engine >= engines):
            raise ConfigError(f"replay: engine {missing[0]} of {folder} joined meanwhile, and this run has {engines}")
        return replay

    @property
    def drops(self) -> list[list[list[int]]]:
        """Groups, by iteration and call."""
        return [told.drops for told in self.recording.iterations]

    def rollout(self, engine: int) -> RecordedRollout:
        """Groups that were dropped are dealt out: which engine began them decides nothing."""
        groups = self._groups.get(engine, {})
        dropped = sorted(group for calls in self.drops for drop in calls for group in drop)
        order = sorted(groups, key=lambda group: (groups[group], group))
        return RecordedRollout(order, self._runs.get(engine, {}), dropped[engine :: self.engines])

    @cached_property
    def batches(self) -> list[list[list[int]]]:
        """Micro-batches of all ranks together, by iteration: groups of the first rank, of the second, and so on."""
        n = self.recording.run.group_size
        return [
            [[first // n for share in shares for first in share[::n]] for shares in zip(*told.ranks, strict=True)]
            for told in self.recording.iterations
        ]

    def check(self, found: Arrivals) -> None:
        """Raises ConfigError where an iteration came out otherwise."""
        if what := differences(self.recording.iterations[found.iteration], found):
            raise ConfigError(
                f"replay: iteration {found.iteration} came out otherwise than in {self.where}: {what}; other code, "
                "another machine's arithmetic, or other inputs"
            )

    @cached_property
    def _groups(self) -> dict[int, dict[int, float]]:
        """Groups by engine, and when each was begun."""
        n, found = self.recording.run.group_size, defaultdict[int, dict[int, float]](dict)
        for sampled in self.recording.sampled:
            group = sampled.sample // n
            begun = found[sampled.engine]
            begun[group] = min(begun.get(group, sampled.started_at), sampled.started_at)
        return found

    @cached_property
    def _runs(self) -> dict[int, dict[int, Sequence[tuple[int, int]]]]:
        found = defaultdict[int, dict[int, Sequence[tuple[int, int]]]](dict)
        for sampled in self.recording.sampled:
            found[sampled.engine][sampled.sample] = sampled.runs
        return found


class ReplayedEngine(WrappedEngine):
    """`harness.protocols.RolloutEngine` around another one that samples each recorded sample stretch by stretch, each
    by the version that did so in the recorded run. Of the others it knows nothing.

    A stretch is a request of its own with a limit on its tokens, which goes on from the one before. What it has to wait
    for the next version holds no slot, so whatever has one can be finished by the version that is there. Before a pause
    comes `caught_up`: what that needs was there in the recorded run, too.

    Raises ConfigError in `submit`, `finished` and `load_weights` where the record cannot be of this job.
    """

    def __init__(self, engine: RolloutEngine, runs: Mapping[int, Runs], *, sampling: Sampling, name: str) -> None:
        """sampling: of a sample without one of its own; name: of the engine."""
        super().__init__(engine)
        self.name = name
        self._sampling = sampling
        self._runs = {sample: deque(of_sample) for sample, of_sample in runs.items()}  # that are still to come
        self._left = Counter(
            version for of_sample in runs.values() for version, _ in of_sample
        )  # stretches, by version
        self._requests: dict[int, Request] = {}  # of the stretch that the engine has
        self._held: dict[int, Request] = {}  # until their next version is there
        self._done: list[Completion] = []
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Samples without a slot, with those whose version has yet to come."""
        return self.engine.waiting + len(self._held)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples, those of the recording until their version is there."""
        self.engine.submit([request for request in requests if request.sample_id not in self._runs])
        for request in requests:
            if request.sample_id in self._runs:
                self._held[request.sample_id] = request
        self._begin_due()

    async def finished(self) -> list[Completion]:
        """Wait for samples that are done as they were recorded."""
        while not self._done:
            for completion in await self.engine.finished():
                self._take(completion)
            self._begin_due()
            self._changed.set()
        done, self._done = self._done, []
        return done

    async def caught_up(self) -> None:
        """Wait until all that this version sampled in the recorded run is there: before each pause. Unblocked by what
        is submitted, so who pauses has to go on submitting meanwhile."""
        while self._left[self.version]:
            self._changed.clear()
            await self._changed.wait()

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        await self.engine.load_weights(version, weights)
        self._begin_due()

    def _begin_due(self) -> None:
        """Begin what waits for the version that is there."""
        due = [sample for sample in self._held if self._runs[sample][0][0] <= self.version]
        for request in [self._held.pop(sample) for sample in due]:
            version, tokens = self._runs[request.sample_id][0]
            if version < self.version:
                raise ConfigError(
                    f"replay: sample {request.sample_id} is recorded as sampled by version {version}, and engine "
                    f"{self.name} has version {self.version}: the record is not of this job"
                )
            self._requests[request.sample_id] = request
            self.engine.submit([self._limited(request, tokens)])

    def _limited(self, request: Request, tokens: int) -> Request:
        """The request to the end of its stretch; the last one ends as the engine finds."""
        if len(self._runs[request.sample_id]) == 1:
            return request
        before = 0 if request.partial is None else request.partial.length
        return replace(request, sampling=replace(request.sampling or self._sampling, max_tokens=before + tokens))

    def _take(self, completion: Completion) -> None:
        """A whole sample, or a stretch of one."""
        sample = completion.sample_id
        if sample not in self._runs:
            self._done.append(completion)
            return
        request, runs = self._requests.pop(sample), self._runs[sample]
        version, tokens = runs.popleft()
        before = 0 if request.partial is None else request.partial.length
        found = completion.length - before
        if found != tokens or (runs and completion.finish_reason != "length"):
            raise ConfigError(
                f"replay: sample {sample} got {found} tokens of version {version} and then "
                f"{completion.finish_reason!r}, where {tokens} are recorded: other code, another machine's arithmetic, "
                "or a record that is not of this job"
            )
        self._left[version] -= 1
        if runs:
            self._held[sample] = replace(request, partial=replace(completion, finish_reason="abort"))
        else:
            del self._runs[sample]
            self._done.append(completion)


def rows_of(group: int, group_size: int) -> tuple[int, ...]:
    """Rows of a group."""
    return tuple(range(group * group_size, (group + 1) * group_size))


def admitted(group: int, batch: Batch | None) -> Batch:
    """The batch that the queue gave of this group. Raises ConfigError where it will never have it."""
    if batch is None:
        raise ConfigError(f"replay: group {group} of the recorded run was never admitted; it is of another job")
    return batch


class RecordedReader:
    """A `MicroBatchReader` of all that the world trains: the micro-batches of a recorded run, by iteration, each of
    whole groups by their numbers. What `first` asks for was kept there."""

    def __init__(self, queue: TransferQueue, batches: Sequence[Sequence[Sequence[int]]], *, group_size: int) -> None:
        self._queue, self._batches, self._group_size = queue, batches, group_size

    async def read(self, iteration: int, first: Deadlines) -> AsyncIterator[Batch]:
        for groups in self._batches[iteration]:
            yield joined([await self._group(group) for group in groups])

    async def _group(self, group: int) -> Batch:
        n = self._group_size
        return admitted(group, await self._queue.get("actor", n, only=rows_of(group, n)))
