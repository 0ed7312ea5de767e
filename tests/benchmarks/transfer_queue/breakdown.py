"""Where the time of one put and one get of a micro-batch goes, `shm` backend: the pieces one by one, and what is left.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.transfer_queue.breakdown

The pieces run in this process; the whole call goes to a queue in another one. What no piece explains is event loop,
descriptors on their way, and processes waking each other.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from harness.transfer_queue import GetRequest
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.requests import read_put
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.columns import Column, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment, Frame
from harness.transfer_queue.service.service import QueueService
from harness.transfer_queue.storage.protocol import QueueSession
from harness.transfer_queue.storage.shm import ShmBackend, ShmStorage, ShmStore
from tests.benchmarks.transfer_queue.cadence import CadenceSide, spec_of
from tests.benchmarks.transfer_queue.cases import MICRO_BATCH
from tests.benchmarks.transfer_queue.limits import round_trip_s, unix_pair
from tests.benchmarks.transfer_queue.workload import READING, make_samples

CALLS = 200
FLOW, TASK, WRITER = "reading", "read_0", 1
WHOLE = "the whole call"
T = TypeVar("T")
Parts = dict[str, dict[str, float]]
"""By call: microseconds of each piece, of the whole, and of the rest."""


class Stopwatch:
    """Seconds of each piece of a call, by call; a piece may come in several parts."""

    def __init__(self) -> None:
        self._calls: dict[str, list[dict[str, float]]] = {"put": [], "get": []}

    def begin(self, call: str) -> Callable[..., Any]:
        """A new call of this kind. What comes back is called as (piece, function, *arguments), and times it."""
        pieces: dict[str, float] = {}
        self._calls[call].append(pieces)

        def timed(piece: str, work: Callable[..., T], *arguments: Any) -> T:
            began = time.perf_counter()
            answer = work(*arguments)
            pieces[piece] = pieces.get(piece, 0.0) + time.perf_counter() - began
            return answer

        return timed

    def median_us(self, call: str) -> dict[str, float]:
        calls = self._calls[call]
        return {piece: 1e6 * statistics.median(pieces[piece] for pieces in calls) for piece in calls[0]}


def batches() -> list[tuple[np.ndarray, dict[str, Column]]]:
    """CALLS puts: rows, and columns as `put` takes them."""
    samples = make_samples(CALLS * MICRO_BATCH, seed=0)
    cuts = [slice(start, start + MICRO_BATCH) for start in range(0, len(samples), MICRO_BATCH)]
    return [
        (
            samples.dense["sample"][cut],
            {name: Ragged.from_rows(rows[cut]) for name, rows in samples.ragged.items()}
            | {name: column[cut] for name, column in samples.dense.items()},
        )
        for cut in cuts
    ]


async def pieces(watch: Stopwatch) -> None:
    """Everything that a put and a get consist of, but the way there and back."""
    spec, backend = spec_of(READING), ShmBackend()
    store = backend.store("breakdown")
    storage, service = backend.storage(QueueSession("breakdown", WRITER)), QueueService(spec, store)
    todo = batches()
    await service.create_partition("p", range(len(todo) * MICRO_BATCH))

    def decide_put(message: m.Put) -> None:
        rows, frame, weights = read_put(message, spec)
        store.check(WRITER, "p", frame)
        assert service.try_put("p", rows, frame, weights)

    for rows, columns in todo:
        timed = watch.begin("put")
        timed("check the columns", spec.check_columns, rows.size, columns)
        frame = timed("payload into memory", storage.write, "p", columns)
        if (segment := storage.unannounced("p")) is not None:
            store.open(WRITER, "p", segment.unit, segment.descriptor)
        asked = timed("messages", _put_message, rows, frame)
        message = timed("messages", _over, m.decode_request, asked)
        timed("messages", _over, m.decode_answer, m.Done())
        timed("control plane", decide_put, message)
    for _ in todo:
        _get(watch, store, storage, service)
    storage.close()
    store.close()


def _get(watch: Stopwatch, store: ShmStore, storage: ShmStorage, service: QueueService) -> None:
    timed = watch.begin("get")
    asked = m.Get(GetRequest(TASK, MICRO_BATCH, partition="p"), True)
    request = timed("messages", _over, m.decode_request, asked)
    assignment = timed("control plane", service.try_get, request.request)
    assert isinstance(assignment, BatchAssignment), assignment
    frames, descriptors = timed("control plane", store.placed, assignment)
    received = timed("messages", _over, m.decode_answer, timed("messages", m.assigned, assignment, frames, True))
    held = [os.dup(descriptor) for descriptor in descriptors]
    found = timed("messages", m.to_assignment, received, held)
    columns = timed("payload out of memory", storage.read, found, service.spec.columns)
    for descriptor in held:
        os.close(descriptor)
    assert columns["sample"].tolist() == assignment.rows.tolist()


def _put_message(rows: np.ndarray, frame: Frame) -> m.Put:
    return m.Put("p", rows.tobytes(), m.from_frame(frame), {}, None)


def _over(decode: Callable[[bytes], T], message: m.Message) -> T:
    """To the other side."""
    return decode(m.encode(message))


def whole_calls(watch: Stopwatch) -> None:
    """From the call to its answer, to a queue in another process."""
    cadence, todo = CadenceSide("shm"), batches()
    address = cadence.start({FLOW: READING})
    queue = SyncQueue(address[FLOW])
    try:
        queue.create_partition("p", np.arange(len(todo) * MICRO_BATCH))
        for rows, columns in todo:
            watch.begin("put")(WHOLE, queue.put, "p", rows, columns)
        for _ in todo:
            watch.begin("get")(WHOLE, _whole_get, queue)
    finally:
        queue.disconnect()
        cadence.stop()


def _whole_get(queue: SyncQueue) -> None:
    assert queue.get(TASK, MICRO_BATCH, partition="p") is not None


def measure() -> Parts:
    watch, whole = Stopwatch(), Stopwatch()
    asyncio.run(pieces(watch))
    whole_calls(whole)
    trip = 1e6 * round_trip_s(unix_pair)
    parts: Parts = {}
    for call in ("put", "get"):
        found = watch.median_us(call)
        found["round trip of a socket"] = trip
        total = whole.median_us(call)[WHOLE]
        parts[call] = found | {"the rest": total - sum(found.values()), WHOLE: total}
    return parts


def print_parts(parts: Mapping[str, Mapping[str, float]]) -> None:
    for call, pieces in parts.items():
        print(f"\nWhere the time of one {call} of {MICRO_BATCH} samples goes (shm, nothing else going on), us:")
        for piece, microseconds in pieces.items():
            print(f"  {piece:<75} {microseconds:>12,.1f}")


if __name__ == "__main__":
    print_parts(measure())
