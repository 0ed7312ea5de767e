"""Workers that do again what was recorded of a run (docs/replay.md): which samples an engine begins and by which
versions it samples their tokens, and in which micro-batches groups are trained."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.config import ConfigError
from harness.protocols import Completion, Request, RolloutEngine, Sampling
from harness.transfer_queue import Batch, TransferQueue
from harness.workers.dealing import joined
from harness.workers.held_engine import WrappedEngine
from harness.workers.readers import Deadlines

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
        return self.engine.waiting + len(self._held)

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit([request for request in requests if request.sample_id not in self._runs])
        for request in requests:
            if request.sample_id in self._runs:
                self._held[request.sample_id] = request
        self._begin_due()

    async def finished(self) -> list[Completion]:
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
