"""One job under one schedule on one backend, from its parts to its last iteration; writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from harness.metrics.timeline import Timeline
from harness.protocols import Clock
from harness.runner.assemble import Assembly, assemble
from harness.runner.backends import OPEN, Backend, Wanted, reading_of
from harness.runner.recorder import Recorder, places
from harness.runtime.clock import RealClock
from harness.runtime.handles import Handle, call_all
from harness.runtime.stall import watch
from harness.runtime.virtual_loop import VirtualLoop
from harness.runtime.virtual_runtime import rare_collection


class Session:
    """start, connect, measure; then the recorder knows everything."""

    def __init__(self, wanted: Wanted, clock: Clock) -> None:
        config, placement = wanted.config, wanted.plan.placement
        self.wanted, self.clock = wanted, clock
        self.recorder = Recorder(
            Timeline(places(placement, pooled=wanted.plan.backend != "real"), warmup=config.warmup_iterations),
            clock,
            reading_of(config, wanted.plan),
            group_size=config.algorithm.group_size,
            devices=placement.total,
        )
        self._assembly: Assembly | None = None
        self._backend: Backend | None = None  # held as long as the job lives: workers meet at what it keeps

    @property
    def assembly(self) -> Assembly:
        assert self._assembly is not None, "start comes first"
        return self._assembly

    @property
    def trainers(self) -> Sequence[Handle]:
        return self.assembly.trainers

    def start(self, stack: ExitStack) -> None:
        """Start all workers; the stack ends them."""
        wanted = self.wanted
        self._backend = backend = OPEN[wanted.plan.backend](wanted, self.clock, stack)
        self._assembly = assemble(
            wanted.config,
            wanted.schedule,
            wanted.seed,
            placement=wanted.plan.placement,
            kit=backend.kit,
            runtime=backend.runtime,
            clock=self.clock,
            observer=self.recorder,
        )

    async def connect(self) -> None:
        """Bring the weight transport up on all sides."""
        await self.assembly.coordinator.connect()

    async def measure(self) -> None:
        """The schedule, from time 0 to the last version."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            loop.explain = self.assembly.waiting_now  # of workers in this process
        if isinstance(self.clock, RealClock):
            self.clock.restart()
            await call_all(self.assembly.workers, "begin", self.clock.origin)
        try:
            await self._run_watched()
            await self.assembly.coordinator.finish()
        except Exception as failure:
            # A death shows first in whoever was talking to the dead: say who it was, not only who noticed.
            gone = await asyncio.gather(*(worker.is_dead() for worker in self.assembly.workers))
            dead = [worker.name for worker, is_dead in zip(self.assembly.workers, gone, strict=True) if is_dead]
            if dead:
                raise RuntimeError(f"{', '.join(dead)} died; its own last words are in Ray's logs") from failure
            raise

    async def _run_watched(self) -> None:
        """The schedule, beside the watch for a stall where time passes by itself."""
        run = self.wanted.schedule.run(self.assembly.job)
        if not isinstance(self.clock, RealClock):
            with rare_collection():
                return await run
        limit = self.wanted.config.cluster.stall_timeout_s
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(watch(lambda: self.recorder.events, self.assembly.waiting, limit, self.clock))
            await run
            guard.cancel()
