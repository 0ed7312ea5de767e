"""An engine that is another one, but for what a subclass says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from harness.protocols import Completion, PauseMode, Request, RolloutEngine

if TYPE_CHECKING:
    import torch


class WrappedEngine:
    """`harness.protocols.RolloutEngine` that asks `engine` for everything."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.slots = engine, engine.slots

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def sampled(self) -> int:
        return self.engine.sampled

    @property
    def running(self) -> int:
        return self.engine.running

    @property
    def waiting(self) -> int:
        return self.engine.waiting

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    async def finished(self) -> list[Completion]:
        return await self.engine.finished()

    async def pause(self, mode: PauseMode) -> None:
        await self.engine.pause(mode)

    def drop_cache(self) -> None:
        self.engine.drop_cache()

    async def resume(self) -> None:
        await self.engine.resume()

    async def cut(self, sample_ids: Collection[int]) -> None:
        await self.engine.cut(sample_ids)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        await self.engine.load_weights(version, weights)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self.engine.sleep(keep_weights=keep_weights)

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        await self.engine.close()
