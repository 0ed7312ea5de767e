"""The rollout role: groups from the queue into one engine, finished samples from the engine into the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext

import numpy as np
import torch

from harness.protocols import Clock, Completion, PauseMode, Request, RolloutEngine, Sampling, Span
from harness.runtime.runtime import Waits, open_ended
from harness.tasks import Problem
from harness.transfer_queue import Batch, TransferQueue
from harness.weight_sync.endpoints import EngineWorker
from harness.workers.dataflow import Numbering, partition_name, samples_in, texts_of
from harness.workers.episodes import Episodes
from harness.workers.generating import GenerationSpans
from harness.workers.held_engine import HeldEngine
from harness.workers.open_rows import OpenRows
from harness.workers.replaying import RecordedRollout, ReplayedEngine, admitted, rows_of
from harness.workers.stragglers import SampleLimit
from harness.workers.turns import NO_TURNS, HeldTurn, Turns


class RolloutRole(EngineWorker):
    """One rollout engine, number `index`.

    share: the most samples it takes from the queue at once, and has at a time of one batch; stream_share: the most it
    has at a time while it streams. With several engines, shares keep the first to ask from taking everything.
    shares_device: with other roles; then the engine wakes for a batch, and sleeps after it; keeps_weights: meanwhile.
    generate_s: simulated seconds before a batch is generated as one.

    turns: on its device. It holds the device from its first sample on until it is idle or paused, or from waking to
    sleeping; and while it loads weights.

    refilled: groups may come again with other prompts, long after the first ones of their batch. greedy: how the first
    sample of each group is drawn; None: as the others.

    recorded: what this engine began in a recorded run, and in which order: it takes the same while it streams. Its
    engine is a `ReplayedEngine`.

    episodes: of samples that play with an environment. While one waits for an answer it holds no slot, and while all do
    the device is given back, unless a batch is generated as one. A pause that waits does so for their last turns.

    sample_limit_s: after which a sample ends where it is; None for as long as it takes.
    """

    role = "rollout"

    def __init__(
        self,
        engine: RolloutEngine,
        queue: TransferQueue,
        clock: Clock,
        *,
        index: int,
        device: torch.device,
        group_size: int,
        share: int,
        stream_share: int,
        keep_cache: bool,
        shares_device: bool,
        keeps_weights: bool = True,
        generate_s: float = 0.0,
        turns: Turns = NO_TURNS,
        episodes: Episodes | None = None,
        refilled: bool = False,
        greedy: Sampling | None = None,
        sample_limit_s: float | None = None,
        recorded: RecordedRollout | None = None,
        numbering: Numbering | None = None,
    ) -> None:
        if engine.slots < group_size:
            raise ValueError(f"engine.slots={engine.slots} is less than a group of {group_size}; give it more slots")
        self.engine, self.queue, self.clock, self.device = engine, queue, clock, device
        self.index, self.name, self.group_size = index, str(index), group_size
        self.consumer = f"rollout[{index}]"  # its own: what it had is released to others where it dies
        self.share, self.stream_share = share, stream_share
        self.keep_cache, self.shares_device, self.keeps_weights = keep_cache, shares_device, keeps_weights
        self.generate_s, self.refilled, self.greedy = generate_s, refilled, greedy
        self._recorded = None if recorded is None else (iter(recorded.groups), iter(recorded.dropped))  # to be begun
        self.numbering = numbering
        self.waits = Waits(self.consumer, turns.lines)
        self.episodes = episodes
        self.turns, self._device = turns, HeldTurn(turns, f"{self.consumer}.generate")
        self._whole_batch = False  # whether it holds the device to the end of a batch, idle or not
        self._rows = OpenRows(queue, index, self.waits)
        self._playing: set[int] = set()  # samples that the engine has had, and that will have another turn or may
        self._settled = asyncio.Event()  # set when one of them is over
        self._requests: dict[int, Request] = {}  # what the engine has, or has done and `_drain` did not take
        self._aborting = False  # a pause is taking back what the engine has
        self._aborted: list[Completion] = []  # that it has taken back
        self._taken = asyncio.Event()  # set when it may have all
        self._again: set[int] = set()  # samples between two turns that are to begin again
        self._flowing = asyncio.Event()  # set unless the engine is being drained: then it gets no new samples
        self._flowing.set()
        self._room = asyncio.Event()
        self._spans = GenerationSpans(engine, clock, self.name)
        self._paused = False
        self._limit = None if sample_limit_s is None else SampleLimit(sample_limit_s, clock)
        self._going = asyncio.Event()  # set unless it is paused, or its samples are taken back
        self._going.set()
        self._exclusive = asyncio.Lock()  # of what must not happen side by side: a batch, a pause, a load
        self._retired = False
        self._feeding: asyncio.Task[None] | None = None
        self._submitting = 0  # feeds with rows that the queue gave them, but the engine does not have
        self._idle = asyncio.Event()  # set while it does not generate
        self._idle.set()

    @open_ended
    async def generate(self, iteration: int, batches: int = 1) -> list[Span]:
        """Generate everything of this batch that no other engine took; or of so many batches from there on, as one.
        Called again, it takes what lost engines had taken and not finished."""
        if self.generate_s:
            await self.clock.sleep(self.generate_s)
        async with self._exclusive:
            # The first engine to ask leaves the others their share of the batch; it may take more as it finishes.
            async with self._awake():
                partitions = [partition_name(i) for i in range(iteration, iteration + batches)]
                await self._run(partitions, self.share * batches)
        return await self.take_spans()

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Where the device is shared: holding it, from waking to sleeping."""
        if not self.shares_device:
            yield
            return
        await self._device.take()
        self._whole_batch = True
        try:
            await self.engine.wake()
            yield
            await self.engine.sleep(keep_weights=self.keeps_weights)
        finally:
            self._whole_batch = False
            await self._device.give_back()

    @open_ended
    async def stream(self) -> list[Span]:
        """Generate what the dispatch limit allows until the queue is closed and exhausted.

        Returns the last spans only: `take_spans` hands the others out while the run goes on.
        """
        if self.shares_device:
            async with self.turns.turn(f"{self.consumer}.wake"):
                await self.engine.wake()  # it started first, and sleeps until it has something to do
        await self._run([None], self.stream_share)
        return await self.take_spans()

    async def set_dispatch_limit(self, below: int) -> None:
        """Dispatch rule: start only groups numbered under `below`. The queue enforces it, row by row."""
        groups = below if self.numbering is None else self.numbering.of(below)
        await self.queue.set_bound("rollout", self.consumer, groups * self.group_size)

    @open_ended
    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens (keep: running samples stay; abort: they begin again after `resume`), or once the
        running ones are done (wait).

        Groups that were on their way from the queue still come in; they start after `resume`, under its weights.
        """
        async with self._exclusive:
            with self.waits("pause", "running samples to end" if mode == "wait" else "the engine to stop"):
                if mode == "wait":
                    await self._drained()
                if isinstance(self.engine, ReplayedEngine):
                    await self.engine.caught_up()
                self._aborting = mode == "abort"
                if mode != "wait":
                    self._going.clear()
                await self.engine.pause(mode)
                self._paused = True
                self._going.clear()
                if self._aborting:
                    await self._begin_again()
            self._spans.close()
            await self._device.give_back()

    async def resume(self, below: int) -> None:
        """Go on under the loaded weights, with a wider dispatch limit."""
        await self.set_dispatch_limit(below)
        await self._go_on()

    @open_ended
    async def retire(self) -> None:
        """Take no more groups; finish those that it has, under the loaded weights. Returns when they are done."""
        self._retired = True
        if self._feeding is not None and not self._submitting:
            self._feeding.cancel()
        async with self._exclusive:
            if self._paused:
                await self._go_on()
        with self.waits("retire", "its last samples"):
            await self._idle.wait()

    async def rejoin(self) -> None:
        """Take groups again."""
        self._retired = False

    async def take_spans(self) -> list[Span]:
        """Spans since the last call. One that is open is cut, so that nothing done before this call is missing."""
        return self._spans.take()

    async def waiting(self) -> list[str]:
        """What this worker's loops wait for, a line each."""
        return self.waits.lines()

    async def progress(self) -> int:
        """Tokens that its engine has sampled so far, and answers of its environment."""
        return self.engine.sampled + (0 if self.episodes is None else self.episodes.answers)

    async def _drained(self) -> None:
        """Of samples with several turns, wait for the last turn of all that the engine has had. New ones stay with
        `_feed`. Unblocked by `_play`."""
        if self.episodes is None:
            return
        self._flowing.clear()
        while self._playing:  # the engine's own counts miss a turn that has ended and is not here yet
            self._settled.clear()
            await self._settled.wait()

    async def _begin_again(self) -> None:
        """Consumes what the engine gave up; hands it the same samples again, from their prompts and in their order, to
        start after the pause. Those between two turns follow in `_play`. Unblocked by `_drain`."""
        while len(self._requests) > len(self._aborted) + self.engine.running + self.engine.waiting:
            self._taken.clear()
            await self._taken.wait()
        self._again = self._playing - self._requests.keys()
        given_up = {completion.sample_id for completion in self._aborted}
        self._aborted.clear()
        if self.episodes is not None:
            await asyncio.gather(*(self.episodes.begin_again(sample) for sample in given_up))
        again = [self._request(sample, made.prompt) for sample, made in self._requests.items() if sample in given_up]
        self._aborting = False
        self._submit(again)
        self._room.set()

    @open_ended
    async def hold(self) -> None:
        """For an evaluation: stop, whatever it does, until `let_go`. The engine has to be a `HeldEngine`."""
        assert isinstance(self.engine, HeldEngine)
        with self.waits("hold", "the engine to stop"):
            await self.engine.hold()
        self._spans.close()

    @open_ended
    async def evaluate(self, requests: list[Request], answers: list[str]) -> list[Completion]:
        """Of a role that is held: other samples, under the weights that its engine has; they go to no queue. answers:
        of their problems, which an environment reads."""
        assert isinstance(self.engine, HeldEngine)
        follow = None
        if self.episodes is not None:
            follow = self.episodes.follow
            for request, answer in zip(requests, answers, strict=True):
                self.episodes.begin(request.sample_id, Problem(request.prompt, answer))
        device, held = self._device, self._device.held
        await device.take()
        try:
            with self.waits("evaluate", f"{len(requests)} samples"):
                return await self.engine.generate(requests, follow)
        finally:
            if not held:
                await device.give_back()

    async def let_go(self) -> None:
        """Go on as if nothing had happened."""
        assert isinstance(self.engine, HeldEngine)
        await self.engine.let_go()
        self._open_span()

    async def _go_on(self) -> None:
        await self._device.take()
        await self.engine.resume()
        self._paused = False
        self._going.set()
        self._flowing.set()
        self._open_span()
        await self._give_back_if_idle()

    async def _take_device(self) -> None:
        """Before the engine gets samples, unless it is paused: then `_go_on` takes the device."""
        if not self._paused:
            await self._device.take()
        if self._paused:
            await self._device.give_back()

    async def _give_back_if_idle(self) -> None:
        if not (self.engine.running or self.engine.waiting or self._whole_batch):
            await self._device.give_back()

    async def _load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Span]:
        """Load into a paused or idle engine. The KV cache of the old weights is dropped, unless `keep_cache`."""
        async with self._exclusive:
            async with nullcontext() if self._device.held else self.turns.turn(f"{self.consumer}.load"):
                start = self.clock.now()
                self._spans.close()
                with self.waits("load", f"the weights of version {version}"):
                    await self.engine.load_weights(version, weights)
                if not self.keep_cache:
                    self.engine.drop_cache()
                end = self.clock.now()
            self._spans.add(Span("rollout", self.name, "load_weights", start, end, version, version - 1))
        return await self.take_spans()

    async def _run(self, partitions: Sequence[str | None], most: int) -> None:
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as loops:
                drain = loops.create_task(self._drain(loops), name=f"{self.waits.owner}.drain")
                write = loops.create_task(self._rows.write(), name=f"{self.waits.owner}.write")
                ending = loops.create_task(self._end_stragglers(), name=f"{self.waits.owner}.limit")
                if not self._retired:
                    self._feeding = loops.create_task(self._feed(partitions, most), name=f"{self.waits.owner}.feed")
                    await asyncio.wait([self._feeding])
                    if self._feeding.cancelled():
                        await self.queue.waiting()  # once this is answered, what a get was given is back in the queue
                await self._rows.all_written()
                for loop in (drain, write, ending):
                    loop.cancel()
        finally:
            if not self._whole_batch:
                await self._device.give_back()
        self._spans.close()
        self._idle.set()

    async def _feed(self, partitions: Sequence[str | None], most: int) -> None:
        """Consumes groups, produces requests, of one partition after the other (None: of any). Where what is refused in
        one comes again, it is not waited for before the next is begun: they take turns, a group at a time."""
        if self._recorded is not None:
            async with asyncio.TaskGroup() as feeds:
                for groups in self._recorded:
                    feeds.create_task(self._feed_recorded(groups, most))
        elif self.refilled and len(partitions) > 1:
            async with asyncio.TaskGroup() as feeds:
                for partition in partitions:
                    feeds.create_task(self._feed_from(partition, most, self.group_size))
        else:
            for partition in partitions:
                await self._feed_from(partition, most, self.share)

    async def _feed_from(self, partition: str | None, most: int, at_once: int) -> None:
        """Waits for free slots (unblocked by `_drain`) and for groups that the dispatch limit allows (unblocked by
        admission and by new weights). Ends when the queue has no more."""
        while not self._retired and (batch := await self._next(partition, most, at_once)) is not None:
            await self._take_in(batch)

    async def _feed_recorded(self, groups: Iterable[int], most: int) -> None:
        """As `_feed_from`, of these groups, one after the other. Raises ConfigError where one does not come."""
        for group in groups:
            batch = await self._next(None, most, self.group_size, rows_of(group, self.group_size))
            await self._take_in(admitted(group, batch))

    async def _take_in(self, batch: Batch) -> None:
        """Into the engine, once it takes something."""
        samples, prompts = samples_in(batch).tolist(), batch.ragged("prompt").rows()
        self._rows.take(batch)
        self._submitting += 1
        if self.episodes is not None:
            for sample, prompt, answer in zip(samples, prompts, texts_of(batch.ragged("answer")), strict=True):
                self.episodes.begin(sample, Problem(prompt, answer))
        await self._take_device()
        while not self._flowing.is_set():
            await self._give_back_if_idle()
            with self.waits("feed", "the engine to go on"):
                await self._flowing.wait()
            await self._take_device()
        if self.episodes is not None:
            self._playing.update(samples)
        self._submit([self._request(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)])
        self._submitting -= 1

    def _request(self, sample: int, prompt: np.ndarray, partial: Completion | None = None) -> Request:
        """As this sample is drawn."""
        return Request(sample, prompt, partial, self.greedy if sample % self.group_size == 0 else None)

    def _submit(self, requests: Sequence[Request]) -> None:
        self._requests |= {request.sample_id: request for request in requests}
        self.engine.submit(requests)
        if self._limit is not None:
            self._limit.begin(request.sample_id for request in requests if request.partial is None)
        self._open_span()

    async def _next(
        self, partition: str | None, most: int, at_once: int, only: tuple[int, ...] | None = None
    ) -> Batch | None:
        """As many groups as there are slots for, with `most` samples here and `at_once` taken at a time; None if the
        queue has no more. only: these rows."""
        while (free := self._free(most)) < self.group_size:
            self._room.clear()
            with self.waits("feed", "a free slot"):
                await self._room.wait()
        with self.waits("feed", f"groups of {partition or 'any batch'}"):
            return await self.queue.get(
                "rollout",
                min(at_once, free // self.group_size * self.group_size),
                minimum=self.group_size,
                partition=partition,
                consumer=self.consumer,
                only=only,
            )

    def _free(self, most: int) -> int:
        if self._aborting:
            return 0  # slots are empty for a moment only
        busy = self.engine.running + self.engine.waiting
        return min(self.engine.slots - busy, most - (busy if self.episodes is None else len(self._playing)))

    async def _drain(self, loops: asyncio.TaskGroup) -> None:
        """Consumes finished samples as the engine streams them out; unblocks `_feed` (slots) and `OpenRows.write`, and
        starts a `_play` in `loops` for each that may have another turn."""
        while True:
            with self.waits("drain", "the engine to finish samples"):
                finished = self._keep_aborted(await self.engine.finished())
            if self.episodes is not None:
                for turn in finished:
                    loops.create_task(self._play(self.episodes, turn), name=f"{self.waits.owner}.play")
            if not self.engine.running and not self.engine.waiting:
                self._spans.close()
            self._room.set()
            if self.episodes is None:
                self._complete(finished)
            self._taken.set()
            await self._give_back_if_idle()

    def _keep_aborted(self, finished: Sequence[Completion]) -> list[Completion]:
        """What is done; what a pause took back stays with `_begin_again`."""
        done = []
        for completion in finished:
            if self._aborting and completion.finish_reason == "abort":
                self._aborted.append(completion)
            else:
                del self._requests[completion.sample_id]
                done.append(completion)
        return done

    async def _play(self, episodes: Episodes, turn: Completion) -> None:
        """Consumes one turn of a sample; produces its next one for the engine, or the sample. Waits for its
        environment, at most as long as that says."""
        following = await episodes.follow(turn)
        if isinstance(following, Request):
            await self._take_device()
            if turn.sample_id in self._again:
                await episodes.begin_again(turn.sample_id)
                self._again.discard(turn.sample_id)
                following = Request(turn.sample_id, following.prompt)
            self._submit([self._request(turn.sample_id, following.prompt, following.partial)])
        else:
            self._again.discard(turn.sample_id)
            self._complete([following])
            self._playing.remove(turn.sample_id)
            self._room.set()
            self._settled.set()

    def _complete(self, samples: Sequence[Completion]) -> None:
        """They are done, and go to the queue."""
        self._rows.finish(samples)
        if self._limit is not None:
            for sample in samples:
                self._limit.end(sample.sample_id)

    async def _end_stragglers(self) -> None:
        """Where there is a limit: asks engine and environment to end what takes longer. Unblocked by the clock; while
        the engine is paused it waits."""
        while self._limit is not None:
            late = await self._limit.overdue()
            with self.waits("limit", "the engine to go on"):
                await self._going.wait()
            await self.engine.cut([sample for sample in late if sample in self._requests])
            if self.episodes is not None:
                self.episodes.cut(late)

    def _open_span(self) -> None:
        if not self._paused:
            self._spans.open()
