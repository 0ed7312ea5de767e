"""A controller that can be written down and made again. Still pure: the files are somebody else's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.control.leases import Lease
from harness.transfer_queue.frames import Frame


class RestorableController(Controller):
    def open_leases(self) -> list[Lease]:
        """What is in somebody's hands: of tasks without leases also what was received long ago."""
        return list(self._leases)

    def frames(self) -> list[tuple[str, Frame]]:
        """What puts brought, with the partition, in their order."""
        return [(partition.name, frame) for partition in self._partitions for frame in partition.frames]

    def state(self) -> dict[str, Any]:
        """All but the frames and what was measured, as plain data and arrays, which are its own: to be encoded at
        once."""
        return {
            "partitions": self._partitions.state(),
            "leases": self._leases.state(),
            "shares": self._shares.state(),
            "bounds": [(task, consumer, below) for (task, consumer), below in self._bounds.items()],
            "handed": self._handed,
            "closed": self.closed,
            "tick": self._tick,
            "now": self._now,
        }

    def restore(self, state: dict[str, Any], frames: Mapping[str, Sequence[Frame]]) -> None:
        """A new one of the same spec goes on as that one was. frames: by partition, as `frames` told them."""
        self._partitions.restore(state["partitions"], frames)
        self._leases.restore(state["leases"])
        self._shares.restore(state["shares"])
        self._bounds = {(task, consumer): below for task, consumer, below in state["bounds"]}
        self._handed = state["handed"]
        self.closed = state["closed"]
        self._tick = state["tick"]
        self._now = state["now"]

    def shift(self, seconds: float) -> None:
        """The clock of the times that callers pass was put forward by so much: leases keep what they had left."""
        self._now += seconds
        self._leases.shift(seconds)
        self._partitions.shift(seconds)
