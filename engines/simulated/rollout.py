"""Engines that let time pass instead of computing, on a virtual clock or a real one.

A sample has a length and no content. It is run-length coded, in the columns that real samples use: its prompt is one
value, the number of prompt tokens; its `tokens` are the lengths of its runs, a run being consecutive tokens of one
version, or one observation, and `versions` the version of each. Only these engines, the simulated task and the recorder
know.

Between two turns of a sample the engine keeps its cache, as real ones keep prefixes: only what it observed is
prefilled, unless the cache was dropped or new weights came meanwhile. What is kept takes no room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from engines.requests import check_partial, require_still
from engines.simulated.decoding import Decoding, SimulatedSample
from harness.config import CostConfig
from harness.cost_model.cost import DecodeCost, offload_s, reload_s
from harness.cost_model.lengths import ResponseLengths
from harness.protocols import Clock, Completion, FinishReason, Request, StopMode

if TYPE_CHECKING:
    import torch


class SimulatedRollout:
    """`harness.protocols.RolloutEngine`: `engines.simulated.decoding`, driven by a clock and one timer.

    cost: resolved for the model; load_s: what taking new weights lasts; group_size: a handful of samples;
    several_turns: samples may come back, with what an environment wrote.

    To spare the event loop, `finished` hands samples over when the last of a group is done, or when another
    `group_size` slots have become free (then the role that fills the engine has something to do); each sample keeps
    the time at which it finished. Where there are several turns, each is handed over at once. On a real clock a timer
    that comes late delays what is reported, and no sample.

    Twenty-five attributes: ten say whether it stands still, and why; six what is done and not handed over.
    """

    def __init__(
        self,
        cost: CostConfig,
        lengths: ResponseLengths,
        *,
        slots: int,
        group_size: int,
        clock: Clock,
        load_s: float,
        several_turns: bool = False,
        name: str = "0",
    ) -> None:
        self.slots, self.name, self.version = slots, name, 0
        self._cost, self._lengths, self._clock, self._load_s = cost, lengths, clock, load_s
        self._decoding = Decoding(DecodeCost.of(cost), slots=slots)
        self._several_turns = several_turns
        self._group_size, self._prompt_samples = 1 if several_turns else group_size, group_size
        self._unfinished: dict[int, int] = {}  # samples of each group that are here
        self._kept: dict[int, int] = {}  # tokens in the cache of samples that may have another turn
        self._held: list[Completion] = []  # done, but not worth an event yet
        self._room = slots // self._group_size
        self._done: list[Completion] = []
        self._changed = asyncio.Event()  # for `finished`
        self._event = asyncio.Event()  # for `pause`
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._paused = self._moving = self._asleep = self._closed = False
        self._partial_version: int | None = None

    @property
    def running(self) -> int:
        return self._decoding.running

    @property
    def waiting(self) -> int:
        return len(self._decoding.waiting)

    @property
    def sampled(self) -> int:
        """Decode steps, each a token of every running sample."""
        return self._decoding.steps(self._clock.now())

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for a prompt that is not one value, for a partial that is not the sample's own, and for a
        sample that the KV cache will never hold."""
        turns = np.array([turn_of(request) for request in requests], np.int64)
        lengths = self._lengths.of(np.array([request.sample_id for request in requests], np.int64), turns).tolist()
        samples = [sample_of(request, length) for request, length in zip(requests, lengths, strict=True)]
        for sample in samples:
            sample.group = sample.sample_id // self._prompt_samples
            if sample.closed:
                sample.kept = self._kept.pop(sample.sample_id, 0)
        self._decoding.submit(samples, self._clock.now())
        for sample in samples:
            group = sample.sample_id // self._group_size
            self._unfinished[group] = self._unfinished.get(group, 0) + 1
        self._follow()
        self._changed.set()

    async def finished(self) -> list[Completion]:
        """Raises RuntimeError where there is work, but the weights are incomplete or asleep; or the engine was
        closed."""
        while not self._done:
            if self._closed:
                raise RuntimeError(f"engine {self.name} is closed: nothing more will be finished")
            if not self._paused and not self._moving and (self.running or self.waiting):
                self._require_ready()
            self._changed.clear()
            await self._changed.wait()
        done, self._done = self._done, []
        return done

    async def pause(self, mode: StopMode) -> None:
        """Returns after the decode step that is under way (wait: after the last one)."""
        if mode == "wait" and not self._decoding.drained:
            self._require_ready()
            self._decoding.drain(self._clock.now())
            await self._until_event(lambda: self._decoding.drained)
        self._decoding.stop(self._clock.now())
        await self._until_event(lambda: self._decoding.stopped)
        self._paused = True
        if mode == "abort":
            now = self._clock.now()
            self._held += [_completion(sample, "abort", now) for sample in self._decoding.abort()]
            self._unfinished.clear()
            self._hand_over()

    def drop_cache(self) -> None:
        self._kept.clear()
        self._decoding.drop_cache(self._clock.now())
        self._follow()

    async def resume(self) -> None:
        """Raises RuntimeError where `finished` would: incomplete weights, asleep, closed."""
        self._require_ready()
        self._paused = False
        self._go_on()

    async def cut(self, sample_ids: Collection[int]) -> None:
        self._decoding.cut(sample_ids, self._clock.now())
        self._follow()

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reads the iterable to its end; lasts `load_s` at least, and an evaluation that is due. Raises RuntimeError in
        a busy engine."""
        self._require_still("load_weights")
        with self._standing_still():
            start, self._partial_version = self._clock.now(), version
            for _ in weights:
                pass
            lasts_s = self._load_s + self._cost.evaluation.of(version)
            await self._clock.sleep(max(0.0, lasts_s - (self._clock.now() - start)))
            self.version, self._partial_version = version, None
            self._kept.clear()
            self._decoding.load(version)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._require_still("sleep")
        with self._standing_still():
            self._kept.clear()
            self._decoding.drop_cache(self._clock.now())
            await self._clock.sleep(offload_s(self._cost))
            self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            with self._standing_still():
                await self._clock.sleep(reload_s(self._cost))
                self._asleep = False

    async def close(self) -> None:
        """Forget all samples; who waits in `finished` gets a RuntimeError."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        self._decoding.stop(self._clock.now())
        self._changed.set()

    async def _until_event(self, happened: Callable[[], bool]) -> None:
        self._follow()
        while not happened():
            self._event.clear()
            await self._event.wait()

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Stop decoding while weights move; samples submitted meanwhile start when the weights are in place."""
        self._moving = True
        self._decoding.stop(self._clock.now())
        try:
            yield
        finally:
            self._moving = False
            self._go_on()

    def _go_on(self) -> None:
        """Generate, unless something is in the way."""
        if not (self._paused or self._moving or self._asleep or self._closed or self._partial_version is not None):
            self._decoding.resume(self._clock.now())
            self._follow()
        self._changed.set()

    def _wake_up(self) -> None:
        assert self._due is not None
        self._timer, due, self._due = None, self._due, None
        self._decoding.advance(max(due, self._clock.now()))  # a clock of floats may come an ulp early
        self._follow()

    def _follow(self) -> None:
        """Take out finished samples and set the timer anew, after anything that may have moved the decoding on."""
        for sample, at in self._decoding.finished:
            tokens = sum(tokens for _, tokens in sample.runs[sample.closed :])
            reason: FinishReason = "length" if tokens in (self._lengths.cap, sample.limit) else "stop"
            if sample.cut:
                reason = "cut"
            elif self._several_turns:
                self._kept[sample.sample_id] = sample.cached + sample.remaining - 1
            self._held.append(_completion(sample, reason, at))
            group = sample.sample_id // self._group_size
            self._unfinished[group] -= 1
            if not self._unfinished[group]:
                del self._unfinished[group]
                self._hand_over()
        if self._decoding.finished:
            self._decoding.finished.clear()
        busy = self.running + self.waiting
        # Grows with every group_size slots that become free, counted from all slots and from none: who fills the engine
        # may use all of them, or a number that groups divide.
        room = (self.slots - busy) // self._group_size + -busy // self._group_size
        if room > self._room:
            self._hand_over()
        self._room = room
        self._event.set()
        self._set_timer(self._decoding.next_event())

    def _hand_over(self) -> None:
        if self._held:
            self._done += self._held
            self._held.clear()
            self._changed.set()

    def _set_timer(self, due: float | None) -> None:
        if due == self._due or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock.now()), self._wake_up)

    def _require_ready(self) -> None:
        if self._closed:
            raise RuntimeError(f"engine {self.name} is closed")
        if self._partial_version is not None:
            raise RuntimeError(
                f"engine {self.name} will not generate: version {self._partial_version} was loaded in part only; "
                "load a complete set of weights"
            )
        if self._asleep:
            raise RuntimeError(f"engine {self.name} is asleep; call wake() first")

    def _require_still(self, action: str) -> None:
        require_still(action, self.name, paused=self._paused, running=self.running, waiting=self.waiting)


def turn_of(request: Request) -> int:
    """Number of the turn that a request asks for, from 0."""
    partial = request.partial
    return 0 if partial is None or partial.mask is None else int(np.count_nonzero(~partial.mask))


def sample_of(request: Request, length: int) -> SimulatedSample:
    """A sample whose turn has `length` tokens, less those of it that its partial has.

    Raises ValueError for a prompt that is not one value of 1 or more, and for a partial that is not the sample's own.
    """
    partial, limit = request.partial, None
    if request.sampling is not None:
        limit = request.sampling.max_tokens
        length = min(length, limit)
    if len(request.prompt) != 1 or request.prompt[0] < 1:
        raise ValueError(
            f"sample {request.sample_id}: a simulated prompt is one value, its number of tokens, which is 1 or more; "
            f"got {request.prompt.tolist()}"
        )
    prompt = int(request.prompt[0])
    if partial is None:
        return SimulatedSample(request.sample_id, prompt, length, limit=limit, shared=prompt)
    check_partial(request.sample_id, partial, f"sample {request.sample_id}")
    runs = list(zip(partial.versions.tolist(), partial.tokens.tolist(), strict=True))
    before, closed = int(partial.tokens.sum()), 0
    if partial.mask is not None:
        closed = int(np.flatnonzero(~partial.mask).max(initial=-1)) + 1
    left = length - int(partial.tokens[closed:].sum())
    sample = SimulatedSample(request.sample_id, prompt + before, left, runs, closed=closed, limit=limit, shared=prompt)
    if before:  # one that had only waited begins here
        sample.started_at, sample.first_token_at = partial.started_at, partial.first_token_at
    return sample


class RunLengthCoded(Completion):
    """A completion whose tokens are the lengths of its runs."""

    __slots__ = ()

    @property
    def length(self) -> int:
        return int(self.tokens.sum())

    @property
    def sampled(self) -> int:
        return self.length if self.mask is None else int(self.tokens[self.mask].sum())


def _completion(sample: SimulatedSample, reason: FinishReason, at: float) -> Completion:
    return RunLengthCoded(
        sample_id=sample.sample_id,
        tokens=np.array([tokens for _, tokens in sample.runs], np.int64),
        log_probs=np.zeros(len(sample.runs), np.float32),
        versions=np.array([version for version, _ in sample.runs], np.int32),
        finish_reason=reason,
        started_at=at if sample.started_at is None else sample.started_at,
        finished_at=at,
        first_token_at=sample.first_token_at,
    )
