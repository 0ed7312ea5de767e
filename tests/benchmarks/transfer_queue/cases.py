"""The cases: which jobs run side by side, and the figures that come of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from tests.benchmarks.transfer_queue.contract import Client, Contestant
from tests.benchmarks.transfer_queue.machine import cpu_s
from tests.benchmarks.transfer_queue.workers import Consume, Done, Job, Produce, Workers
from tests.benchmarks.transfer_queue.workload import READING, TRAINING

WORKERS = 5  # a producer and four tasks
GROUP, MICRO_BATCH = 8, 16
STORED_ROWS = (512, 4096, 16384, 100_000)
STORED_AT_ONCE, STORED_CALLS = 512, 32
RATE = 40.0  # samples/s of the paced cases: far less than either side can do
Figures = dict[str, list[float]]
"""By name; of delays and of calls with many rows stored all, of everything else one for each repetition."""


@dataclass(frozen=True)
class Size:
    """samples: in a partition of the cases that go as fast as they can; paced: of those at RATE. Cases are repeated
    until they took `least_s`."""

    samples: int
    paced: int
    least_s: float


FULL, QUICK = Size(1024, 240, 1.0), Size(256, 80, 0.2)


class Bench:
    """One contestant's queues and workers, and what is measured on them."""

    def __init__(self, side: Contestant, workers: Workers, clients: Mapping[str, Client], size: Size) -> None:
        self._side, self._workers, self._clients, self._size = side, workers, clients, size
        self._names = count()

    def warm(self) -> None:
        """Both queues, all connections."""
        self._stream(4 * MICRO_BATCH)
        self._get(4 * MICRO_BATCH, MICRO_BATCH, 4)

    def run(self, case: str) -> Figures:
        kind, *numbers = case.split()
        measure: Callable[..., Figures] = getattr(self, f"measure_{kind}")
        return measure(*(int(number) for number in numbers))

    # -- as fast as it goes

    def measure_put(self, group: int) -> Figures:
        """samples/s of one producer."""
        return self._repeat(lambda: self._put(self._size.samples, group))

    def _put(self, samples: int, group: int) -> Figures:
        partition = self._create("reading", samples)
        (done,) = self._workers.do([Produce("reading", partition, samples, group)])
        self._clients["reading"].clear(partition)
        return {"samples_per_s": [samples / (done.ended - done.began)], "call_ms": [_median_ms(done)]}

    def measure_get(self, count: int, consumers: int) -> Figures:
        """samples/s of all consumers, one for each task, on a partition that is full."""
        return self._repeat(lambda: self._get(self._size.samples, count, consumers))

    def _get(self, samples: int, count: int, consumers: int) -> Figures:
        partition = self._create("reading", samples)
        self._workers.do([Produce("reading", partition, samples, 128)])
        done = self._workers.do([Consume("reading", partition, samples, count, t) for t in list(READING)[:consumers]])
        began = time.monotonic()
        self._clients["reading"].clear(partition)
        cleared = time.monotonic() - began
        return {
            "samples_per_s": [consumers * samples / _span(done)],
            "call_ms": [statistics.median(map(_median_ms, done))],
            "clear_ms": [1e3 * cleared],
        }

    def measure_stream(self) -> Figures:
        """The whole of GRPO: samples/s from the first put to the last sample in actor_train's hands."""
        return self._repeat(lambda: self._stream(self._size.samples))

    def _stream(self, samples: int) -> Figures:
        before = cpu_s(self._side.services())
        done = self._train(samples, MICRO_BATCH, None)
        served = cpu_s(self._side.services()) - before
        return {
            "samples_per_s": [samples / _span(done)],
            "client_cpu_ms": [1e3 * sum(d.cpu_s for d in done) / samples],
            "service_cpu_ms": [1e3 * served / samples],
        }

    def _train(self, samples: int, count: int, rate: float | None) -> list[Done]:
        partition = self._create("training", samples)
        jobs: list[Job] = [Consume("training", partition, samples, count, task) for task in TRAINING]
        done = self._workers.do([*jobs, Produce("training", partition, samples, GROUP, rate)])
        self._clients["training"].clear(partition)
        return done

    # -- with many rows stored

    def measure_stored(self, rows: int) -> Figures:
        """One get of a micro-batch of one number a row, while so many rows are stored."""
        client, partition = self._clients["stored"], self._create("stored", rows)
        for start in range(0, rows, STORED_AT_ONCE):
            ids = np.arange(start, min(start + STORED_AT_ONCE, rows))
            client.put(partition, ids, {}, {"reward": ids.astype(np.float32)})
        calls, seen = [], set[float]()
        for _ in range(STORED_CALLS):
            asked = time.monotonic()
            taken = client.get(partition, "read_number", ["reward"], MICRO_BATCH)
            calls.append(1e3 * (time.monotonic() - asked))
            seen.update(taken.dense["reward"].tolist())
        if len(seen) != STORED_CALLS * MICRO_BATCH or not seen <= set(range(rows)):  # in any order: the peer has none
            raise AssertionError(f"of {STORED_CALLS * MICRO_BATCH} rows {len(seen)} different ones came")
        client.clear(partition)
        return {"call_ms": calls}

    # -- at RATE

    def measure_delay(self) -> Figures:
        """put -> in the hands of one consumer, without any other task."""
        partition = self._create("reading", self._size.paced)
        consume, _ = self._workers.do(
            [
                Consume("reading", partition, self._size.paced, GROUP, "read_0"),
                Produce("reading", partition, self._size.paced, GROUP, RATE),
            ]
        )
        self._clients["reading"].clear(partition)
        return {"delay_ms": [1e3 * delay for delay in consume.delays_s]}

    def measure_chain(self) -> Figures:
        """put -> in actor_train's hands, after the three tasks before it."""
        done = self._train(self._size.paced, GROUP, RATE)
        trained = done[list(TRAINING).index("actor_train")]
        return {"delay_ms": [1e3 * delay for delay in trained.delays_s]}

    # -- what they share

    def _create(self, flow: str, samples: int) -> str:
        partition = f"{flow}_{next(self._names)}"
        self._clients[flow].create(partition, samples)
        return partition

    def _repeat(self, once: Callable[[], Figures]) -> Figures:
        found: dict[str, list[Any]] = {}
        began = time.monotonic()
        while not found or time.monotonic() - began < self._size.least_s:
            for name, values in once().items():
                found.setdefault(name, []).extend(values)
        return found


CASES = (
    *(f"put {group}" for group in (8, 16, 64, 128)),
    *(f"get {count} {consumers}" for consumers in (1, 4) for count in (16, 64)),
    "stream",
    *(f"stored {rows}" for rows in STORED_ROWS),
    "delay",
    "chain",
)


def _span(done: list[Done]) -> float:
    return max(d.ended for d in done) - min(d.began for d in done)


def _median_ms(done: Done) -> float:
    return 1e3 * statistics.median(done.calls_s)
