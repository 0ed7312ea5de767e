"""The base of engines with slots: who waits for one, who has one, and who is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from engines.requests import RunningSample, accepted, cut, cut_waiting, require_still
from harness.protocols import Clock, Completion, FinishReason, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SlotEngine:
    """Base of rollout engines that hold each running sample in a slot. A subclass generates; it sets `_changed` where
    something happened that `finished` or a pause may wait for.

    model: its config says which token ids there are, and how long a sample may be; not kept. slots: samples at a time.

    Its attributes are more than a dozen: they are the parts of one state, which every engine had to itself before.
    """

    def __init__(self, model: PreTrainedModel, *, name: str, slots: int, sampling: Sampling, clock: Clock) -> None:
        self.name, self.slots, self.sampling, self.version = name, slots, sampling, 0
        self._clock = clock
        self._vocabulary, self._max_length = model.config.vocab_size, model.config.max_position_embeddings
        self._waiting: deque[RunningSample] = deque()
        self._running: list[RunningSample] = []
        self._done: list[Completion] = []
        self._changed = asyncio.Event()
        self._admitting, self._paused, self._closed = True, False, False

    @property
    def running(self) -> int:
        """Samples that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Samples that were submitted and have no slot yet."""
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError as `check_request`."""
        limits = {"vocabulary": self._vocabulary, "max_length": self._max_length}
        self._waiting += accepted(requests, self.name, sampling=self.sampling, **limits)
        self._changed.set()

    async def cut(self, sample_ids: Collection[int]) -> None:
        """Let running samples end with their next token; waiting ones that have some end at once."""
        self._cut(sample_ids)

    def _cut(self, sample_ids: Collection[int]) -> list[RunningSample]:
        """Do so, and return those that run."""
        self._done += cut_waiting(self._waiting, sample_ids, self._clock.now())
        self._changed.set()
        return cut(self._running, sample_ids)

    def _next_to_start(self) -> RunningSample | None:
        """Give a free slot to the sample that waits longest; None where there is none of either, or none may start."""
        if not self._admitting or not self._waiting or len(self._running) >= self.slots:
            return None
        sample = self._waiting.popleft()
        if sample.started_at is None:
            sample.started_at = self._clock.now()
        self._running.append(sample)
        return sample

    def _finish(self, sample: RunningSample, reason: FinishReason) -> None:
        """Take it out of its slot."""
        self._running.remove(sample)
        self._done.append(sample.completion(reason, self._clock.now()))

    def _abort_all(self) -> None:
        """End all samples with reason "abort", running ones first."""
        now = self._clock.now()
        self._done += [sample.completion("abort", now) for sample in (*self._running, *self._waiting)]
        self._forget_all()

    def _forget_all(self) -> None:
        self._running.clear()
        self._waiting.clear()

    def _take_done(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    async def _change(self) -> None:
        """Wait for the next one."""
        self._changed.clear()
        await self._changed.wait()

    def _require_still(self, action: str) -> None:
        """Raises RuntimeError, naming the engine and the action, unless it is paused or idle."""
        require_still(action, self.name, paused=self._paused, running=self.running, waiting=self.waiting)
