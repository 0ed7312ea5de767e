"""The processes that write and read. They live as long as the queue, so that connecting is in no figure."""

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.benchmarks.transfer_queue.contract import Client, Taken, contestant
from tests.benchmarks.transfer_queue.workload import FLOWS, WRITTEN, make_samples, token_value

DEADLINE_S = 180.0


@dataclass(frozen=True)
class Done:
    """began, ended: seconds of the machine's monotonic clock; calls_s: of each put or get; delays_s: from the start of
    each sample's put to having it in hand."""

    cpu_s: float
    began: float
    ended: float
    calls_s: list[float] = field(repr=False)
    delays_s: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Produce:
    """Puts `samples` samples, `group` at a time; rate: samples/s, or as fast as it goes."""

    flow: str
    partition: str
    samples: int
    group: int
    rate: float | None = None

    def prepare(self, client: Client) -> Any:
        samples = make_samples(self.samples, seed=0)
        return samples.dense, {name: client.native(rows) for name, rows in samples.ragged.items()}

    def run(self, client: Client, prepared: Any) -> Done:
        dense, ragged = prepared
        began, cpu, calls = time.monotonic(), time.process_time(), []
        for start in range(0, self.samples, self.group):
            if self.rate is not None:
                time.sleep(max(0.0, began + start / self.rate - time.monotonic()))
            part = slice(start, min(start + self.group, self.samples))
            now = time.monotonic()
            dense["stamp"][part] = now
            client.put(
                self.partition,
                dense["sample"][part],
                {name: rows[part] for name, rows in ragged.items()},
                {name: column[part] for name, column in dense.items()},
            )
            calls.append(time.monotonic() - now)
        return Done(time.process_time() - cpu, began, time.monotonic(), calls)


@dataclass(frozen=True)
class Consume:
    """Takes `samples` samples for one task, `count` at a time, and writes the task's column, if it has one."""

    flow: str
    partition: str
    samples: int
    count: int
    task: str

    def prepare(self, client: Client) -> Any:
        return FLOWS[self.flow][self.task], WRITTEN.get(self.task)

    def run(self, client: Client, prepared: Any) -> Done:
        columns, written = prepared
        began, cpu, calls, delays = time.monotonic(), time.process_time(), [], []
        seen: list[np.ndarray] = []
        while sum(ids.size for ids in seen) < self.samples:
            asked = time.monotonic()
            taken = client.get(self.partition, self.task, columns, self.count)
            now = time.monotonic()
            calls.append(now - asked)
            delays.extend((now - taken.dense["stamp"]).tolist())
            check(taken)
            seen.append(taken.dense["sample"].copy())
            if written is not None:
                _, offsets = taken.ragged["loss_mask"]
                client.put_back(taken, written, np.zeros(int(offsets[-1]), np.float32), offsets)
        done = Done(time.process_time() - cpu, began, time.monotonic(), calls, delays)
        if not np.array_equal(np.sort(np.concatenate(seen)), np.arange(self.samples)):
            raise AssertionError(f"task {self.task!r} did not get each of {self.samples} samples exactly once")
        return done


Job = Produce | Consume


def check(taken: Taken) -> None:
    """Every token of every sample is what it should be, so that every byte was read: also of what is only mapped."""
    ids = taken.dense["sample"]
    for name, (values, offsets) in taken.ragged.items():
        starts, value = offsets[:-1], token_value(name, ids)
        sums = np.add.reduceat(values, starts, dtype=np.float64)
        if (sums != value * np.diff(offsets)).any() or (values[starts] != value).any():
            raise AssertionError(f"column {name!r} of samples {ids.tolist()} is not what was put")


class Workers:
    """`size` processes that do jobs side by side; one that fails ends the run with its traceback."""

    def __init__(self, name: str, address: Any, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._members = []
        for number in range(size):
            mine, other_end = context.Pipe()
            process = context.Process(
                target=_work, args=(other_end, name, address), name=f"worker {number}", daemon=True
            )
            process.start()
            other_end.close()
            self._members.append((process, mine))

    def do(self, jobs: Sequence[Job]) -> list[Done]:
        """One job each, begun together."""
        hands = self._members[: len(jobs)]
        for (_, pipe), job in zip(hands, jobs, strict=True):
            pipe.send(job)
        for (process, pipe), job in zip(hands, jobs, strict=True):
            _receive(pipe, f"{process.name} to prepare {job}")
        for _, pipe in hands:
            pipe.send("go")
        return [_receive(pipe, f"{p.name} to end {job}") for (p, pipe), job in zip(hands, jobs, strict=True)]

    def close(self) -> None:
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection, what: str) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
    answer = pipe.recv()
    if isinstance(answer, str) and answer != "ready":
        raise RuntimeError(f"while waiting for {what}:\n{answer}")
    return answer


def _work(pipe: Connection, name: str, address: Any) -> None:
    """Do jobs until the other end is closed."""
    side, clients = contestant(name), dict[str, Client]()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        try:
            if job.flow not in clients:
                clients[job.flow] = side.connect(address, job.flow)
            prepared = job.prepare(clients[job.flow])
            pipe.send("ready")
            pipe.recv()
            pipe.send(job.run(clients[job.flow], prepared))
        except Exception:
            pipe.send(traceback.format_exc())
    for client in clients.values():
        client.close()
