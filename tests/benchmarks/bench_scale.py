"""What do many engines cost the driver, and many clients the queue?

    python -m tests.benchmarks.bench_scale [--engines 16,128,1024] [--clients 8,64,512] [--seconds 10] [--samples 4096]

Engines: workers in a few processes, each on a socket of its own, whose role answers at once or after a pause, as paced
engines do; the driver's process connects to all of them as to a run's. Printed for each number: seconds until all are
connected; CPU of the driver's thread for one call of one engine, of calls to all at a time, and the time of the slowest
such call; CPU that heartbeats take of a second; and MiB and descriptors of the driver's process for each.

Clients of the queue: connections of a few processes, each of which takes prompts one at a time and writes a response of
512 tokens and its log-probs, as a rollout engine does. Printed: samples per second, and CPU of the queue's process for
each.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from harness.rpc.handshake import new_token
from harness.rpc.sockets import Address, allow_many_files, forget_address, listen, new_address
from harness.runtime.heartbeats import Heartbeats
from harness.runtime.runtime import RoleName, role_name
from harness.runtime.worker_client import RemoteRole, WorkerConnection
from harness.runtime.worker_server import WorkerServer
from harness.transfer_queue.control.spec import QueueSpec, TaskSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.rows.columns import ColumnSpec, Ragged

PROCESSES = 4
LIMIT_S = 300.0
"""Longest wait for anything here."""
TOKENS, GROUP, PROMPT = 512, 8, 64
SPEC = QueueSpec(
    {"prompt": ColumnSpec("int64", ragged=True)}
    | {"response": ColumnSpec("int32", ragged=True), "log_probs": ColumnSpec("float32", ragged=True)},
    {"rollout": TaskSpec(("prompt",), writes=("response", "log_probs"))},
)


class PacedRole:
    """An engine as its driver sees it."""

    version = 0

    async def update(self, version: int) -> int:
        """Take new weights."""
        self.version = version
        return version

    async def generate(self, seconds: float) -> float:
        """Let so long pass."""
        await asyncio.sleep(seconds)
        return seconds

    async def progress(self) -> int:
        """Versions that it has had."""
        return self.version

    async def waiting(self) -> list[str]:
        """What it waits for, a line each."""
        return []


class _Elsewhere:
    """The process of a worker, which another one has."""

    def __init__(self, where: Address) -> None:
        self._where = where

    async def address(self) -> Address:
        return self._where

    async def death(self, within_s: float) -> str | None:
        return None

    def kill(self) -> None: ...


def serve(engines: range, token: bytes, told: Connection) -> None:
    """These workers, until the other end is closed."""

    async def run() -> None:
        listening = [listen(new_address()) for _ in engines]
        servers = [
            WorkerServer(f"worker {index}", one, token) for index, (one, _) in zip(engines, listening, strict=True)
        ]
        roles = [{("rollout", index): PacedRole()} for index in engines]
        serving = [
            asyncio.ensure_future(one.serve(partial(dict[RoleName, Any], made)))
            for one, made in zip(servers, roles, strict=True)
        ]
        told.send([address for _, address in listening])
        with suppress(EOFError):
            await asyncio.to_thread(told.recv)
        for one in servers:
            one.stop()
        await asyncio.gather(*serving)
        for _, address in listening:
            forget_address(address)

    asyncio.run(run())


def consume(endpoint: Endpoint, clients: int, told: Connection) -> None:
    """So many clients, once told to begin; then, how many samples they made."""

    async def run() -> int:
        queues = [RemoteQueue(endpoint) for _ in range(clients)]
        await asyncio.gather(*(queue.waiting() for queue in queues))
        told.send(None)
        await asyncio.to_thread(told.recv)
        made = await asyncio.gather(*map(sample, queues))
        await asyncio.gather(*(queue.disconnect() for queue in queues))
        return sum(made)

    told.send(asyncio.run(run()))


async def sample(queue: RemoteQueue) -> int:
    """Take prompts until none is left."""
    response = Ragged(np.arange(TOKENS, dtype=np.int32), np.array([TOKENS]))
    log_probs = Ragged(np.full(TOKENS, -0.5, np.float32), np.array([TOKENS]))
    made = 0
    while (batch := await queue.get("rollout", 1, partition="train")) is not None:
        await queue.put(batch.partition, batch.rows, {"response": response, "log_probs": log_probs})
        made += 1
    return made


@contextmanager
def processes(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Processes at this work, and this side of the pipe to each."""
    context = multiprocessing.get_context("spawn")
    ours, running = [], []
    for given in arguments:
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(*given, theirs), daemon=True)
        process.start()
        theirs.close()
        ours.append(mine)
        running.append(process)
    try:
        yield ours
    finally:
        for mine in ours:
            mine.close()
        for process in running:
            process.join(LIMIT_S)


def shares(count: int) -> list[range]:
    parts = np.array_split(np.arange(count), min(count, PROCESSES))
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts]


def heard(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise SystemExit(f"nothing came within {LIMIT_S:.0f} s")
    return pipe.recv()


async def of_engines(addresses: list[Address], token: bytes, seconds: float) -> tuple[float, ...]:
    """Seconds to connect; ms of CPU a call; ms of CPU a call where all are called at once, and until the last answers;
    share of a core that heartbeats take while all generate; KiB and descriptors of each."""
    this, count = psutil.Process(), len(addresses)
    memory, descriptors, began = this.memory_info().rss, this.num_fds(), time.monotonic()
    handles = []
    for index, address in enumerate(addresses):
        name = role_name(("rollout", index))
        connection = WorkerConnection(
            f"worker {index}", _Elsewhere(address), token, roles=[name], start_timeout_s=LIMIT_S
        )
        handles.append(RemoteRole(name, PacedRole, connection, LIMIT_S))
    await asyncio.gather(*(handle.connected() for handle in handles))
    connected = time.monotonic() - began
    held = (this.memory_info().rss - memory) / 2**10 / count, (this.num_fds() - descriptors) / count

    busy = time.thread_time()
    for call in range(1000):
        await handles[call % count].role.update(call)
    alone = time.thread_time() - busy

    rounds, slowest = max(1, 4096 // count), 0.0
    busy = time.thread_time()
    for version in range(rounds):
        began = time.monotonic()
        await asyncio.gather(*(handle.role.update(version) for handle in handles))
        slowest = max(slowest, time.monotonic() - began)
    together = (time.thread_time() - busy) / rounds / count * 1000

    busy, began = time.thread_time(), time.monotonic()
    beats = asyncio.ensure_future(Heartbeats(handles, 600.0).watch())
    await asyncio.gather(*(handle.role.generate(seconds) for handle in handles))
    beats.cancel()
    beating = (time.thread_time() - busy) / (time.monotonic() - began)
    return connected, alone, together, slowest * 1000, beating, *held


def engines(counts: list[int], seconds: float) -> None:
    titles = ("connected s", "call CPU ms", "of all CPU ms", "slowest ms", "beats cores", "KiB", "descriptors")
    print(f"{'engines':>8}", *(f"{title:>14}" for title in titles))
    for count in counts:
        token = new_token()
        with processes(serve, [(part, token) for part in shares(count)]) as pipes:
            addresses = [address for pipe in pipes for address in heard(pipe)]
            found = asyncio.run(of_engines(addresses, token, seconds))
        print(f"{count:>8}", *(f"{value:>14.3f}" for value in found), flush=True)


def clients(counts: list[int], samples: int) -> None:
    print(f"{'clients':>8} {'samples/s':>14} {'queue CPU ms':>14} {'MiB':>14}")
    for count in counts:
        with QueueProcess.start(SPEC, call_timeout_s=LIMIT_S) as queue:
            asyncio.run(_fill(queue.queue, samples))
            this = psutil.Process(queue.process.pid)
            with processes(consume, [(queue.queue.endpoint, len(part)) for part in shares(count)]) as pipes:
                for pipe in pipes:
                    heard(pipe)
                before, began = this.cpu_times(), time.monotonic()
                for pipe in pipes:
                    pipe.send(None)
                made = sum(heard(pipe) for pipe in pipes)
                took, after = time.monotonic() - began, this.cpu_times()
                memory = this.memory_info().rss / 2**20
            assert made == samples, f"{made} of {samples} samples were made"
            cpu = after.user + after.system - before.user - before.system
        print(f"{count:>8} {made / took:>14.0f} {cpu / made * 1000:>14.3f} {memory:>14.0f}")


async def _fill(queue: RemoteQueue, samples: int) -> None:
    await queue.create_partition("train", range(samples), GROUP)
    prompts = Ragged(np.zeros(samples * PROMPT, np.int64), np.full(samples, PROMPT))
    await queue.put("train", range(samples), {"prompt": prompts})
    await queue.disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="16,128,1024")
    parser.add_argument("--clients", default="8,64,512")
    parser.add_argument("--seconds", type=float, default=10.0, help="of generating, while heartbeats ask")
    parser.add_argument("--samples", type=int, default=8192, help="that clients of the queue make")
    given = parser.parse_args()
    allow_many_files()
    engines([int(count) for count in given.engines.split(",") if count], given.seconds)
    clients([int(count) for count in given.clients.split(",") if count], given.samples)


if __name__ == "__main__":
    main()
