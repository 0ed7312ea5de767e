"""An engine that can be borrowed from the role that drives it, and given back as it was.

While it is held, other samples are generated under the weights that it has. What it was doing is taken out and put back
afterwards, losing no token: the role sees an engine that stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.protocols import Completion, Request, RolloutEngine, StopMode

if TYPE_CHECKING:
    import torch


Follow = Callable[[Completion], Awaitable[Request | Completion]]
"""A step after a turn: the next request, or the whole sample."""


class WrappedEngine:
    """`harness.protocols.RolloutEngine` that asks `engine` for all that it does not do itself."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class _Held:
    """paused: by its role, before it was held; running, waiting: what the role sees meanwhile; late: what it submits
    meanwhile; taken_out: what was going on, by sample; borrowed: the present turn of each sample of the holder's; cut:
    what the role wants to end."""

    paused: bool
    running: int
    waiting: int
    late: list[Request] = field(default_factory=list)
    taken_out: dict[int, Completion] = field(default_factory=dict)
    borrowed: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)


class HeldEngine(WrappedEngine):
    """`harness.protocols.RolloutEngine` around another one. `hold`, any number of `generate`, `let_go`."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self._requests: dict[int, Request] = {}  # of the role, not done
        self._done: list[Completion] = []
        self._paused = self._asleep = False
        self._held: _Held | None = None
        self._touching = asyncio.Lock()  # whoever changes what the engine does; while it is held, the holder
        self._taking = asyncio.Lock()  # whoever waits for finished samples, for all who do

    @property
    def running(self) -> int:
        """Samples that hold a slot, of the role's."""
        return self.engine.running if self._held is None else self._held.running

    @property
    def waiting(self) -> int:
        """Samples of the role's that wait for one."""
        return self.engine.waiting if self._held is None else self._held.waiting + len(self._held.late)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples; while it is held, until it is let go."""
        if self._held is None:
            self.engine.submit(requests)
        else:
            self._held.late += requests
        self._requests |= {request.sample_id: request for request in requests}

    async def finished(self) -> list[Completion]:
        """Wait for samples of the role's that are done."""
        await self._take_until(lambda: bool(self._done))
        done, self._done = self._done, []
        return done

    async def pause(self, mode: StopMode) -> None:
        """Pause, once it is not held."""
        async with self._touching:
            await self.engine.pause(mode)
            self._paused = True

    async def resume(self) -> None:
        """Go on, once it is not held."""
        async with self._touching:
            await self.engine.resume()
            self._paused = False

    async def cut(self, sample_ids: Collection[int]) -> None:
        """Let samples end; while it is held, they end when it is let go."""
        if self._held is None:
            await self.engine.cut(sample_ids)
        else:
            self._held.cut.update(sample_ids)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        async with self._touching:
            await self.engine.load_weights(version, weights)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Sleep, once it is not held."""
        async with self._touching:
            await self.engine.sleep(keep_weights=keep_weights)
            self._asleep = True

    async def wake(self) -> None:
        """Wake, once it is not held."""
        async with self._touching:
            await self.engine.wake()
            self._asleep = False

    async def hold(self) -> None:
        """Take everything out that it was doing; from now on nothing reaches it but what `generate` asks for."""
        await self._touching.acquire()
        held = self._held = _Held(self._paused, self.engine.running, self.engine.waiting)
        if self._asleep:
            return
        await self.engine.pause("abort")
        await self._take_until(lambda: len(self._requests) == len(held.taken_out) + len(held.late))

    async def generate(self, requests: Sequence[Request], follow: Follow | None = None) -> list[Completion]:
        """Generate these samples by a held engine, which wakes for it where it sleeps: whole, in their order. follow:
        what comes after each turn of one."""
        held = self._held
        assert held is not None, "hold comes first"
        if self._asleep:
            await self.engine.wake()
        if held.paused or not self._asleep:
            await self.engine.resume()
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_until(lambda: False))
            samples = [tasks.create_task(self._whole(held, request, follow)) for request in requests]
            await asyncio.wait(samples)
            taking.cancel()
        if held.paused or not self._asleep:
            await self.engine.pause("keep")  # it is idle; nothing is to start by itself
        if self._asleep:
            await self.engine.sleep()
        return [sample.result() for sample in samples]

    async def let_go(self) -> None:
        """Let the engine go on with what it was doing; a sample that had no token yet begins as if it came now."""
        held, self._held = self._held, None
        assert held is not None, "hold comes first"
        self.engine.submit([self._requests[sample].after(aborted) for sample, aborted in held.taken_out.items()])
        self.engine.submit(held.late)
        if held.cut:
            await self.engine.cut(held.cut)
        if not (held.paused or self._asleep):
            await self.engine.resume()
        self._touching.release()

    async def _whole(self, held: _Held, request: Request, follow: Follow | None) -> Completion:
        """One borrowed sample, turn by turn."""
        following: Request | Completion = request
        while isinstance(following, Request):
            held.borrowed[request.sample_id] = asyncio.get_running_loop().create_future()
            self.engine.submit([replace(following, sampling=request.sampling)])
            following = await held.borrowed[request.sample_id]
            if follow is not None:
                following = await follow(following)
        return following

    async def _take_until(self, enough: Callable[[], bool]) -> None:
        """Take what the engine finishes, and deal it out, until there is enough. One takes at a time, for all."""
        while not enough():
            async with self._taking:
                if not enough():
                    self._deal(await self.engine.finished())

    def _deal(self, finished: Sequence[Completion]) -> None:
        for completion in finished:
            sample, held = completion.sample_id, self._held
            if held is not None and sample in held.borrowed:
                held.borrowed[sample].set_result(completion)
            elif held is not None and completion.finish_reason == "abort":
                held.taken_out[sample] = completion
            else:
                self._requests.pop(sample, None)
                self._done.append(completion)
