"""The real runtime: roles as Ray actors on the devices of a placement group."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from harness.config.placement import HOST_ROLES, Placement
from harness.config.plugins import import_folders
from harness.runtime.runtime import WorkerDied
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.ray_host import QueueActor
from harness.transfer_queue.remote.process import QueueProcess


class RoleHost:
    """The Ray actor around one role; its event loop runs the role's loops."""

    def __init__(self, build: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.role = build(**arguments)

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "begin":
            (self.role.clock.origin,) = arguments
            return None
        return await getattr(self.role, method)(*arguments)

    async def answer(self) -> int:
        """The process id, from a process that is there."""
        return os.getpid()


class RemoteRole:
    """A Handle on a Ray actor. Waits at most `timeout_s` for an answer; None waits as long as the actor lives."""

    def __init__(self, name: str, actor: Any, timeout_s: float | None) -> None:
        self.name, self._actor, self._timeout_s = name, actor, timeout_s

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._actor.call.remote(method, *arguments)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            reason = str(error).partition("\n")[0].rstrip(".")  # the rest is about Ray, and in the cause
            raise WorkerDied(f"{self.name} died during {method}: {reason}") from error
        except TimeoutError as error:
            raise TimeoutError(f"{self.name} did not answer {method} within {self._timeout_s} s: {error}") from error

    async def is_dead(self, within_s: float = 5.0) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._actor.answer.remote()
        except RayActorError:
            return True
        except TimeoutError:
            pass
        return False

    async def end(self) -> None:
        ray.kill(self._actor)
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self.is_dead():
                    pass
        except TimeoutError as error:
            raise TimeoutError(f"{self.name} was killed and is still there after {self._timeout_s} s") from error


class RayRuntime:
    """Ray, started for this run unless an address says where a cluster is, and one bundle per device.

    Loopback only where Ray is started here. Use as a context manager: leaving it ends every process it started.
    """

    def __init__(self, placement: Placement, *, gpu: bool, start_timeout_s: float, call_timeout_s: float) -> None:
        self.placement, self.gpu = placement, gpu
        self.start_timeout_s, self.call_timeout_s = start_timeout_s, call_timeout_s
        self.host = "127.0.0.1"
        self._group: PlacementGroup | None = None
        self._queues = ExitStack()
        self._alone = True  # on one node

    def __enter__(self) -> RayRuntime:
        address = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {}
        if address is None:
            # Ray would start workers at niceness 15: then whatever else runs on the machine goes before the engines.
            os.environ.setdefault("RAY_worker_niceness", "0")
            local = {
                "num_cpus": self.placement.total + 1,  # logical: one per device, one for roles without a device
                "include_dashboard": False,
                "_node_ip_address": self.host,
            }
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": _worker_environment(self.gpu)},
            **local,
        )
        if address is not None:
            self.host = ray.util.get_node_ip_address()
            self._alone = False
        device = {"CPU": 1.0} | ({"GPU": 1.0} if self.gpu else {})
        self._group = placement_group([device] * self.placement.total + [{"CPU": 1.0}], strategy="PACK")
        if not self._group.wait(self.start_timeout_s):
            self.__exit__()
            raise TimeoutError(
                f"Ray could not place {self.placement.total} devices within {self.start_timeout_s} s; "
                f"it has {ray.cluster_resources()}"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._queues.close()
        ray.shutdown()

    def start_queue(self, spec: QueueSpec) -> TransferQueue:
        """The queue of this run, which ends with it: on one node a process of its own, because a Ray call takes longer
        than all else that happens to a micro-batch; in a cluster an actor, reached over TCP."""
        start: Callable[..., QueueProcess | QueueActor] = QueueProcess.start if self._alone else QueueActor.start
        started = start(spec, timeout_s=self.start_timeout_s, call_timeout_s=self.call_timeout_s)
        self._queues.callback(started.stop)
        return started.queue

    def start(self, role: str, number: int, build: Callable[..., Any], **arguments: Any) -> RemoteRole:
        """Start worker `number` of a role on its device; `build(number=number, **arguments)` makes it there."""
        name = f"{role}[{number}]"
        if role in HOST_ROLES:
            bundle, share = self.placement.total, 1.0 / len(HOST_ROLES)
        else:
            bundle = self.placement.devices[role][number]
            share = 1.0 / len(self.placement.roles_on(bundle))
        options: dict[str, Any] = {"num_cpus": share}
        if self.gpu and role not in HOST_ROLES:
            options["num_gpus"] = share
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        host = ray.remote(RoleHost).options(**options, scheduling_strategy=strategy)
        actor = host.remote(build, {"number": number, **arguments})
        return RemoteRole(name, actor, self.call_timeout_s)


_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc keeps freed memory: else every forward of a small model pays page faults for its activations again."""


def _worker_environment(gpu: bool) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | _MALLOC
    environment["PYTHONPATH"] = os.pathsep.join(import_folders())  # where code of the user's is
    if not gpu:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment
