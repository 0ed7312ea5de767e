"""Cadence across a Ray cluster: queue and storage are actors, and writers and readers connect to its Ray."""

from collections.abc import Mapping

import ray
from ray import cloudpickle

from harness.transfer_queue.ray_host import QueueActor
from harness.transfer_queue.storage.ray_objects import RayBackend
from tests.benchmarks.transfer_queue.cadence import CadenceClient, spec_of
from tests.benchmarks.transfer_queue.machine import titled
from tests.benchmarks.transfer_queue.workload import Tasks

RAY = {"log_to_driver": False, "logging_level": "ERROR"}
Address = tuple[str, bytes]
"""Of Ray, and the queues by flow: their handles can be unpickled only where Ray is connected."""


class OursOnRay:
    def start(self, flows: Mapping[str, Tasks]) -> Address:
        context = ray.init("local", num_cpus=4, include_dashboard=False, **RAY)
        self._actors = {flow: QueueActor.start(spec_of(tasks), RayBackend.start()) for flow, tasks in flows.items()}
        return context.address_info["address"], cloudpickle.dumps({f: a.sync() for f, a in self._actors.items()})

    def connect(self, address: Address, flow: str) -> CadenceClient:
        if not ray.is_initialized():
            ray.init(address[0], **RAY)
        return CadenceClient(cloudpickle.loads(address[1])[flow])

    def services(self) -> list[int]:
        return titled("ray::QueueHost", "ray::FrameHost")

    def stop(self) -> None:
        for actor in self._actors.values():
            actor.stop()
        ray.shutdown()
