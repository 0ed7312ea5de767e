"""The protocols of a queue's storage: a writer's and reader's side, and the side of the control plane."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.transfer_queue.rows.columns import Column, ColumnSpec
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame


class Storage(Protocol):
    """The side in a writer's or reader's process. The queue writes a frame before it announces it, and reads only what
    was announced and not dropped. Any call may fail: the put or get then fails with it, and the queue goes on."""

    waits: bool
    """Whether calls wait for another process, so that an event loop has them done in a thread."""

    def write(self, partition: str, columns: Mapping[str, Column]) -> Frame:
        """Keep a copy of these columns (checked, of equal row counts), so that the writer may go on changing them."""

    def read(self, assignment: BatchAssignment, specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """The assignment's columns, rows in its order, as writable arrays of the reader's own, valid as long as they
        are held, whatever becomes of the partition."""

    def discard(self, partition: str, frame: Frame) -> None:
        """The queue refused this frame."""

    def close(self) -> None:
        """Let go of what this process holds; frames stay."""


class PayloadStore(Protocol):
    """The side in the process of the queue's control plane."""

    pinned: bool
    """Whether an assignment stays readable after its partition was dropped. Otherwise no partition is dropped while one
    of its assignments is being read."""

    def drop(self, partition: str) -> None:
        """Free all that was written for the partition; nothing to do if that is nothing. Does not wait for long."""

    async def fetch(self, partition: str, frame: Frame) -> dict[str, Buffer]:
        """The buffers, by column, of a frame of this partition that does not carry them itself: for a snapshot."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class QueueSession:
    """The facts that the control plane tells a client that connects. queue: a name that no other queue has; writer: a
    number that no other connection to this queue ever had, from which unique keys are made."""

    queue: str
    writer: int


class QueueBackend(Protocol):
    """A small description of the storage that a queue uses, which travels to every process that takes part."""

    def storage(self, session: QueueSession) -> Storage:
        """The side of a writer or reader."""

    def store(self, queue: str) -> PayloadStore:
        """The side of the control plane."""
