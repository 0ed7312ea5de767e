"""What a request asks of the control plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.transfer_queue.columns import Rows
from harness.transfer_queue.frames import Frame
from harness.transfer_queue.journal import service as journal
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.service import QueueService
from harness.transfer_queue.spec import QueueSpec

VERBS: dict[type[m.Message], Callable[[QueueService, Any], Any]] = {
    m.SetBound: lambda service, asked: service.set_bound(asked.task, asked.consumer, asked.below),
    m.Drop: lambda service, asked: service.drop(asked.task, asked.started, asked.below),
    m.Acknowledge: lambda service, asked: service.acknowledge(asked.lease),
    m.GiveBack: lambda service, asked: service.give_back(asked.lease),
    m.Release: lambda service, asked: service.release(asked.consumer),
    m.Clear: lambda service, asked: service.clear(asked.partition),
    m.ClearFinished: lambda service, asked: service.clear_finished(),
    m.Waiting: lambda service, asked: service.waiting_now(),
    m.Close: lambda service, asked: service.close(),
    m.Describe: lambda service, asked: service.describe(),
}
"""Those that never wait: the answer's value."""


async def create(service: QueueService, asked: m.CreatePartition) -> None:
    await service.create_partition(asked.name, m.to_rows(asked.rows), asked.group_size, timeout_s=asked.timeout_s)


async def save(service: QueueService, asked: m.Save) -> None:
    """ValueError without a folder where the queue journals in none."""
    if asked.folder is not None:
        await journal.save(service, asked.folder)
    elif isinstance(service, journal.JournaledService):
        await service.save()
    else:
        raise ValueError("the queue journals in no folder: name one to save it in")


def read_put(asked: m.Put, spec: QueueSpec) -> tuple[Rows, Frame, dict[str, Rows]]:
    """ValueError where rows, weights and frame do not fit together, or the schema."""
    rows, frame = m.to_rows(asked.rows), m.to_frame(asked.frame)
    if frame.rows != rows.size:
        raise ValueError(f"a frame of {frame.rows} rows came for {rows.size} row ids")
    frame.check(spec.columns)
    weights = {name: m.to_rows(data) for name, data in asked.weights.items()}
    for name, lengths in weights.items():
        if lengths.size != rows.size:
            raise ValueError(f"column {name!r} has {lengths.size} lengths for {rows.size} row ids")
    return rows, frame, weights
