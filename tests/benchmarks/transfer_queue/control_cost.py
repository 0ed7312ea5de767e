"""What one request costs the control plane, with few and with many rows stored: in this process, without payloads."""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from harness.transfer_queue.control.spec import GetRequest, QueueSpec, TaskSpec
from harness.transfer_queue.rows.columns import ColumnSpec
from harness.transfer_queue.rows.frames import BatchAssignment, Frame
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.storage.inline import LocalStorage
from tests.benchmarks.transfer_queue.cases import MICRO_BATCH, STORED_AT_ONCE, STORED_ROWS

ROUNDS, CALLS = 15, 32  # so many calls read all of the smallest partition
SPEC = QueueSpec(
    columns={"reward": ColumnSpec("float32"), "score": ColumnSpec("float32")},
    tasks={"score": TaskSpec(("reward",)), "train": TaskSpec(("reward", "score"))},
)
T = TypeVar("T")


async def once(rows: int) -> dict[str, float]:
    """Microseconds of a get and of a put of a micro-batch, medians over CALLS."""
    service, storage = QueueService(SPEC, LocalStorage()), LocalStorage()
    await service.create_partition("p", range(rows))
    for start in range(0, rows, STORED_AT_ONCE):
        ids = np.arange(start, min(start + STORED_AT_ONCE, rows))
        service.put("p", ids, storage.write("p", {"reward": ids.astype(np.float32)}), {})
    took: dict[str, list[float]] = {"get": [], "put": []}
    for _ in range(CALLS):
        batch = _timed(took["get"], _get, service, "score")
        frame = storage.write("p", {"score": np.zeros(MICRO_BATCH, np.float32)})
        _timed(took["put"], _put, service, batch, frame)
        _timed(took["get"], _get, service, "train")
    return {verb: 1e6 * statistics.median(seconds) for verb, seconds in took.items()}


def _get(service: QueueService, task: str) -> BatchAssignment:
    assignment = service.try_get(GetRequest(task, MICRO_BATCH, partition="p"))
    assert isinstance(assignment, BatchAssignment), assignment
    return assignment


def _put(service: QueueService, batch: BatchAssignment, frame: Frame) -> None:
    service.put("p", batch.rows, frame, {})


def _timed(took: list[float], call: Callable[..., T], *arguments: Any) -> T:
    began = time.perf_counter()
    answer = call(*arguments)
    took.append(time.perf_counter() - began)
    return answer


def measure(rounds: int = ROUNDS) -> dict[str, dict[int, list[float]]]:
    """Microseconds of each round, by verb and rows stored. Every round measures all sizes in turn."""
    found: dict[str, dict[int, list[float]]] = {verb: {rows: [] for rows in STORED_ROWS} for verb in ("get", "put")}
    asyncio.run(once(STORED_ROWS[0]))  # warm
    for _ in range(rounds):
        for rows in STORED_ROWS:
            for verb, microseconds in asyncio.run(once(rows)).items():
                found[verb][rows].append(microseconds)
    return found
