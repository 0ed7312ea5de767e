"""The partitions that live, and the names that cannot be used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from harness.transfer_queue.columns import Rows, as_integers
from harness.transfer_queue.control.partition import Partition
from harness.transfer_queue.frames import Frame
from harness.transfer_queue.spec import QueueSpec


class Partitions:
    """In creation order. rows, nbytes: what all of them hold."""

    def __init__(self, spec: QueueSpec) -> None:
        self._spec = spec
        self._live: dict[str, Partition] = {}
        self._cleared: set[str] = set()
        self.rows = 0
        self.nbytes = 0

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._live.values())

    def __contains__(self, name: str | None) -> bool:
        return name in self._live

    def was_cleared(self, name: str | None) -> bool:
        return name in self._cleared

    def asked(self, name: str | None) -> Iterable[Partition]:
        """That of this name, if it lives; None: all."""
        if name is None:
            return self._live.values()
        return [self._live[name]] if name in self._live else []

    def check_new(self, name: str, rows: Iterable[int], group_size: int) -> Rows:
        """The rows of a partition that can be created once there is room; ValueError if it never can."""
        ids = as_integers(rows, "rows").copy()
        cap = self._spec.capacity_rows
        if name in self._live or name in self._cleared:
            raise ValueError(f"partition {name!r} exists or was cleared: a name is used once")
        if not ids.size or np.unique(ids).size < ids.size:
            raise ValueError(f"partition {name!r} needs one or more different rows, not {ids.tolist()[:20]}")
        if group_size < 1 or ids.size % group_size:
            raise ValueError(f"partition {name!r} has {ids.size} rows, which are not whole groups of {group_size}")
        if cap is not None and ids.size > cap:
            raise ValueError(f"partition {name!r} has {ids.size} rows, more than capacity_rows={cap}")
        return ids

    def create(self, name: str, rows: Rows, group_size: int) -> None:
        self._live[name] = Partition(name, rows, group_size, self._spec)
        self.rows += rows.size

    def forget(self, name: str) -> None:
        """It was cleared."""
        partition = self._live.pop(name)
        self._cleared.add(name)
        self.rows -= partition.rows.size
        self.nbytes -= partition.nbytes

    def state(self) -> dict[str, Any]:
        """As plain data and arrays, which are its own: to be encoded at once."""
        return {"live": [partition.state() for partition in self], "cleared": list(self._cleared)}

    def restore(self, state: dict[str, Any], frames: Mapping[str, Sequence[Frame]]) -> None:
        """New ones go on as those were. frames: by partition."""
        self._cleared = set(state["cleared"])
        for one in state["live"]:
            self.create(one["name"], one["rows"], one["group_size"])
            partition = self._live[one["name"]]
            partition.restore(one, frames.get(partition.name, ()))
            self.nbytes += partition.nbytes

    def shift(self, seconds: float) -> None:
        """The caller's clock was put forward by so much."""
        for progress in [progress for partition in self for progress in partition.tasks.values()]:
            progress.shift(seconds)

    def __getitem__(self, name: str) -> Partition:
        """ValueError if there is none of this name, which says whether there was."""
        if name not in self._live:
            why = "was cleared" if name in self._cleared else f"is unknown; there are {list(self._live)}"
            raise ValueError(f"partition {name!r} {why}")
        return self._live[name]
