"""A storage of the queue from outside: payloads in a Mooncake store, over TCP.

`QueueProcess.start(spec, MooncakeBackend("host:port"))` is all that it takes: the backend is a dataclass that every
process imports by its path; `storage` gives writers and readers theirs, `store` the control plane its own. It needs
`pip install mooncake-transfer-engine-non-cuda`, and libibverbs.

A running `mooncake_master` keeps its index; the queue's own process lends it memory, and others may too. Frames are
pinned: a store without room refuses a put, and evicts nothing. Mooncake knows no passwords: only for networks in which
every process may read everything."""

import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from harness.transfer_queue.rows.frames import Buffer
from harness.transfer_queue.storage.inline import SMALL
from harness.transfer_queue.storage.protocol import QueueSession
from harness.transfer_queue.storage.units import FrameColumn, UnitStorage, UnitStore

_ABSENT = -704
_MEANING = {
    -200: "no memory is left in the store: lend it more (lent_bytes)",
    -600: "it is larger than the buffer of this process (buffer_bytes)",
    -900: "the master does not answer",
    -1: "its cause is in Mooncake's log, on the error output",
}


@dataclass(frozen=True, slots=True)
class MooncakeBackend:
    """master: host:port of the mooncake_master; lent_bytes: memory of the queue's process that is the store's;
    buffer_bytes: of each process, through which each frame and each micro-batch must fit; connect_s: how long the
    master may take to accept a connection; inline_bytes: of a put that goes in its message."""

    master: str
    lent_bytes: int = 1 << 30
    buffer_bytes: int = 64 << 20
    connect_s: float = 10.0
    inline_bytes: int = SMALL

    def storage(self, session: QueueSession) -> UnitStorage:
        """Connects: ConnectionError without a master."""
        return UnitStorage([MooncakeStore(self, session.queue, 0)], session.writer, self.inline_bytes)

    def store(self, queue: str) -> UnitStore:
        """Connects, like `storage`."""
        return UnitStore([MooncakeStore(self, queue, self.lent_bytes)])


class MooncakeStore:
    """A `Unit`: the whole store, which spreads what it holds itself. One object for each column of a frame."""

    def __init__(self, backend: MooncakeBackend, queue: str, lent_bytes: int) -> None:
        self.name = f"the mooncake store of {backend.master}"
        self._queue = queue
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._store = MooncakeDistributedStore()
        here = self._own_address(backend)
        ready = self._store.setup(here, "P2PHANDSHAKE", lent_bytes, backend.buffer_bytes, "tcp", "", backend.master)
        self._check(ready, "let this process in")

    def _own_address(self, backend: MooncakeBackend) -> str:
        """By which others reach this node. Mooncake's own client waits for a master that is not there without end."""
        host, _, port = backend.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), backend.connect_s) as connection:
                return connection.getsockname()[0]
        except (OSError, ValueError) as error:
            raise ConnectionError(f"no mooncake_master listens on {backend.master!r} (host:port): {error}") from None

    def store(self, partition: str, number: int, buffers: Mapping[str, Buffer]) -> None:
        some = {self._key(partition, number, column): buffer.data for column, buffer in buffers.items() if buffer.size}
        if some:
            done = self._store.put_batch(list(some), list(some.values()), self._pinned)
            self._check(done, f"write to partition {partition!r}")

    def load(self, partition: str, cells: Sequence[FrameColumn]) -> list[Buffer | None]:
        """What is not there comes as nothing, which is right of an empty column."""
        keys = [self._key(partition, cell.number, cell.column) for cell in cells if cell.size]
        found = iter(self._store.get_batch(keys) if keys else ())
        return [np.frombuffer(next(found) if cell.size else b"", np.uint8) for cell in cells]

    def forget(self, partition: str, number: int, columns: Collection[str]) -> None:
        for done in self._store.batch_remove([self._key(partition, number, column) for column in columns], True):
            self._check(0 if done == _ABSENT else done, f"delete from partition {partition!r}")

    def drop(self, partitions: Collection[str]) -> None:
        for partition in partitions:
            self._remove(f"{self._queue}/{partition}/", f"drop partition {partition!r}")

    def clear(self) -> None:
        self._remove(f"{self._queue}/", "free everything")

    def close(self) -> None:
        self._store.close()

    def _key(self, partition: str, number: int, column: str) -> str:
        return f"{self._queue}/{partition}/{number}/{column}"

    def _remove(self, prefix: str, what: str) -> None:
        """The forced removal asks no reader: the queue drops nothing that is being read."""
        self._check(self._store.remove_by_regex(f"^{re.escape(prefix)}", True), what)

    def _check(self, done: int, what: str) -> None:
        if done < 0:
            raise RuntimeError(f"{self.name} could not {what} (error {done}): {_MEANING.get(done, _MEANING[-1])}")
