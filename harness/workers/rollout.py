"""The rollout role: groups from the queue into one engine, finished samples from the engine into the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from harness.protocols import CarriedSample, Clock, Completion, ReceivingEngine, Request, RolloutEngine, Sampling, Span
from harness.runtime.runtime import Waits, open_ended
from harness.tasks import Problem
from harness.transfer_queue import Batch, TransferQueue
from harness.weight_sync.endpoints import EngineWorker
from harness.workers.dataflow import Numbering, partition_name
from harness.workers.episodes import Episodes
from harness.workers.generating import EngineOnDevice
from harness.workers.held_engine import HeldEngine, WrappedEngine
from harness.workers.replaying import RecordedRollout, admitted, rows_of
from harness.workers.sample_flow import EngineSamples, OpenRows, Pause, SampleFlow, SampleLimit
from harness.workers.turns import NO_TURNS, Turns
from schedules.protocol import PauseMode


class Ordered:
    """Takes one partition after the other, as much of it at once as is the engine's share."""

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        """Take all of these partitions (None: of any), until the queue has no more."""
        for partition in partitions:
            await feed.take_all(partition, feed.share)


class TakingTurns(Ordered):
    """Takes several partitions side by side, a group at a time: groups may come again with other prompts, long after
    the first ones of their batch, and the next batch does not wait for them."""

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        if len(partitions) == 1:
            return await super().take(feed, partitions)
        async with asyncio.TaskGroup() as feeds:
            for partition in partitions:
                feeds.create_task(feed.take_all(partition, feed.group_size))


class RecordedOrder:
    """Takes what this engine began in a recorded run, in the same order, and beside it what was dropped there. It goes
    on where it was."""

    def __init__(self, recorded: RecordedRollout) -> None:
        self._feeds = iter(recorded.groups), iter(recorded.dropped)

    async def take(self, feed: Feed, partitions: Sequence[str | None]) -> None:
        """Raises ConfigError where a group does not come."""
        async with asyncio.TaskGroup() as feeds:
            for groups in self._feeds:
                feeds.create_task(self._take(feed, groups))

    async def _take(self, feed: Feed, groups: Iterator[int]) -> None:
        for group in groups:
            await feed.take_group(group)


FeedOrder = Ordered | RecordedOrder
"""The order in which a feed takes groups."""


class Feed:
    """Consumes groups of the queue, as `consumer`; produces samples of an engine.

    Waits for free slots (unblocked by the flow) and for groups that the dispatch limit allows (unblocked by admission
    and by new weights). share: the most samples that `Ordered` takes at once.
    """

    def __init__(
        self, queue: TransferQueue, flow: SampleFlow, order: FeedOrder, waits: Waits, *, group_size: int, share: int
    ) -> None:
        self._queue, self._flow, self._order, self._waits = queue, flow, order, waits
        self.group_size, self.share = group_size, share
        self._most = 0
        self._retired = False
        self._begun = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._taking_in = 0  # batches that the queue gave, but the engine does not have

    async def run(self, loops: asyncio.TaskGroup, partitions: Sequence[str | None], most: int) -> None:
        """Take groups until the queue has no more, or it retires. most: samples that the engine has at a time."""
        if self._retired:
            return
        self._most = most
        feeding = self._order.take(self, partitions)
        self._running = loops.create_task(feeding, name=f"{self._waits.owner}.feed")
        self._begun.set()
        await asyncio.wait([self._running])
        self._begun.clear()
        if self._running.cancelled():
            await self._queue.waiting()  # once this is answered, what a get was given is back in the queue

    def retire(self) -> None:
        """Take no more groups. What the queue gave already still goes to the engine."""
        self._retired = True
        if self._running is not None and not self._taking_in:
            self._running.cancel()

    def rejoin(self) -> None:
        """Take groups again."""
        self._retired = False

    async def end(self) -> None:
        """End a run that has begun, or is about to: what the queue gave already is with the engine then."""
        await self._begun.wait()
        assert self._running is not None
        self.retire()
        await asyncio.wait([self._running])
        self.rejoin()

    async def take_all(self, partition: str | None, at_once: int) -> None:
        """All groups of a partition, so many samples at once; ends when the queue has no more."""
        while not self._retired and (batch := await self._next(partition, at_once)) is not None:
            await self._take_in(batch)

    async def take_group(self, group: int) -> None:
        """Take this group. Raises ConfigError where it does not come."""
        batch = await self._next(None, self.group_size, rows_of(group, self.group_size))
        await self._take_in(admitted(group, batch))

    async def _take_in(self, batch: Batch) -> None:
        self._taking_in += 1
        await self._flow.take_in(batch)
        self._taking_in -= 1

    async def _next(self, partition: str | None, at_once: int, only: tuple[int, ...] | None = None) -> Batch | None:
        """Groups, as many as there are slots for; None if the queue has no more. only: these rows."""
        n = self.group_size
        while (free := self._flow.free(self._most)) < n:
            self._flow.room.clear()
            with self._waits("feed", "a free slot"):
                await self._flow.room.wait()
        with self._waits("feed", f"groups of {partition or 'any batch'}"):
            return await self._queue.get(
                "rollout",
                min(at_once, free // n * n),
                minimum=n,
                partition=partition,
                consumer=self._waits.owner,
                only=only,
            )


@dataclass(frozen=True)
class Ports:
    """Surroundings of a rollout role besides its engine. turns: on its device, which it holds while it has samples, or
    from waking to sleeping, and while it loads weights; episodes: of samples that play with an environment."""

    queue: TransferQueue
    clock: Clock
    device: torch.device
    turns: Turns = NO_TURNS
    episodes: Episodes | None = None


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout role; a field for each, so there are fifteen.

    index: of its engine in this role; engines: of other roles, numbered before it; numbering: of groups in the queue;
    greedy: how the first sample of each group is drawn, None: as the others; sample_limit_s: after which a sample ends
    where it is, None: it takes as long as it likes.
    generate_s: simulated seconds before a batch is generated as one.

    share: the most samples it takes from the queue at once, and has at a time of one batch; stream_share: the most it
    has at a time while it streams. With several engines, shares keep the first to ask from taking everything.
    shares_device: with other roles; then the engine wakes for a batch, and sleeps after it; keeps_weights: meanwhile;
    rounds: while it streams it has the device until it is paused, and sleeps then; puts_off: groups that are not done
    then, so samples leave it once their group is.
    keep_cache: when it loads weights.
    """

    index: int
    group_size: int
    share: int
    stream_share: int
    keep_cache: bool
    shares_device: bool
    rounds: bool = False
    puts_off: bool = False
    keeps_weights: bool = True
    generate_s: float = 0.0
    greedy: Sampling | None = None
    sample_limit_s: float | None = None
    numbering: Numbering = Numbering(1)
    role: str = "rollout"
    engines: int = 0


class RolloutRole(EngineWorker):
    """One rollout engine: what a schedule and the weights' coordinator may ask of it.

    order: in which it takes groups. Samples move through its parts: feed, flow, device. It has 14 attributes, as five
    are what a receiving worker has to have.
    """

    def __init__(
        self, engine: RolloutEngine, ports: Ports, settings: RolloutSettings, order: FeedOrder | None = None
    ) -> None:
        n, clock, episodes = settings.group_size, ports.clock, ports.episodes
        if engine.slots < n:
            raise ValueError(f"engine.slots={engine.slots} is less than a group of {n}; give it more slots")
        self.engine, self.clock, self.device = engine, clock, ports.device
        self.role, self.name = settings.role, str(settings.index)
        self.consumer = f"{self.role}[{self.name}]"  # its own: what it had is released to others where it dies
        self.waits = Waits(self.consumer, ports.turns.lines)
        self._ports, self.settings = ports, settings
        self._on_device = EngineOnDevice(
            engine,
            clock,
            ports.turns,
            self.role,
            self.name,
            rounds=settings.rounds,
            keeps_weights=settings.keeps_weights,
        )
        self._flow = SampleFlow(
            self._on_device,
            EngineSamples(n, several_turns=episodes is not None, greedy=settings.greedy),
            OpenRows(
                ports.queue, settings.engines + settings.index, self.waits, together=n if settings.puts_off else 1
            ),
            self.waits,
            episodes=episodes,
            limit=None if settings.sample_limit_s is None else SampleLimit(settings.sample_limit_s, clock),
        )
        self._feed = Feed(ports.queue, self._flow, order or Ordered(), self.waits, group_size=n, share=settings.share)
        self._pause = Pause(self._flow, self.waits)
        if self.role == "lent":
            self._pause.begin_stopped()
        self._exclusive = asyncio.Lock()  # of what must not happen side by side: a batch, a pause, a load
        self._idle = asyncio.Event()  # set while it does not generate
        self._idle.set()

    @open_ended
    async def generate(self, iteration: int, batches: int = 1) -> list[Span]:
        """Generate everything of this batch that no other engine took; or of so many batches from there on, as one.
        Called again, it takes what lost engines had taken and not finished."""
        if self.settings.generate_s:
            await self.clock.sleep(self.settings.generate_s)
        async with self._exclusive:
            # The first engine to ask leaves the others their share of the batch; it may take more as it finishes.
            async with self._on_device.whole_batch() if self.settings.shares_device else nullcontext():
                partitions = [partition_name(i) for i in range(iteration, iteration + batches)]
                await self._run(partitions, self.settings.share * batches)
        return await self.take_spans()

    @open_ended
    async def stream(self) -> list[Span]:
        """Generate what the dispatch limit allows until the queue is closed and exhausted.

        Returns the last spans only: `take_spans` hands the others out while the run goes on.
        """
        if self.settings.shares_device and not self.settings.rounds:
            async with self._ports.turns.turn(f"{self.consumer}.wake"):
                await self.engine.wake()  # it started first, and sleeps until it has something to do
        async with self._on_device.whole_batch() if self.settings.rounds else nullcontext():
            await self._run([None], self.settings.stream_share)
        return await self.take_spans()

    async def _run(self, partitions: Sequence[str | None], most: int) -> None:
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = self._flow.start(tasks)
                await self._feed.run(tasks, partitions, most)
                await self._flow.rows.all_written()
                for loop in loops:
                    loop.cancel()
        finally:
            await self._on_device.give_back()
        self._on_device.spans.close()
        self._idle.set()

    async def set_dispatch_limit(self, below: int, above: int = 0) -> None:
        """Dispatch rule: start only groups numbered under `below`, and `above` or more. The queue enforces it, row by
        row."""
        n, numbering = self.settings.group_size, self.settings.numbering
        await self._ports.queue.set_bound("rollout", self.consumer, numbering.of(below) * n, numbering.of(above) * n)

    @open_ended
    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens (keep: running samples stay; carry: they leave the engine, and go on after `resume`;
        abort: they begin again then), or once the running ones are done (wait).

        Groups that were on their way from the queue still come in; they start after `resume`, under its weights.
        """
        async with self._exclusive:
            await self._pause.stop(mode)

    @open_ended
    async def hand_over(self) -> list[CarriedSample]:
        """Stop as `pause` does, for an engine that is lent its device, and let another one go on with what it has:
        then `stream` ends."""
        async with self._exclusive:
            await self._feed.end()
            await self._pause.stop("carry")
            carried = self._flow.hand_over()
        await self._idle.wait()
        return carried

    async def take_over(self, carried: list[CarriedSample]) -> None:
        """Go on with samples that another engine had, from the tokens that they have."""
        await self._flow.take_over(carried)

    @open_ended
    async def take_device(self) -> None:
        """Take the device of a paused engine, before it goes on."""
        await self._on_device.take_turn()

    @open_ended
    async def put_off(self) -> None:
        """Stop between two tokens, and give every group that is not done back to the queue."""
        async with self._exclusive:
            await self._pause.stop("put off")

    async def resume(self, below: int, above: int = 0) -> None:
        """Go on under the loaded weights, with other dispatch limits."""
        await self.set_dispatch_limit(below, above)
        await self._pause.go_on()

    @open_ended
    async def retire(self) -> None:
        self._feed.retire()
        async with self._exclusive:
            if self._on_device.paused:
                await self._pause.go_on()
        with self.waits("retire", "its last samples"):
            await self._idle.wait()
        if self.settings.rounds:  # it may have taken the device for nothing
            await self._on_device.stopped()

    async def rejoin(self) -> None:
        self._feed.rejoin()

    async def take_spans(self) -> list[Span]:
        """Spans since the last call. One that is open is cut, so that nothing done before this call is missing."""
        return self._on_device.spans.take()

    async def waiting(self) -> list[str]:
        return self.waits.lines()

    async def progress(self) -> int:
        """Tokens that its engine has sampled so far, and answers of its environment."""
        return self.engine.sampled + (0 if self._ports.episodes is None else self._ports.episodes.answers)

    async def tokens(self) -> tuple[int, int]:
        """Tokens that its engine sampled for the run, and how many of them were thrown away, as their samples began
        again."""
        return self._flow.samples.generated, self._flow.samples.begun_again + self._flow.rows.lost

    @open_ended
    async def hold(self) -> None:
        """Stop for an evaluation, whatever it does, until `let_go`. The engine has to be a `HeldEngine`."""
        assert isinstance(self.engine, HeldEngine)
        with self.waits("hold", "the engine to stop"):
            await self.engine.hold()
        self._on_device.spans.close()

    @open_ended
    async def evaluate(self, requests: list[Request], answers: list[str]) -> list[Completion]:
        """Generate other samples while it is held, under the weights that its engine has; they go to no queue. answers:
        of their problems, which an environment reads."""
        assert isinstance(self.engine, HeldEngine)
        follow = None
        if (episodes := self._ports.episodes) is not None:
            follow = episodes.follow
            for request, answer in zip(requests, answers, strict=True):
                episodes.begin(request.sample_id, Problem(request.prompt, answer))
        async with self._on_device.turn("evaluate"):
            with self.waits("evaluate", f"{len(requests)} samples"):
                return await self.engine.generate(requests, follow)

    async def let_go(self) -> None:
        """Go on as if nothing had happened."""
        assert isinstance(self.engine, HeldEngine)
        await self.engine.let_go()
        self._on_device.open_span()

    @property
    def receiving_engine(self) -> ReceivingEngine | None:
        engine = self.engine
        while isinstance(engine, WrappedEngine):
            engine = engine.engine
        return engine if isinstance(engine, ReceivingEngine) and engine.ends else None

    async def _load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Span]:
        """Load into a paused or idle engine. The KV cache of the old weights is dropped, unless `keep_cache`."""
        async with self._exclusive:
            async with self._on_device.turn("load"):
                start = self.clock.now()
                self._on_device.spans.close()
                with self.waits("load", f"the weights of version {version}"):
                    await self.engine.load_weights(version, weights)
                if not self.settings.keep_cache:
                    self.engine.drop_cache()
                end = self.clock.now()
            self._on_device.spans.add(Span(self.role, self.name, "load_weights", start, end, version, version - 1))
        return await self.take_spans()
