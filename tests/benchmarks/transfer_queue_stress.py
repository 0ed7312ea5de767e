"""16 producers and 64 consumers on one queue in shared memory, while processes are killed: is each row done once?

    python -m tests.benchmarks.transfer_queue_stress --seconds 60

Four tasks chained as in GRPO, all with leases; producers are handed what to sample in the same way. Again and again a
process with its readers is killed with SIGKILL and replaced. At the end each row was acknowledged once for each task,
and the server's memory, descriptors and shared memory are what they were. Then the server itself is killed, with rows
in it and with readers that wait. Exit code 1, and what is wrong, where something is.
"""

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, field

import numpy as np

from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from tests.benchmarks.transfer_queue_stress_traces import Footprint, footprint, memory_holders, orphans, shm_files
from tests.benchmarks.transfer_queue_stress_workers import GROUP, PLACES, ROWS, SPEC, TASKS, Ledger, Workers, made_of

FINISH_S = 120.0
ALLOWED_RSS = 16 << 20
"""Bytes that the server may have grown by: payload is never in its own memory, and the ledger of all rows and leases
of a partition go with it; what remains is the interpreter's free lists after 50 connections and thousands of messages,
and a few bytes for each partition's name and each lease that was lost."""


@dataclass
class Outcome:
    rows: int = 0
    seconds: float = 0.0
    kills: int = 0
    most: Footprint = Footprint(0, 0, 0)
    faults: list[str] = field(default_factory=list)


class Stress:
    """One run. name: is in the names of all partitions, and so of all memory that holds them."""

    def __init__(self, process: QueueProcess, seed: int) -> None:
        self.name = f"stress-{secrets.token_hex(4)}"
        self.pid = process.process.pid
        self.ledger, self.outcome = Ledger(), Outcome()
        self._process = process
        self._queue = process.sync()
        self._random = random.Random(seed)
        self._partitions = 0

    def run(self, seconds: float, kill_every_s: float) -> Outcome:
        self._queue.describe()
        workers = Workers(self._queue.endpoint, self.ledger)
        self._create()
        self._finish(workers)
        await_waiting(self._queue, workers)  # all are connected
        before = footprint(self.pid)
        began = time.monotonic()
        self._disturb(workers, began + seconds, kill_every_s)
        self._finish(workers)
        self.outcome.seconds = time.monotonic() - began
        await_waiting(self._queue, workers)
        self._compare(before)
        self._queue.close()
        workers.join()
        self.outcome.rows = self._partitions * ROWS
        self.outcome.faults += self.ledger.failed + self.ledger.faults(self.outcome.rows)
        self.outcome.faults += memory_holders(self.name)
        self._queue.disconnect()
        return self.outcome

    def _disturb(self, workers: Workers, until: float, every_s: float) -> None:
        due = time.monotonic() + every_s
        while time.monotonic() < until:
            self._create()
            workers.listen(0.02)
            now = footprint(self.pid)
            self.outcome.most = max(self.outcome.most, now, key=lambda seen: seen.rss + seen.shared)
            if time.monotonic() >= due:
                # of five, one is a producer's process
                place = self._random.choice(range(4) if self.outcome.kills % 5 == 1 else range(4, len(PLACES)))
                workers.kill(place)
                self.outcome.kills += 1
                due = time.monotonic() + self._random.uniform(0.5, 1.5) * every_s

    def _create(self) -> None:
        """Another partition, if there is room: what all tasks are done with makes some."""
        name, rows = f"{self.name}.{self._partitions}", np.arange(ROWS) + ROWS * self._partitions
        try:
            self._queue.create_partition(name, rows, GROUP, timeout_s=0)
        except TimeoutError:
            return
        self._partitions += 1
        self._queue.put(name, rows, {"prompt": rows})

    def _finish(self, workers: Workers) -> None:
        """Until all that there is was done and cleared."""
        until = time.monotonic() + FINISH_S
        while self._queue.describe()["partitions"]:
            workers.listen(0.02)
            self._queue.clear_finished()
            if time.monotonic() > until:
                waiting = "\n".join(self._queue.waiting()[:9])
                raise TimeoutError(
                    f"rows were left after {FINISH_S:.0f} s; {self.ledger.failed[:3]}; waiting:\n{waiting}"
                )

    def _compare(self, before: Footprint) -> None:
        """As many clients are connected, and nothing is stored."""
        after = footprint(self.pid)
        print(f"the server before: {before}\n         most: {self.outcome.most}\n        after: {after}")
        if after.rss > before.rss + ALLOWED_RSS:
            self.outcome.faults.append(f"the server's own memory grew: {before} -> {after}")
        if after.shared:
            self.outcome.faults.append(f"the server holds shared memory after all was cleared: {after}")
        if after.descriptors > before.descriptors:
            self.outcome.faults.append(f"the server holds more descriptors: {before} -> {after}")


def kill_the_server(process: QueueProcess, name: str) -> list[str]:
    """With rows in it that a client wrote, and with a workers that waits: what is left then."""
    ledger, queue = Ledger(), process.sync()
    workers = Workers(queue.endpoint, ledger)
    rows = np.arange(ROWS)
    queue.create_partition(f"{name}.last", rows, GROUP)
    queue.put(f"{name}.last", rows, made_of("rollout", rows))  # no prompts: producers wait, and half of the consumers
    await_waiting(queue, workers)
    process.process.kill()
    workers.join()
    faults = [] if memory_holders(f"{name}.last") else ["this client let go of what it wrote before it knew"]
    faults += _still_answers(queue)
    readers = sum(map(len, PLACES))
    lost = [why for why in ledger.failed if why.startswith("ConnectionError('the connection to the transfer queue")]
    if len(lost) != readers or len(ledger.failed) != readers:
        faults.append(f"of {readers} readers {len(lost)} were told that the server was lost: {ledger.failed[:9]}")
    return faults + memory_holders(name)


def await_waiting(queue: SyncQueue, workers: Workers) -> None:
    """Until every reader is connected and has nothing to do."""
    until = time.monotonic() + FINISH_S
    while queue.describe()["waiting_gets"] != {task: sum(tasks.count(task) for tasks in PLACES) for task in TASKS}:
        workers.listen(0.02)
        if time.monotonic() > until:
            raise TimeoutError(f"not every reader waits after {FINISH_S:.0f} s: {queue.describe()['waiting_gets']}")


def _still_answers(queue: SyncQueue) -> list[str]:
    try:
        return [f"a dead server answered {queue.describe()}"]
    except ConnectionError:
        return []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=1.0, metavar="SECONDS", help="on average")
    parser.add_argument("--seed", type=int, default=0)
    described = parser.parse_args(arguments)
    before = shm_files()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        with QueueProcess.start(SPEC) as process:
            stress = Stress(process, described.seed)
            outcome = stress.run(described.seconds, described.kill_every)
        with QueueProcess.start(SPEC) as process:
            outcome.faults += kill_the_server(process, stress.name)
        outcome.faults += [f"{file} was left in the temporary folder" for file in os.listdir(folder)]
    outcome.faults += [f"{file} was left behind" for file in orphans(shm_files() - before)]
    print(
        f"{outcome.rows} rows through {len(TASKS)} tasks in {outcome.seconds:.1f} s "
        f"({outcome.rows / outcome.seconds:.0f} rows/s), {outcome.kills} processes killed, "
        f"{len(stress.ledger.rows) - len(stress.ledger.done) - len(stress.ledger.late)} of them between work and word, "
        f"{len(stress.ledger.late)} leases run out"
    )
    print("\n".join(outcome.faults) or "every row once for each task; nothing left behind")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
