"""The queue with its payloads in Ray's object store, against the model in plain Python."""

from collections.abc import Iterator

import pytest
import ray

from harness.transfer_queue.storage.ray_objects import RayBackend
from tests.support.queue_machine import TASKS, UNTIMED, run_machine
from tests.support.queue_sides import SocketSide
from tests.support.ray_leftovers import IGNORED

pytestmark = IGNORED


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


class RaySide(SocketSide):
    """With storage units of its own."""

    def __init__(self) -> None:
        self._units = RayBackend.start(2, inline_bytes=256)
        super().__init__(UNTIMED, self._units, "tcp:127.0.0.1:0")

    def close(self) -> None:
        super().close()
        self._units.stop()


@pytest.mark.slow
def test_the_queue_in_rays_object_store_behaves_as_its_model() -> None:
    run_machine(RaySide, cases=4, steps=40, least=dict.fromkeys(TASKS, 1))
