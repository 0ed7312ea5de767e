"""Fronts of a job, which a schedule asks (`schedules.protocol`), where work is only time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from harness.config.transports import transport_of
from harness.cost_model.cost import offload_s, reload_s
from harness.driver.build import fair_share
from harness.driver.event_model.engine import Engine
from harness.driver.event_model.queue import Arrivals, Frontier, Wanted
from harness.rl.advantages import needs_whole_batch
from harness.workers.turns import HeldTurn, Turns
from schedules.base import gather
from schedules.protocol import PauseMode

if TYPE_CHECKING:
    from harness.driver.event_model.job import Job


class Prompts:
    """`schedules.protocol.Prompts`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def admit(self, below: int) -> None:
        queue = self._job.queue
        below = min(below, queue.groups)
        while queue.admitted < below:
            await asyncio.sleep(0)
            queue.admit(below)

    async def drop(self, started_below: int) -> int:
        return self._job.drop(started_below)

    async def close(self) -> None:
        job = self._job
        job.queue.closed = True
        for arrivals in (job.arrivals, job.rewards.arrivals, *(stage.arrivals for stage in job.scoring)):
            arrivals.close()
        job.queue.serve()


class Rollout:
    """`schedules.protocol.Rollout`."""

    def __init__(self, job: Job, engines: Sequence[Engine]) -> None:
        self._job, self.engines = job, engines
        self._rounds = job.schedule.colocated and job.schedule.in_rounds
        self._turns = [
            HeldTurn(job.turns_of(engine.role, engine.number), f"{engine.role}[{engine.number}].generate")
            for engine in engines
        ]

    def split(self, cohorts: int | None = None) -> list[Rollout]:
        count = len(self.engines) if cohorts is None else cohorts
        if not 1 <= count <= len(self.engines):
            raise ValueError(f"{len(self.engines)} rollout engines cannot be split into {count} cohorts")
        return [Rollout(self._job, self.engines[k::count]) for k in range(count)]

    async def generate(self, iteration: int, batches: int = 1) -> None:
        job = self._job
        algorithm, together = job.config.algorithm, range(iteration, iteration + batches)
        if job.cost.generate_s:
            await asyncio.sleep(job.cost.generate_s)
        share = fair_share(algorithm, len(job.engines))
        parts: list[Wanted] = [range(part, part + 1) for part in together]
        if job.refills and batches > 1:  # one does not wait until all of another is kept
            parts = [together]
        if job.schedule.colocated:
            await gather(*(self._in_turn(engine, parts, share) for engine in self.engines))
        else:
            await self._feed(self.engines, parts, share if len(parts) == batches else job.group_size, share * batches)

    async def _in_turn(self, engine: Engine, parts: Sequence[Wanted], share: int) -> None:
        """A batch as one, from waking to sleeping."""
        job = self._job
        async with job.turns_of("rollout", engine.number).turn(f"rollout[{engine.number}].generate"):
            if engine.asleep:
                await asyncio.sleep(reload_s(job.cost))
            await self._feed([engine], parts, share, share * len(parts))
            await asyncio.sleep(offload_s(job.cost))
            engine.asleep = True

    async def stream(self) -> None:
        job = self._job
        algorithm, engines = job.config.algorithm, len(job.rollout.engines)
        most = fair_share(algorithm, engines, batches=1 + job.schedule.eta)
        if self._rounds:
            await self._take_devices()  # which nobody has yet: engines ask for groups before any is admitted
        await self._feed(self.engines, [None], fair_share(algorithm, engines), most)

    async def _feed(self, engines: Sequence[Engine], parts: Sequence[Wanted], share: int, most: int) -> None:
        await _all_called(engines, lambda engine, ended: engine.begin(parts, share, most, ended))

    async def set_dispatch_limit(self, below: int) -> None:
        queue = self._job.queue
        served = queue.rebind(self.engines, below)
        await asyncio.sleep(0)  # others may get another limit at the same moment: what each waited for comes first
        queue.go_on(served)

    async def completed(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        complete, left = self._job.complete, self._job.batch
        assert complete is not None, "for schedules that declare awaits_completion"
        due = [(limit, complete.taken + groups) for limit, groups in first]
        while left:
            left -= len(await complete.ask(left, due))

    async def pause(self, mode: PauseMode) -> None:
        if self._rounds:
            await self._end_rounds(mode)
        else:
            await self._stop(self.engines, mode)

    async def put_off(self) -> None:
        await self.set_dispatch_limit(0)
        await self._end_rounds("put off")

    async def _end_rounds(self, mode: PauseMode | Literal["put off"]) -> None:
        await gather(*(self._end_round(*one, mode) for one in zip(self.engines, self._turns, strict=True)))

    async def _stop(self, engines: Sequence[Engine], mode: PauseMode | Literal["put off"]) -> None:
        await _all_called(engines, lambda engine, paused: engine.pause(mode == "wait", paused))
        for engine in engines:
            if mode in ("carry", "abort"):
                engine.give_up(carry=mode == "carry")
            elif mode == "put off":
                engine.put_off()

    async def resume(self, below: int, above: int = 0) -> None:
        for engine in self.engines:
            engine.above = above
        await self.set_dispatch_limit(below)
        if self._rounds:
            await self._take_devices()
            await asyncio.sleep(reload_s(self._job.cost))
        for engine in self.engines:
            engine.asleep = False
            engine.go_on()

    async def filled(self, groups: int) -> None:
        job = self._job
        if job.in_order:
            return await job.generated.reached(groups)
        while job.complete_groups < groups:
            job.completes.clear()
            await job.completes.wait()

    async def _take_devices(self) -> None:
        """One after the other, in the order in which roles on several of them do."""
        for turn in self._turns:
            await turn.take()

    async def _end_round(self, engine: Engine, turn: HeldTurn, mode: PauseMode | Literal["put off"]) -> None:
        await self._stop([engine], mode)
        await asyncio.sleep(offload_s(self._job.costs[engine.role]))
        engine.asleep = True
        await turn.give_back()


class Lent(Rollout):
    """The engines on training devices, which take groups only while these are lent to them."""

    def __init__(self, job: Job, engines: Sequence[Engine]) -> None:
        super().__init__(job, engines)
        self._over = asyncio.Event()

    async def stream(self) -> None:
        self._over.clear()
        await self._over.wait()

    async def resume(self, below: int, above: int = 0) -> None:
        job = self._job
        await self._take_devices()
        if self.engines[0].asleep:
            await asyncio.sleep(reload_s(job.costs["lent"]))
        share = fair_share(job.config.algorithm, len(job.engines))
        most = fair_share(job.config.algorithm, len(job.engines), batches=1 + job.schedule.eta)
        for engine in self.engines:
            engine.asleep, engine.bound, engine.above = False, below, above
            engine.go_on()
            engine.begin([None], share, most, lambda: None)

    async def hand_over(self, to: Rollout) -> None:
        for engine in self.engines:
            engine.end()
        await gather(*(self._end_round(*one, "keep") for one in zip(self.engines, self._turns, strict=True)))
        n = self._job.group_size
        of_group: dict[int, list[int]] = {}
        for sample in sorted(sample for engine in self.engines for sample in engine.hand_over()):
            of_group.setdefault(sample // n, []).append(sample)
        groups = list(of_group.values())
        for place, engine in enumerate(to.engines):
            if samples := [one for group in groups[place :: len(to.engines)] for one in group]:
                engine.take_over(samples)
        self._over.set()


async def _all_called(engines: Sequence[Engine], begin: Callable[[Engine, Callable[[], None]], None]) -> None:
    """Begin something on each engine, with a function that it calls when that is done; wait for all."""
    done, left = asyncio.get_running_loop().create_future(), len(engines)

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set_result(None)

    for engine in engines:
        begin(engine, one)
    await done


class Rewards:
    """Rewards, and advantages, which take no time: groups one after the other, the oldest that is there first. Where
    groups may be refused, they are rewarded whatever a schedule asks, and judged then."""

    name = "reward"

    def __init__(self, job: Job) -> None:
        self._job, self._sample_s = job, job.cost.reward_s_per_sample
        self._whole = needs_whole_batch(job.config.algorithm)
        self._ready: list[list[int]] = [[] for _ in range(job.iterations)]
        self._unjudged, self._over = list[int](), False
        self._news = asyncio.Event()
        self.arrivals = Arrivals(job.queue.part_of)

    def add(self, groups: Sequence[int]) -> None:
        """Note groups that are generated."""
        if self._job.refills:
            for group in groups:
                heappush(self._unjudged, group)
            self._news.set()
        elif not self._sample_s:
            self._job.came(groups)
        elif not self._job.in_order:
            self.arrivals.add(groups)
        else:
            for group in groups:
                heappush(self._ready[group // self._job.batch], group)
            self._news.set()

    def needed(self, end: int) -> int:
        """The first group that training up to `end` does not wait for."""
        batch = self._job.batch
        return -(-end // batch) * batch if self._whole else end

    async def process(self, iteration: int) -> None:
        if self._sample_s and not self._job.refills:
            await self._work([iteration])
        await self._job.rewarded.reached((iteration + 1) * self._job.batch)

    async def stream(self) -> None:
        if not self._sample_s or self._job.refills:
            return
        if self._job.in_order:
            await self._work(range(self._job.iterations))
        else:
            while groups := await self.arrivals.ask(1):
                await self._pass(groups)

    async def judge(self) -> None:
        """Reward groups and let the filter judge them, until the job is over. Raises ConfigError where it refuses too
        many."""
        while not self._over:
            if self._unjudged:
                group = heappop(self._unjudged)
                if self._sample_s:
                    await asyncio.sleep(self._sample_s * self._job.group_size)
                self._job.judge(group)
            else:
                self._news.clear()
                await self._news.wait()

    def end(self) -> None:
        """Nothing is to be judged any more."""
        self._over = True
        self._news.set()

    async def _work(self, batches: Sequence[int]) -> None:
        for _ in range(len(batches) * self._job.batch):
            while not (ready := next((self._ready[batch] for batch in batches if self._ready[batch]), None)):
                self._news.clear()
                await self._news.wait()
            await self._pass([heappop(ready)])

    async def _pass(self, groups: Sequence[int]) -> None:
        await asyncio.sleep(self._sample_s * self._job.group_size * len(groups))
        self._job.came(groups)


class Scoring:
    """Reference or old log-probs, micro-batch by micro-batch in order."""

    def __init__(self, job: Job, role: str, place: int) -> None:
        """place: in the order in which the queue hands rows to roles."""
        self.name, self.done, self._job, self._place = role, Frontier(job.queue.groups), job, place
        self.arrivals = Arrivals(job.queue.part_of)
        beside = job.placement.share(role, "actor")
        self.turns: Turns = job.turns_of("actor" if beside else role, 0)
        self.loads = role == "actor_fwd" and not beside
        self._engine_is_free = asyncio.Lock()

    async def process(self, iteration: int) -> None:
        for groups in self._job.micro_batches(self.name, iteration):
            await self._job.generated.reached(groups.stop, self._place)
            await self._score(groups)
            self.done.add(groups)
            await asyncio.sleep(0)  # who waits for these asks for the device first

    async def stream(self) -> None:
        if self._job.in_order:
            for iteration in range(self._job.iterations):
                await self.process(iteration)
        else:
            while groups := await self.arrivals.ask(self._job.micro_batch(self.name)):
                await self._score(groups)
                self._job.came(groups)

    async def _score(self, groups: Sequence[int]) -> None:
        async with self.turns.turn(f"{self.name}[0].work"), self._engine_is_free:
            await self._job.work(self.name, self._job.score_s(self.name, groups))

    async def load(self) -> None:
        """New weights, between two micro-batches."""
        async with self.turns.turn(f"{self.name}[0].load"), self._engine_is_free:
            await asyncio.sleep(self._job.times.load_s)


class Trainer:
    """`schedules.protocol.Trainer`; see `harness.workers.training`."""

    def __init__(self, job: Job) -> None:
        self._job, self.turns = job, job.turns_of("actor", 0)
        self.waited_s: list[float] = []
        self._took = 0.0
        self.trained: list[Sequence[int]] = []  # groups of each iteration
        self._steps = 0

    @property
    def waited(self) -> float:
        return self.waited_s[-1] / self._took if self._took else 0.0

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        began = self._job.now
        await self._train(iteration, first)
        self._took = self._job.now - began

    async def _train(self, iteration: int, first: Sequence[tuple[int, int]]) -> None:
        job, algorithm = self._job, self._job.config.algorithm
        scored_beside = job.placement.share("actor_fwd", "actor")
        steps, freezes = algorithm.steps_per_version, algorithm.freezes_proximal
        self.waited_s.append(0.0)
        arriving = self._in_order(iteration) if job.in_order else self._as_completed(first)
        if steps > 1 and (freezes or scored_beside):
            parts = list[Sequence[int]]()
            async for groups in arriving:
                parts.append(groups)
                if freezes:
                    await self._work(job.score_s("actor", groups))
            seconds = algorithm.epochs * sum(map(job.train_s, parts)) + steps * job.cost.train_step_s
            await self._work(seconds + job.cost.checkpoint.of(iteration + 1))
            return
        kept = await self._epoch(arriving)
        for _ in range(1, algorithm.epochs):
            await self._epoch(_again(kept))

    async def _epoch(self, arriving: AsyncIterator[Sequence[int]]) -> list[Sequence[int]]:
        """Train on all that comes, a step after each mini-batch; what came."""
        since, kept = 0, list[Sequence[int]]()
        async for groups in arriving:
            if since == self._job.config.algorithm.mini_batch_groups:
                await self._step()
                since = 0
            await self._work(self._job.train_s(groups))
            kept.append(groups)
            since += len(groups)
        await self._step()
        return kept

    async def _in_order(self, iteration: int) -> AsyncIterator[Sequence[int]]:
        job = self._job
        self.trained.append(range(iteration * job.batch, (iteration + 1) * job.batch))
        inputs = [stage.done for stage in job.scoring]
        for groups in job.micro_batches("actor", iteration):
            since = job.now
            await job.rewarded.reached(job.rewards.needed(groups.stop))
            for frontier in inputs:
                await frontier.reached(groups.stop)
            self.waited_s[-1] += job.now - since
            yield groups

    async def _as_completed(self, first: Sequence[tuple[int, int]]) -> AsyncIterator[Sequence[int]]:
        """Take whatever is complete, up to a micro-batch, or as large ones as can be (`CompletionReader`); the next one
        is asked for while one is computed."""
        job, taken = self._job, list[int]()
        mini, most = job.config.algorithm.mini_batch_groups, job.micro_batch("actor")
        due = [(limit, job.arrivals.taken + groups) for limit, groups in first]

        async def ask() -> list[int]:
            room, groups = min(most, job.batch - len(taken), mini - len(taken) % mini), list[int]()
            while not groups or (job.schedule.colocated and len(groups) < room):
                groups += await job.arrivals.ask(room - len(groups), due)
            return groups

        asked = asyncio.create_task(ask())
        while len(taken) < job.batch:
            since = job.now
            groups = await asked
            self.waited_s[-1] += job.now - since
            taken += groups
            if len(taken) < job.batch:
                asked = asyncio.create_task(ask())
            await asyncio.sleep(0)
            yield groups
        self.trained.append(taken)

    async def _step(self) -> None:
        self._steps += 1
        version, within = divmod(self._steps, self._job.config.algorithm.steps_per_version)
        await self._work(self._job.cost.train_step_s + (0.0 if within else self._job.cost.checkpoint.of(version)))

    async def _work(self, seconds: float) -> None:
        async with self.turns.turn("actor[0].train"):
            await self._job.work("actor", seconds)


async def _again(kept: Sequence[Sequence[int]]) -> AsyncIterator[Sequence[int]]:
    for groups in kept:
        yield groups


class Weights:
    """`schedules.protocol.Weights`; see `harness.weight_sync.coordinator`."""

    def __init__(self, job: Job) -> None:
        self._job, self._scorers = job, [stage for stage in job.scoring if stage.loads]
        carrier = transport_of(job.schedule.transport)
        self._staged, self._in_turn = carrier.staged, carrier.in_turn and not job.schedule.colocated
        self._left_at, self._arrived = 0.0, 0
        self._progress = asyncio.Event()
        self._transfer: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        job = self._job
        await asyncio.sleep(0)
        await self.finish()
        engines = self._load(job.rollout.engines, version)
        loads = [engines, *(scorer.load() for scorer in self._scorers)]
        if self._staged or self._in_turn:
            await self._send()
            await asyncio.sleep(job.times.stage_s if self._staged else 0.0)
            await gather(*loads)
        else:
            await gather(self._send(), *loads)
        self._arrived = version
        self._job.end_iteration()

    async def mark_version(self, version: int) -> None:
        await asyncio.sleep(0)
        self._job.end_iteration()

    async def start_transfer(self, version: int) -> None:
        await asyncio.sleep(0)
        await self.finish()
        await self._send()
        self._transfer = asyncio.create_task(self._to_hosts(version))
        self._job.end_iteration()

    async def wait_arrived(self, version: int) -> None:
        while self._arrived < version:
            self._progress.clear()
            await self._progress.wait()

    async def swap(self, rollout: Rollout, version: int) -> None:
        if isinstance(rollout, Lent):
            return await gather(*(self._load_in_turn(engine, version) for engine in rollout.engines))
        await self.wait_arrived(version)
        await self._load([engine for engine in rollout.engines if engine.version < version], version)

    async def swap_newest(self, rollout: Rollout) -> int:
        version = self._arrived
        await self.swap(rollout, version)
        return version

    async def finish(self) -> None:
        """Wait for the transfer under way."""
        if self._transfer is not None:
            await self._transfer

    async def _to_hosts(self, version: int) -> None:
        async def scorers() -> None:
            await asyncio.sleep(self._job.times.stage_s)
            await gather(*(scorer.load() for scorer in self._scorers))

        loading = asyncio.create_task(scorers())
        await asyncio.sleep(self._job.times.stage_s)
        self._arrived = version
        self._progress.set()
        await loading

    async def _send(self) -> None:
        job = self._job
        if (left := self._left_at - job.now) > 0:
            await asyncio.sleep(left)
        async with job.trainer.turns.turn("actor[0].send"):
            await job.work("send", job.times.send_s)
        self._left_at = job.now + job.times.stage_s

    async def _load(self, engines: Sequence[Engine], version: int) -> None:
        if self._job.schedule.colocated:
            await gather(*(self._load_in_turn(engine, version) for engine in engines))
        elif engines:
            await self._load_at_once(engines, version, self._job.config.engine.keep_cache)

    async def _load_in_turn(self, engine: Engine, version: int) -> None:
        async with self._job.turns_of(engine.role, engine.number).turn(f"{engine.role}[{engine.number}].load"):
            await self._load_at_once([engine], version, True)

    async def _load_at_once(self, engines: Sequence[Engine], version: int, keep_cache: bool) -> None:
        job = self._job
        role = engines[0].role
        load_s, of_role = job.load_s[role], sum(engine.role == role for engine in job.engines)
        job.worked[f"load {role}"] = job.worked.get(f"load {role}", 0.0) + load_s * len(engines) / of_role
        await asyncio.sleep(load_s + job.costs[role].evaluation.of(version))
        for engine in engines:
            engine.load(version, keep_cache=keep_cache)
