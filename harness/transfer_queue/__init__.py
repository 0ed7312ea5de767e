"""The data plane: rows are samples, columns are what tasks write and read. Here is what all of its users share, which
needs numpy alone; queues are made by `local` and `remote.process`."""

from harness.transfer_queue.control.controller import QueueClosed
from harness.transfer_queue.control.leases import LeaseExpired
from harness.transfer_queue.control.spec import GetRequest, QueueSpec, TaskSpec, with_get_options
from harness.transfer_queue.queue import TransferQueue
from harness.transfer_queue.rows.columns import Batch, Column, ColumnSpec, Ragged, concatenated, taken

__all__ = [
    "Batch",
    "Column",
    "ColumnSpec",
    "GetRequest",
    "LeaseExpired",
    "QueueClosed",
    "QueueSpec",
    "Ragged",
    "TaskSpec",
    "TransferQueue",
    "concatenated",
    "taken",
    "with_get_options",
]
