"""Payloads across the nodes of a Ray cluster: large ones in actors, to and from which Ray's object store carries them,
small ones in the queue's own messages. Between nodes the object store is in clear: a run uses it where it is asked to.

A frame is the unit actor's from the call that writes it, so that it stays when its writer dies. Everybody in a Ray
cluster can run code on it, so there is no other trust domain here, and Ray may pickle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from harness.transfer_queue.rows.frames import Buffer
from harness.transfer_queue.storage.protocol import QueueSession
from harness.transfer_queue.storage.units import FrameColumn, UnitStorage, UnitStore

INLINE_BYTES = 256 << 10
"""Up to so many, a put goes in its message and lies in the queue's own process: 150 KB cost 0.5 ms of CPU there and
3.4 ms in a unit. Above, its event loop would be busy with one put too long."""


class FrameHost:
    """The actor of a unit: a partition's frames by number, each its buffers by column (uint8)."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[int, dict[str, Buffer]]] = {}

    def store(self, partition: str, number: int, buffers: Mapping[str, Buffer]) -> None:
        """Copied out of the object store, where they are their writer's."""
        kept = {column: buffer.copy() for column, buffer in buffers.items()}
        self._partitions.setdefault(partition, {})[number] = kept

    def load(self, partition: str, cells: Sequence[FrameColumn]) -> list[Buffer | None]:
        """Buffers of these cells; None for what is not there."""
        frames = self._partitions.get(partition, {})
        return [frames.get(number, {}).get(column) for number, column, _ in cells]

    def forget(self, partition: str, number: int) -> None:
        """Forget a frame."""
        frames = self._partitions.get(partition, {})
        frames.pop(number, None)
        if not frames:
            self._partitions.pop(partition, None)

    def drop(self, partitions: Collection[str]) -> None:
        """Forget all frames of partitions."""
        for partition in partitions:
            self._partitions.pop(partition, None)

    def clear(self) -> None:
        """Forget everything."""
        self._partitions.clear()

    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(
            buffer.nbytes
            for frames in self._partitions.values()
            for buffers in frames.values()
            for buffer in buffers.values()
        )


@dataclass(frozen=True, slots=True)
class RayBackend:
    """The storage of one queue, in processes that are connected to the Ray of these actors; picklable by Ray.

    units: handles of FrameHost actors; timeout_s: how long a call to one may take; inline_bytes: of a put that goes in
    its message, and lies in the memory of the queue's own process.
    """

    units: tuple[Any, ...]
    timeout_s: float = 60.0
    inline_bytes: int = INLINE_BYTES

    @classmethod
    def start(cls, units: int = 1, *, timeout_s: float = 60.0, inline_bytes: int = INLINE_BYTES) -> RayBackend:
        """Start so many units, spread over the nodes. They take no CPU of Ray's count, and live until `stop`, or until
        the process that started them ends."""
        if units < 1:
            raise ValueError(f"a RayBackend needs at least one unit, not {units}")
        host = ray.remote(FrameHost).options(num_cpus=0, scheduling_strategy="SPREAD")
        return cls(tuple(host.remote() for _ in range(units)), timeout_s, inline_bytes)

    def stop(self) -> None:
        """End the units and all they hold."""
        for unit in self.units:
            ray.kill(unit)

    def storage(self, session: QueueSession) -> UnitStorage:
        return UnitStorage(self._units(), session.writer, self.inline_bytes)

    def store(self, queue: str) -> UnitStore:
        return UnitStore(self._units())

    def _units(self) -> list[RayUnit]:
        return [RayUnit(f"ray storage unit {i}", unit, self.timeout_s) for i, unit in enumerate(self.units)]


@dataclass(frozen=True, slots=True)
class RayUnits:
    """Settings of a job of its units (`cluster.queue=ray`): as `RayBackend.start` has them."""

    needs_ray: ClassVar[bool] = True
    units: int = 1
    timeout_s: float = 60.0
    inline_bytes: int = INLINE_BYTES

    def open(self) -> RayBackend:
        """Start the units, which live until this process ends."""
        return RayBackend.start(self.units, timeout_s=self.timeout_s, inline_bytes=self.inline_bytes)


@dataclass(frozen=True, slots=True)
class RayUnit:
    """A `Unit`: one actor call for each of its."""

    name: str
    actor: Any
    timeout_s: float

    def store(self, partition: str, number: int, buffers: Mapping[str, Buffer]) -> None:
        self._ask(f"write to partition {partition!r}", self.actor.store, partition, number, buffers)

    def load(self, partition: str, cells: Sequence[FrameColumn]) -> list[Buffer | None]:
        return self._ask(f"read partition {partition!r}", self.actor.load, partition, [tuple(cell) for cell in cells])

    def forget(self, partition: str, number: int, columns: Collection[str]) -> None:
        self._ask(f"delete from partition {partition!r}", self.actor.forget, partition, number)

    def drop(self, partitions: Collection[str]) -> None:
        self._ask(f"drop {len(partitions)} partitions", self.actor.drop, list(partitions))

    def clear(self) -> None:
        self._ask("free everything", self.actor.clear)

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, what: str, method: Any, *arguments: Any) -> Any:
        """One actor call. Its error arrives as what it is, not wrapped into what carried it."""
        try:
            return ray.get(method.remote(*arguments), timeout=self.timeout_s)
        except GetTimeoutError:
            raise TimeoutError(f"{self.name} took more than {self.timeout_s} s to {what}") from None
        except RayTaskError as error:
            raise error.cause from None
        except (ActorDiedError, ActorUnavailableError) as error:
            raise ConnectionError(f"{self.name} has died and could not {what}: {error}") from error
        except RayError as error:
            raise RuntimeError(f"{self.name} could not {what}: {error}") from error
