"""Samples on their way from the queue into one engine, from turn to turn, and back into the queue; and what stops and
ends them."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from harness.protocols import CarriedSample, Clock, Completion, Request, Sampling, StopMode
from harness.runtime.runtime import Waits
from harness.tasks import Problem
from harness.transfer_queue import Batch, TransferQueue
from harness.workers.dataflow import rollout_columns, samples_in, texts_of
from harness.workers.episodes import Episodes
from harness.workers.generating import EngineOnDevice
from harness.workers.replaying import ReplayedEngine
from schedules.protocol import PauseMode

_NO_LEASE = -1  # of rows that another engine was handed


class OpenRows:
    """Open rows of the engine of this number. `write` runs as long as there may be some; `finish` hands it what is
    done. together: samples, in order of their ids, that are written once all of them are done."""

    def __init__(self, queue: TransferQueue, engine: int, waits: Waits, *, together: int = 1) -> None:
        self._queue, self._engine, self._waits, self._together = queue, engine, waits, together
        self._row_of: dict[int, tuple[str, int, int]] = {}  # of samples: partition, row and lease
        self._begun: dict[int, list[Completion]] = {}  # samples that are done, and wait for others
        self._given_back = set[int]()
        self.lost = 0
        """Tokens of samples that are done, and whose rows were given back."""
        self._finished: list[Completion] = []
        self._writing = False
        self._changed = asyncio.Event()  # set when there are finished ones
        self._written = asyncio.Event()  # set when something was

    def take(self, batch: Batch) -> None:
        """Have the rows of a batch."""
        samples = samples_in(batch).tolist()
        self._given_back.difference_update(samples)
        self._row_of |= {
            sample: (batch.partition, row, batch.lease)
            for sample, row in zip(samples, batch.rows.tolist(), strict=True)
        }

    def finish(self, samples: Sequence[Completion]) -> None:
        """Hand samples over to be written."""
        for sample in samples:
            if sample.sample_id in self._given_back:
                self.lost += sample.sampled
                continue
            number = sample.sample_id // self._together
            done = self._begun.setdefault(number, [])
            done.append(sample)
            if len(done) == self._together:
                self._finished += self._begun.pop(number)
        self._changed.set()

    async def give_back(self) -> set[int]:
        """Give all that is not written back to the queue; what is finished is written first. Returns the samples of it
        that are not done."""
        while self._finished or self._writing:
            await self._next_written()
        done = [sample for group in self._begun.values() for sample in group]
        self.lost += sum(sample.sampled for sample in done)
        open_samples = self._row_of.keys() - {sample.sample_id for sample in done}
        leases = {lease for _, _, lease in self._row_of.values()}
        self._given_back = set(open_samples)
        self._row_of.clear()
        self._begun.clear()
        for lease in sorted(leases):
            await self._queue.give_back(lease)
        return open_samples

    def hand_over(self, requests: Sequence[Request]) -> list[CarriedSample]:
        """Let rows go, which another engine writes."""
        carried = []
        for request in requests:
            partition, row, _ = self._row_of.pop(request.sample_id)
            tokens = 0 if request.partial is None else request.partial.length
            carried.append(CarriedSample(request, partition, row, tokens))
        self._written.set()
        return carried

    def take_over(self, carried: Sequence[CarriedSample]) -> None:
        """Have rows that another engine had."""
        self._row_of |= {one.request.sample_id: (one.partition, one.row, _NO_LEASE) for one in carried}

    async def all_written(self) -> None:
        """Wait until no row is open."""
        while self._row_of:
            await self._next_written()

    async def _next_written(self) -> None:
        self._written.clear()
        with self._waits("empty", "its last samples"):
            await self._written.wait()

    async def write(self) -> None:
        """Consumes completions, produces rows. What finishes while a put is under way goes with the next one."""
        while True:
            with self._waits("write", "finished samples"):
                await self._changed.wait()
            self._changed.clear()
            finished, self._finished, self._writing = self._finished, [], True
            by_partition: dict[str, list[Completion]] = {}
            for completion in finished:
                partition = self._row_of[completion.sample_id][0]
                by_partition.setdefault(partition, []).append(completion)
            for partition, part in by_partition.items():
                rows = [self._row_of[completion.sample_id][1] for completion in part]
                await self._queue.put(partition, rows, rollout_columns(part, self._engine))
                for completion in part:
                    del self._row_of[completion.sample_id]
            self._writing = False
            self._written.set()


class EngineSamples:
    """Samples that one engine has, that are between two of their turns, or that a pause took back.

    several_turns: whether a sample goes on after a completion, until it `ended`; else its completion is its end.
    greedy: how the first sample of each group is drawn; None: as the others.
    """

    def __init__(self, group_size: int, *, several_turns: bool = False, greedy: Sampling | None = None) -> None:
        self._group_size, self._several_turns, self._greedy = group_size, several_turns, greedy
        self._in_engine: dict[int, Request] = {}  # or done there, and not `finished` here
        self.playing: set[int] = set()
        """Samples of several turns that the engine has had, and that have another turn or may."""
        self.taking_back = False
        """A pause takes back what the engine has, or did: its slots are empty until it goes on."""
        self._taken_back: dict[int, Completion] = {}
        self._again: set[int] = set()  # between two turns, to begin again
        self._had: dict[int, int] = {}  # tokens sampled of what may begin again
        self._elsewhere: dict[int, int] = {}  # tokens that samples had when another engine handed them over
        self.generated = self.begun_again = 0
        """Tokens that its engine sampled, and those of them that were thrown away as their sample began again."""

    def __contains__(self, sample: int) -> bool:
        return sample in self._in_engine

    def request(self, sample: int, prompt: np.ndarray, partial: Completion | None = None) -> Request:
        """The request of this sample, as it is drawn. prompt: int64 [n]."""
        return Request(sample, prompt, partial, self._greedy if sample % self._group_size == 0 else None)

    def submitted(self, requests: Collection[Request]) -> None:
        """The engine gets these."""
        self._in_engine |= {request.sample_id: request for request in requests}
        self.begun_again += sum(self._had.pop(one.sample_id, 0) for one in requests if one.partial is None)
        if self._several_turns:
            self.playing.update(request.sample_id for request in requests)
            self._again.difference_update(request.sample_id for request in requests)

    def finished(self, completions: Sequence[Completion]) -> list[Completion]:
        """Samples that are done, of what came out of the engine; what a pause took back stays here."""
        done = []
        for completion in completions:
            before = self._in_engine[completion.sample_id].partial
            had = self._elsewhere.pop(completion.sample_id, 0 if before is None else before.length)
            sampled = completion.length - had
            self.generated += sampled
            if self._several_turns or self.taking_back:
                self._had[completion.sample_id] = self._had.get(completion.sample_id, 0) + sampled
            if self.taking_back and completion.finish_reason == "abort":
                self._taken_back[completion.sample_id] = completion
            else:
                del self._in_engine[completion.sample_id]
                if not self._several_turns:
                    self._had.pop(completion.sample_id, None)
                done.append(completion)
        return done

    def ended(self, sample: int) -> None:
        """Note that this sample of several turns has no other."""
        self._again.discard(sample)
        self._had.pop(sample, None)
        self.playing.remove(sample)

    def counted(self, busy: int) -> int:
        """Samples that count against the engine's share, where it has `busy` of them."""
        return len(self.playing) if self._several_turns else busy

    def all_taken_back(self, busy: int) -> bool:
        """Whether all that the engine gave up is here, where it still has `busy` samples."""
        return len(self._in_engine) <= len(self._taken_back) + busy

    @property
    def between_turns(self) -> set[int]:
        """Samples of several turns whose environment has them."""
        return self.playing - self._in_engine.keys()

    def given_up(self) -> list[Request]:
        """Requests of what was taken back, from their prompts and in their order, to be submitted again. Samples that
        are between two turns begin again with the next one."""
        self._again = self.between_turns
        return [self.request(sample, self._in_engine.pop(sample).prompt) for sample in self._take_taken_back()]

    def forget(self, samples: Iterable[int]) -> None:
        """Forget samples, taken back or between two turns: they begin again, wherever."""
        for sample in samples:
            self.begun_again += self._had.pop(sample, 0)
            self._in_engine.pop(sample, None)
            self._taken_back.pop(sample, None)
            self.playing.discard(sample)

    def carried(self) -> list[Request]:
        """Requests of what was taken back, from the tokens that they have and in their order."""
        return [self._in_engine.pop(sample).after(aborted) for sample, aborted in self._take_taken_back().items()]

    def take_over(self, carried: Iterable[CarriedSample]) -> None:
        """Count of these what this engine samples: as they come by a connection, lengths of simulated ones do not
        tell."""
        self._elsewhere |= {one.request.sample_id: one.tokens for one in carried}

    def let_go(self, requests: Collection[Request]) -> None:
        """Another engine goes on with these."""
        for request in requests:
            self._had.pop(request.sample_id, None)

    def _take_taken_back(self) -> dict[int, Completion]:
        """Hand over all that was taken back, in the order in which the engine got it."""
        taken_back, self._taken_back = self._taken_back, {}
        return {sample: taken_back[sample] for sample in self._in_engine if sample in taken_back}

    def begins_again(self, sample: int) -> bool:
        """Whether a sample between two turns is to begin again instead."""
        return sample in self._again


_AGAIN_S = 5.0  # an engine may have been asked too early, or may have begun a sample anew
_SAME_TIME_S = 1e-9


class SampleLimit:
    """A limit on how long samples of one engine take, from when it gets each until it is done, its turns included, but
    not what it is set aside for. seconds: on the run's clock that each may take."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self._due: dict[int, float] = {}
        self._begun = asyncio.Event()
        self._stopped: float | None = None  # since when nothing counts

    def stop(self) -> None:
        """Let no time count until `go_on`."""
        self._stopped = self._clock.now()

    def go_on(self) -> None:
        """Count again."""
        assert self._stopped is not None
        stood, self._stopped = self._clock.now() - self._stopped, None
        self._due = {sample: due + stood for sample, due in self._due.items()}
        self._begun.set()

    def begin(self, samples: Iterable[int], left_s: float | None = None) -> None:
        """Note that samples begin now, or begin again; or go on for so many seconds."""
        self._due |= dict.fromkeys(samples, self._clock.now() + (self._seconds if left_s is None else left_s))
        self._begun.set()

    def forget(self) -> None:
        """Forget all samples."""
        self._due.clear()

    def end(self, sample: int) -> float | None:
        """Forget a sample that has ended here; seconds that it had left when all was stopped."""
        due = self._due.pop(sample, None)
        return None if due is None or self._stopped is None else due - self._stopped

    async def overdue(self) -> list[int]:
        """Waits until there are some. What does not end upon it is named again, some seconds later."""
        while True:
            while self._stopped is not None or not self._due:
                self._begun.clear()
                await self._begun.wait()
            now = self._clock.now()
            late = [sample for sample, due in self._due.items() if due <= now + _SAME_TIME_S]
            if late:
                self._due |= dict.fromkeys(late, now + _AGAIN_S)
                return late
            # What begins meanwhile is due no earlier than in so many seconds.
            await self._clock.sleep(min(min(self._due.values()) - now, self._seconds))


class SampleFlow:
    """Moves the samples of one engine. A feed brings them in (`take_in`); while the engine generates, three loops
    (`start`) take them out, write them, and end those that take too long.

    Twelve attributes: four parts that it moves samples between, and four events by which its loops wake each other.

    episodes: of samples that play with an environment. While one waits for an answer it holds no slot, and while all do
    the device is given back, unless a batch is generated as one. limit: None for samples that may take as long as they
    like.
    """

    def __init__(
        self,
        on_device: EngineOnDevice,
        samples: EngineSamples,
        rows: OpenRows,
        waits: Waits,
        *,
        episodes: Episodes | None,
        limit: SampleLimit | None,
    ) -> None:
        self.on_device, self.engine, self.samples, self.rows, self._waits = (
            on_device, on_device.engine, samples, rows, waits
        )  # fmt: skip
        self._episodes, self._limit = episodes, limit
        self.room = asyncio.Event()
        """Set when there may be a free slot."""
        self.flowing = asyncio.Event()
        """Set unless the engine is being drained: then it gets no new samples."""
        self.going = asyncio.Event()
        """Set unless the engine is paused, or its samples are taken back."""
        self._aside: list[Request] | None = None  # what a pause took back, and what came after it
        self._putting_off = False
        self._taken = asyncio.Event()  # set when something came out of the engine
        self._ended = asyncio.Event()  # set when a sample of several turns is over
        self.flowing.set()
        self.going.set()

    def start(self, loops: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start its loops, which go on until they are cancelled."""
        parts = {"drain": self._drain(loops), "write": self.rows.write(), "limit": self._end_stragglers()}
        return [loops.create_task(loop, name=f"{self._waits.owner}.{name}") for name, loop in parts.items()]

    def free(self, most: int) -> int:
        """Samples that it may get now, where it may have `most` at a time."""
        if self.samples.taking_back:
            return 0
        busy = self.on_device.busy
        return min(self.engine.slots - busy, most - self.samples.counted(busy))

    async def take_in(self, batch: Batch) -> None:
        """Bring the samples of these rows into the engine, once it takes something."""
        samples, prompts = samples_in(batch).tolist(), batch.ragged("prompt").rows()
        self.rows.take(batch)
        if self._episodes is not None:
            for sample, prompt, answer in zip(samples, prompts, texts_of(batch.ragged("answer")), strict=True):
                self._episodes.begin(sample, Problem(prompt, answer))
        await self.on_device.take()
        while not self.flowing.is_set():
            await self.on_device.give_back_if_idle()
            with self._waits("feed", "the engine to go on"):
                await self.flowing.wait()
            await self.on_device.take()
        self._submit([self.samples.request(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)])

    def _submit(self, requests: Sequence[Request]) -> None:
        if self._aside is not None:
            self._aside += requests
            return
        self.samples.submitted(requests)
        self.engine.submit(requests)
        if self._limit is not None:
            self._limit.begin(request.sample_id for request in requests if request.partial is None)
        self.on_device.open_span()

    async def _drain(self, loops: asyncio.TaskGroup) -> None:
        """Consumes finished samples as the engine streams them out; unblocks the feed (slots), `begin_again` and
        `OpenRows.write`, and starts a `_play` in `loops` for each that may have another turn."""
        while True:
            with self._waits("drain", "the engine to finish samples"):
                finished = self.samples.finished(await self.engine.finished())
            if self._episodes is not None:
                for turn in finished:
                    loops.create_task(self._play(self._episodes, turn), name=f"{self._waits.owner}.play")
            if not self.on_device.busy:
                self.on_device.spans.close()
            self.room.set()
            if self._episodes is None:
                self._complete(finished)
            self._taken.set()
            await self.on_device.give_back_if_idle()

    async def _play(self, episodes: Episodes, turn: Completion) -> None:
        """Consumes one turn of a sample; produces its next one for the engine, or the sample. Waits for its
        environment, at most as long as that says."""
        sample, following = turn.sample_id, await episodes.follow(turn)
        if isinstance(following, Request):
            await self.on_device.take()
            if self._putting_off:
                await episodes.give_up(sample)
                self.samples.forget([sample])
                return self._ended.set()
            if self.samples.begins_again(sample):
                await episodes.begin_again(sample)
                following = Request(sample, following.prompt)
            self._submit([self.samples.request(sample, following.prompt, following.partial)])
        else:
            self._complete([following])
            self.samples.ended(sample)
            self.room.set()
            self._ended.set()

    def _complete(self, samples: Sequence[Completion]) -> None:
        """Hand samples that are done over to the queue."""
        self.rows.finish(samples)
        if self._limit is not None:
            for sample in samples:
                self._limit.end(sample.sample_id)

    async def _end_stragglers(self) -> None:
        """Asks engine and environment to end what takes longer than the limit. Unblocked by the clock; while the engine
        is paused it waits."""
        while self._limit is not None:
            late = await self._limit.overdue()
            with self._waits("limit", "the engine to go on"):
                await self.going.wait()
            await self.engine.cut([sample for sample in late if sample in self.samples])
            if self._episodes is not None:
                self._episodes.cut(late)

    async def drained(self) -> None:
        """Wait for the last turn of all samples of several turns that the engine has had. New ones stay in `take_in`.
        Unblocked by `_play`."""
        if self._episodes is None:
            return
        self.flowing.clear()
        while self.samples.playing:  # the engine's own counts miss a turn that has ended and is not here yet
            self._ended.clear()
            await self._ended.wait()

    def set_aside(self) -> None:
        """Let what comes from now on wait with what is taken back."""
        self.samples.taking_back, self._aside = True, []
        if self._limit is not None:
            self._limit.stop()

    async def take_back(self, *, carry: bool) -> None:
        """Consumes what the engine gave up, for `hand_back`: to go on from the tokens that it has (carry), or to begin
        again; then samples between two turns follow in `_play`. Unblocked by `_drain`."""
        await self._all_taken_back()
        again = self.samples.carried() if carry else self.samples.given_up()
        if self._episodes is not None and not carry:
            await asyncio.gather(*(self._episodes.begin_again(request.sample_id) for request in again))
        assert self._aside is not None
        self._aside[:0] = again

    async def _all_taken_back(self) -> None:
        while not self.samples.all_taken_back(self.on_device.busy):
            self._taken.clear()
            await self._taken.wait()

    async def put_off(self) -> None:
        """Consumes what the engine gave up, and gives its rows back to the queue, with all others of groups that are
        not done. Unblocked by `_drain` and `OpenRows.write`."""
        await self._all_taken_back()
        given_back, self._putting_off = await self.rows.give_back(), True
        assert self._aside is not None
        if self._episodes is not None:
            between = self.samples.between_turns - {request.sample_id for request in self._aside}
            self._episodes.cut(between)
            given_back -= between
            await asyncio.gather(*map(self._episodes.give_up, given_back))
        self.samples.forget(given_back)
        while self.samples.playing:
            self._ended.clear()
            await self._ended.wait()
        self._aside.clear()
        self._putting_off = False
        if self._limit is not None:
            self._limit.forget()

    def hand_over(self) -> list[CarriedSample]:
        """Let what was taken back go to another engine."""
        assert self._aside is not None
        aside, self._aside = self._aside, []
        self.samples.let_go(aside)
        carried = self.rows.hand_over(aside)
        if self._limit is None:
            return carried
        return [replace(one, left_s=self._limit.end(one.request.sample_id)) for one in carried]

    async def take_over(self, carried: Sequence[CarriedSample]) -> None:
        """Go on with what another engine had."""
        self.rows.take_over(carried)
        self.samples.take_over(carried)
        await self.on_device.take()
        self._submit([one.request for one in carried])
        if self._limit is not None:
            for one in carried:
                self._limit.begin([one.request.sample_id], one.left_s)

    def hand_back(self) -> None:
        """Hand the engine what was taken back, before it goes on."""
        if self._aside is not None:
            self.samples.taking_back, aside, self._aside = False, self._aside, None
            if self._limit is not None:
                self._limit.go_on()
            self._submit(aside)
            self.room.set()


class Pause:
    """Stops an engine and the samples that flow through it, and lets them go on."""

    def __init__(self, flow: SampleFlow, waits: Waits) -> None:
        self._flow, self._on_device, self._waits = flow, flow.on_device, waits

    async def stop(self, mode: PauseMode | Literal["put off"]) -> None:
        """Stop between two tokens (keep: running samples stay; carry: they are taken out, and go on with `go_on`;
        abort: they begin again then; put off: groups that are not done go back to the queue), or once the running ones
        are done (wait), to the last of their turns."""
        flow, engine = self._flow, self._flow.engine
        with self._waits("pause", "running samples to end" if mode == "wait" else "the engine to stop"):
            if mode == "wait":
                await flow.drained()
            if isinstance(engine, ReplayedEngine):
                await engine.caught_up()
            how: StopMode = mode if mode in ("keep", "wait") else "abort"
            if how == "abort":
                flow.set_aside()
            if mode != "wait":
                flow.going.clear()
            await engine.pause(how)
            self._on_device.paused = True
            flow.going.clear()
            if mode == "put off":
                await flow.put_off()
            elif how == "abort":
                await flow.take_back(carry=mode == "carry")
        await self._on_device.stopped()

    def begin_stopped(self) -> None:
        """Be as if it had been stopped before it had anything: the engine waits for a device."""
        self._flow.set_aside()
        self._flow.going.clear()
        self._on_device.paused = True

    async def go_on(self) -> None:
        """Resume, once the device is free."""
        await self._on_device.begin()
        self._flow.hand_back()
        await self._on_device.go_on()
        self._flow.going.set()
        self._flow.flowing.set()
        self._on_device.open_span()
        await self._on_device.give_back_if_idle()
