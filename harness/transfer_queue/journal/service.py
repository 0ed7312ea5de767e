"""Saving a queue to a folder and loading it, once or as it goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack

from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.journal.calls import JournaledController, ReplayState
from harness.transfer_queue.journal.files import Folder, Journal, encode
from harness.transfer_queue.journal.snapshot import Work, fetch, write_snapshot
from harness.transfer_queue.rows.columns import Rows
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.service.service import QueueService, Weights, loop_time
from harness.transfer_queue.storage.protocol import PayloadStore, Storage


async def at_once(step: Callable[[], None]) -> None:
    """For an event loop that knows no threads; others run between the steps."""
    step()
    await asyncio.sleep(0)


async def save(service: QueueService, folder: str | os.PathLike[str], work: Work = asyncio.to_thread) -> None:
    """The queue as it is now, in a folder (made if need be) that holds one queue: what it held counts until all is on
    the disk. Puts and gets go on meanwhile. ValueError if a queue journals there: use its own `save`."""
    files = Folder(folder)
    files.create()
    with files.locked(), service.moment() as (state, frames):
        number = files.next_number()
        await write_snapshot(files.snapshot(number), service, encode(state), frames, work)
        files.commit(number)


def load(
    spec: QueueSpec,
    store: PayloadStore,
    folder: str | os.PathLike[str],
    now: Callable[[], float] = loop_time,
    storage: Storage | None = None,
) -> QueueService:
    """The queue as it was when it was saved, or when the queue that journaled here ended or died. The folder stays as
    it is.

    Open leases have as many seconds left as they had. Readers that still live may acknowledge them by their old
    numbers; of the others, `open_leases` names what is to be released, or lost. storage: where payload is written to;
    without one it stays in the memory of this process. ValueError if nothing was saved there, if it is of another spec,
    or in use; DamagedFile, which is one, if it is damaged.
    """
    files = Folder(folder)
    replay = ReplayState(spec, Controller(spec), storage)
    if not files.path.is_dir():
        raise ValueError(f"no queue was saved in {folder}: there is no such folder")
    with files.locked():
        if replay.read(files) is None:
            raise ValueError(f"no queue was saved in {folder}")
    replay.controller.shift(now() - replay.now)
    return QueueService(spec, store, now, replay.controller, replay.unconfirmed)


class JournaledService(QueueService):
    """A QueueService of which every change is in its folder before it is answered. It goes on with the queue that is
    there, as `load` does, and with a new one where there is none.

    `save` makes the journal short again. `end` closes the files; a process that dies need not. durable: a change is on
    the disk before it is answered, so that it outlives the machine too. Where a change cannot be written, it and all
    after it fail with OSError: load the folder to go on with what came before.
    """

    def __init__(
        self,
        spec: QueueSpec,
        store: PayloadStore,
        folder: str | os.PathLike[str],
        now: Callable[[], float] = loop_time,
        storage: Storage | None = None,
        *,
        durable: bool = False,
    ) -> None:
        self._folder = Folder(folder)
        self._folder.create()
        self._journaled = JournaledController(spec)
        self._saving = asyncio.Lock()
        replay = ReplayState(spec, self._journaled, storage)
        with ExitStack() as undone:
            undone.enter_context(self._folder.locked())
            after = replay.read(self._folder)
            if replay.torn is not None:
                replay.torn.cut_off()
            self._journal = Journal(self._folder, spec, self._folder.next_number(), after, durable)
            undone.callback(self._journal.close)
            self._journaled.journal = self._journal
            if after is not None:
                self._journaled.shift(now() - replay.now)
            self._files = undone.pop_all()
        super().__init__(spec, store, now, self._journaled, replay.unconfirmed)

    async def save(self, work: Work = asyncio.to_thread) -> None:
        """A new snapshot, and a new journal from this moment on; the old ones count until all is on the disk."""
        async with self._saving:
            with self.moment() as (state, frames):
                number = self._folder.next_number()
                self._journal.rotate(number)
                await write_snapshot(self._folder.snapshot(number), self, encode(state), frames, work, number)
                self._folder.commit(number)

    def try_put(self, partition: str, rows: Rows, frame: Frame, weights: Weights) -> bool:
        """False, besides, for a frame whose payload has to be fetched for the journal."""
        if isinstance(frame.place, tuple) and id(frame) not in self._journaled.fetched:
            self._journaled.check_put(partition, rows, frame, weights)
            return False
        return super().try_put(partition, rows, frame, weights)

    async def put(
        self, partition: str, rows: Rows, frame: Frame, weights: Weights, *, timeout_s: float | None = None
    ) -> None:
        if self.try_put(partition, rows, frame, weights):
            return
        self._journaled.fetched[id(frame)] = await fetch(self.store, partition, frame)
        try:
            await super().put(partition, rows, frame, weights, timeout_s=timeout_s)
        finally:
            del self._journaled.fetched[id(frame)]  # in the file, or refused

    def received(self, lease: int) -> None:
        if lease in self._payloads.unconfirmed:
            self._journal.record("received", lease)
        super().received(lease)

    def end(self) -> None:
        """Let go of the files, and of the folder."""
        self._files.close()
