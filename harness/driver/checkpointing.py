"""Makes the checkpoints of a run while it goes on.

What a checkpoint of version v has is of three moments, and no role waits for another at any of them:

1. as v is made: what training remembers, copied by each rank while the weights travel, and written afterwards; and what
   the driver knows (`Cut`);
2. as v + 1 is made, before the queue forgets what it was trained on: the queue. By then all that the next batch is made
   of is there: of samples that an earlier version than v began, too, which could not be made again from version v;
3. when all of it is on the disk: the name.

Going on from it, the batch after v is trained again; what was finished of it, and of later ones that had been admitted
as v was made, is there, sampled by v or before; the rest is sampled again, by v, from the same draws.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from harness.config import CheckpointConfig
from harness.driver.checkpoint_files import QUEUE, Cut, FileFacts, Refusal, begun, put_in_place
from harness.runtime.runtime import Handle, ask_all, retrieved
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.remote.client import RemoteQueue
from harness.workers.training import RememberingRole

Work = Callable[[Callable[[], object]], Awaitable[object]]
"""Does what blocks: in a thread, or at once where there can be none."""


class Left(Exception):
    """SIGTERM asked to leave, and the same command goes on. how: it was left."""

    def __init__(self, how: str) -> None:
        super().__init__(f"left, as SIGTERM asked, {how}: the same command goes on")


class LeftAtCheckpoint(Left):
    """The run was asked to leave, and has a checkpoint of this version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"with a checkpoint of version {version}")
        self.version = version


async def at_once(step: Callable[[], object]) -> None:
    """Take the step now: for a clock that jumps."""
    step()


@dataclass
class _Begun:
    """A checkpoint that is being made. state: written by all ranks; saving: the queue, from when it is."""

    version: int
    folder: Path
    state: asyncio.Task[FileFacts]
    kl_coefficient: float | None = None
    cut: Cut | None = None
    saving: asyncio.Task[None] | None = None
    refused: list[Refusal] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run. folder: that has them; worlds: all that train, by role, a folder each; last: version
    of the run, after which none is needed; leave: whether the run is to end with the next one, which is due at once;
    refused: by a filter, since a cut; kl_coefficient: of the next batch's advantages, where it goes from batch to
    batch."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        *,
        queue: LocalQueue | RemoteQueue,
        worlds: Mapping[str, Sequence[Handle[RememberingRole]]],
        last: int,
        resumed: int = 0,
        work: Work = asyncio.to_thread,
        leave: Callable[[], bool] = lambda: False,
        refused: Callable[[], list[Refusal]] = list,
        kl_coefficient: Callable[[int], Awaitable[float]] | None = None,
    ) -> None:
        self._folder, self._settings = folder, settings
        self._queue, self._worlds = queue, worlds
        self._last, self._work = last, work
        self._leave, self._refused, self._kl_coefficient = leave, refused, kl_coefficient
        self._newest = resumed  # version of the newest one that was begun
        self._begun: _Begun | None = None
        self._placing: asyncio.Task[None] | None = None

    def due(self, version: int) -> bool:
        """Whether a checkpoint of this version is due, which goes to the engines: they are to hold it when a run goes
        on from there."""
        every = 1 if self._leave() else self._settings.every
        return self._newest + every <= version < self._last

    @property
    def waits_for_queue(self) -> bool:
        """Whether one was begun whose queue is still to be saved."""
        return self._begun is not None

    @property
    def writing(self) -> bool:
        """Whether workers write one, or its queue is saved, or it is put in place."""
        begun_, placing = self._begun, self._placing
        steps = [placing] if begun_ is None else [placing, begun_.state, begun_.saving]
        return any(step is not None and not step.done() for step in steps)

    def leaving(self, version: int) -> bool:
        """Whether the run ends, as this version was made, when the queue is saved that a checkpoint waits for."""
        return self._begun is not None and version < self._last and self._leave()

    async def leave(self) -> NoReturn:
        """Stop at the checkpoint whose queue was just saved, once it is on the disk. Raises LeftAtCheckpoint."""
        assert self._begun is not None, "asked where it is"
        version = self._begun.version
        self.complete()
        await self.finish()
        raise LeftAtCheckpoint(version)

    async def begin(self, version: int) -> None:
        """1: every rank copies, and writes meanwhile or at once. One that is being put in place is waited for."""
        await self.finish()
        self._newest = version
        folder = begun(self._folder, version)
        await ask_all((rank for ranks in self._worlds.values() for rank in ranks), lambda rank: rank.copy_state())
        coefficient = None if self._kl_coefficient is None else await self._kl_coefficient(version)
        state = asyncio.create_task(self._write_states(folder))
        state.add_done_callback(retrieved)  # a run may end before anybody waits for it
        self._begun = _Begun(version, folder, state, coefficient)
        if not self._settings.background:
            await state

    def cut(self, cut: Cut) -> None:
        """1: what the driver knows, of the same moment."""
        assert self._begun is not None and self._begun.version == cut.version
        self._begun.cut = cut

    async def save_queue(self) -> None:
        """2: before the queue forgets anything, where a checkpoint waits for it. Once: training that is faster than
        this waits for it with its next version."""
        if (begun_ := self._begun) is None:
            return
        if begun_.saving is None:
            begun_.saving = asyncio.create_task(self._save_queue(begun_))
            begun_.saving.add_done_callback(retrieved)
        await asyncio.shield(begun_.saving)

    async def _save_queue(self, begun_: _Begun) -> None:
        await self._queue.save(str(begun_.folder / QUEUE))
        begun_.refused = self._refused()  # now: of all that begins again in what was saved, and maybe more

    def complete(self) -> None:
        """3: the queue is there. Goes on beside the run."""
        if self._begun is not None:
            begun_, self._begun = self._begun, None
            self._placing = asyncio.create_task(self._place(begun_))
            self._placing.add_done_callback(retrieved)

    async def finish(self) -> None:
        """Wait for the one that is being put in place; raises its error."""
        if self._placing is not None:
            await self._placing

    async def _place(self, begun_: _Begun) -> None:
        files = await begun_.state
        assert begun_.cut is not None, "the driver's part is told with the ranks'"
        cut = msgspec.structs.replace(begun_.cut, refused=begun_.refused, kl_coefficient=begun_.kl_coefficient)
        await self._work(lambda: put_in_place(begun_.folder, cut, files, self._settings.keep))

    async def _write_states(self, folder: Path) -> FileFacts:
        each = await asyncio.gather(*(self._write_state(folder, world) for world in self._worlds))
        return {path: facts for files in each for path, facts in files.items()}

    async def _write_state(self, folder: Path, world: str) -> FileFacts:
        own = folder / world
        own.mkdir()
        written = await ask_all(self._worlds[world], lambda rank: rank.write_state(str(own)))
        return {f"{world}/{name}": (size, digest) for files in written for name, (size, digest) in files.items()}
