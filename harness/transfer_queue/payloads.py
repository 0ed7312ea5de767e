"""When payload may go: that of a cleared partition, once nobody has it still to read or to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from harness.transfer_queue.frames import Handout
from harness.transfer_queue.storage.protocol import Keeper


class Payloads:
    """on_the_way: handouts that nobody said to have received, lease -> partition."""

    def __init__(self, keeper: Keeper, on_the_way: Mapping[int, str]) -> None:
        self.on_the_way = dict(on_the_way)
        self._keeper = keeper
        self._cleared: set[str] = set()  # partitions whose payload is still there
        self._saving = Counter[str]()

    def handed(self, handout: Handout) -> None:
        self.on_the_way[handout.lease] = handout.partition

    def received(self, lease: int) -> bool:
        """Whether nobody had said so."""
        partition = self.on_the_way.pop(lease, None)
        if partition is not None:
            self._free(partition)
        return partition is not None

    def being_read(self, partition: str) -> bool:
        return partition in self.on_the_way.values()

    def cleared(self, partition: str) -> None:
        self._cleared.add(partition)
        self._free(partition)

    @contextmanager
    def saving(self, partitions: Collection[str]) -> Iterator[None]:
        """They stay meanwhile."""
        self._saving.update(partitions)
        try:
            yield
        finally:
            self._saving.subtract(partitions)
            for partition in partitions:
                self._free(partition)

    def _free(self, partition: str) -> None:
        read = not self._keeper.pinned and self.being_read(partition)
        if partition in self._cleared and not read and not self._saving[partition]:
            self._cleared.remove(partition)
            self._keeper.drop(partition)
