"""What a contestant has to offer. Times include turning a writer's arrays into what the queue takes, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tests.benchmarks.transfer_queue.workload import Tasks

Native = Any
"""A row of a ragged column, as this queue's users would hold it (an array, a tensor)."""


@dataclass(frozen=True)
class Taken:
    """A micro-batch in a reader's hands. ragged: (packed values, int64 offsets [k + 1]) of each column; dense: [k]."""

    ragged: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(repr=False)
    dense: Mapping[str, np.ndarray] = field(repr=False)
    handle: Any = field(repr=False)


class Client(Protocol):
    """One process's connection to the queue of one flow."""

    def native(self, rows: Sequence[np.ndarray]) -> list[Native]:
        """What `put` takes of a ragged column; made before the clock starts."""

    def create(self, partition: str, rows: int) -> None:
        """Rows 0, 1, ... of a new partition, if this queue has to be told."""

    def put(
        self, partition: str, rows: np.ndarray, ragged: Mapping[str, Sequence[Native]], dense: Mapping[str, np.ndarray]
    ) -> None:
        """Write new rows."""

    def get(self, partition: str, task: str, columns: Sequence[str], count: int) -> Taken:
        """Wait for so many rows that the task did not have yet."""

    def put_back(self, taken: Taken, column: str, values: np.ndarray, offsets: np.ndarray) -> None:
        """Write a new ragged column of the rows that were taken."""

    def clear(self, partition: str) -> None: ...

    def close(self) -> None: ...


class Contestant(Protocol):
    def start(self, flows: Mapping[str, Tasks]) -> Any:
        """Start the queue, or one for each flow; what `connect` needs in another process (to be pickled)."""

    def connect(self, address: Any, flow: str) -> Client: ...

    def services(self) -> list[int]:
        """The processes that serve, without clients: for counting processor time."""

    def stop(self) -> None: ...


def contestant(name: str) -> Contestant:
    """By name: `peer`, or a backend of Cadence, as in `cadence:shm`."""
    if name == "peer":
        from tests.benchmarks.transfer_queue.peer import Peer

        return Peer()
    if name == "cadence:ray":
        from tests.benchmarks.transfer_queue.ray_cadence import OursOnRay

        return OursOnRay()
    from tests.benchmarks.transfer_queue.cadence import CadenceSide

    return CadenceSide(name.removeprefix("cadence:"))
