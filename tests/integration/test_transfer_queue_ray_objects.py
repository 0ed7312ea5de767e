"""The queue in a Ray actor with its storage units in others, written and read by yet others: what Ray can make go
wrong. What a queue behind a socket does is held in tests/harness/transfer_queue."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import ray

from harness.transfer_queue import ColumnSpec, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.ray_host import QueueActor
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.storage.protocol import QueueSession
from harness.transfer_queue.storage.ray_objects import RayBackend
from tests.support.queue_machine import TASKS, UNTIMED, run_machine
from tests.support.queue_sides import SocketSide
from tests.support.ray_leftovers import IGNORED

pytestmark = [pytest.mark.slow, *IGNORED]

SPEC = QueueSpec(
    columns={"tokens": ColumnSpec("int64", ragged=True), "reward": ColumnSpec("float32")},
    tasks={
        "score": TaskSpec(("tokens",), policy="ready"),
        "train": TaskSpec(("tokens", "reward"), whole_groups=True, lease_s=60),
    },
    capacity_rows=1024,
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture
def units() -> Iterator[RayBackend]:
    """Two, in one of which every frame is."""
    backend = RayBackend.start(2, inline_bytes=0)
    yield backend
    backend.stop()


@pytest.fixture
def host(units: RayBackend) -> Iterator[QueueActor]:
    with QueueActor.start(SPEC, units) as host:
        yield host


@pytest.fixture
def queue(host: QueueActor) -> RemoteQueue:
    return host.queue


def tokens(rows: Any) -> Ragged:
    return Ragged.from_rows([np.full(int(row) % 5 + 1, row, np.int64) for row in rows])


async def until(queue: RemoteQueue, seen: Callable[[Mapping[str, Any]], bool]) -> None:
    """The queue is asked until it is so: what runs in another process cannot be stepped."""
    async with asyncio.timeout(60):
        while not seen(await queue.describe()):
            pass


def nbytes(backend: RayBackend) -> int:
    """In the storage units."""
    return sum(ray.get([unit.nbytes.remote() for unit in backend.units]))


def end(backend: RayBackend) -> None:
    """And see them dead: until Ray has ended them, they still answer."""
    backend.stop()
    for unit in backend.units:
        with pytest.raises(ray.exceptions.RayActorError):
            while True:
                ray.get(unit.nbytes.remote())


@ray.remote(num_cpus=0)
def write_and_die(queue: RemoteQueue) -> None:
    with queue.portal() as run:
        run(queue.put("train_0", range(8), {"tokens": Ragged(np.arange(80_000), np.full(8, 10_000))}))
    os._exit(1)


async def test_frames_stay_when_their_writer_dies_until_the_partition_is_cleared() -> None:
    backend = RayBackend.start()
    with QueueActor.start(SPEC, backend) as host:
        queue = host.queue
        await queue.create_partition("train_0", range(8))
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            await write_and_die.options(max_retries=0).remote(queue)
        assert nbytes(backend) == 8 * 80_000 + 8 * 8, "too large to travel in a message"
        batch = await queue.get("score", 8, timeout_s=60)
        assert batch is not None and batch.ragged("tokens").values.tolist() == list(range(80_000))
        batch.ragged("tokens").values[:] = 0
        await queue.clear("train_0")
        while nbytes(backend):  # the store's thread has told the unit, or is about to
            pass
    backend.stop()


async def test_what_the_queue_refuses_is_gone_from_its_unit(queue: RemoteQueue, units: RayBackend) -> None:
    await queue.create_partition("train_0", range(4))
    with pytest.raises(ValueError, match="partition 'train_1'"):
        await queue.put("train_1", range(4), {"tokens": tokens(range(4))})
    assert nbytes(units) == 0


async def test_a_dead_unit_fails_puts_and_gets_by_its_name_and_the_queue_goes_on() -> None:
    backend = RayBackend.start(inline_bytes=64)
    with QueueActor.start(SPEC, backend) as host:
        queue = host.queue
        await queue.create_partition("train_0", range(8))
        await queue.put("train_0", range(4), {"tokens": tokens(range(4))})
        end(backend)
        with pytest.raises(ConnectionError, match="ray storage unit 0 has died and could not read partition 'train_0'"):
            await queue.get("score", 4, timeout_s=60)
        with pytest.raises(ConnectionError, match="ray storage unit 0 has died and could not write to"):
            await queue.put("train_0", range(4, 8), {"tokens": tokens(range(4, 8))})
        assert (await queue.describe())["open_leases"] == 0
        await queue.put("train_0", range(8), {"reward": np.zeros(8, np.float32)})


async def test_a_dead_queue_is_named() -> None:
    with QueueActor.start(SPEC) as host:
        pending = asyncio.ensure_future(host.queue.get("score", 4))
        await until(host.queue, lambda described: described["waiting_gets"]["score"] == 1)
        ray.kill(host.actor)
        with pytest.raises(ConnectionError, match="transfer queue on tcp:.* is lost: its process has ended"):
            await pending


async def test_a_unit_that_hangs_is_named_with_what_was_asked_of_it() -> None:
    hanging = ray.remote(num_cpus=0)(Hanging).remote()
    storage = RayBackend((hanging,), timeout_s=0.1, inline_bytes=0).storage(QueueSession("queue", 1))
    with pytest.raises(TimeoutError, match="ray storage unit 0 took more than 0.1 s to write to partition 'train_0'"):
        storage.write("train_0", {"tokens": tokens(range(4))})
    ray.kill(hanging)


class Hanging:
    async def store(self, *arguments: Any) -> None:
        await asyncio.Event().wait()


class RaySide(SocketSide):
    """With storage units of its own."""

    def __init__(self) -> None:
        self._units = RayBackend.start(2, inline_bytes=256)
        super().__init__(UNTIMED, self._units, "tcp:127.0.0.1:0")

    def close(self) -> None:
        super().close()
        self._units.stop()


def test_the_queue_in_rays_object_store_behaves_as_its_model() -> None:
    run_machine(RaySide, cases=4, steps=40, least=dict.fromkeys(TASKS, 1))
