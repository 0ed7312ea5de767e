"""A schedule in which roles that share one pool all stream: their devices decide who works."""

from dataclasses import dataclass

from schedules.colocate_sync import ColocateSync
from schedules.fully_async import FullyAsync


@dataclass(frozen=True)
class ColocatedStream(FullyAsync):
    """`fully_async` on one pool: an engine generates until its dispatch limit or a pause stops it, then others work."""

    transport = ColocateSync.transport
    colocated = True
