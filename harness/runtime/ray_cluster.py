"""The runtime of a cluster: Ray places workers, starts and ends them, and says when one died. Calls on roles travel as
everywhere else, here over TCP."""

from __future__ import annotations

import asyncio
import logging
import pickle
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from harness.config.placement import Placement
from harness.runtime.local_runtime import worker_environment
from harness.runtime.runtime import Build, Handle, RoleName, WorkerDied
from harness.runtime.worker_client import ConnectedWorkers, RemoteRole
from harness.runtime.worker_server import WorkerServer
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.ray_host import QueueActor
from harness.transfer_queue.remote.sockets import Address, listen, new_token

_STOP_S = 5.0  # that workers have to close their roles


class WorkerActor:
    """The actor. The worker's server lives in its event loop, and ends with it. It listens on the address that this
    node has in the cluster, on a free port; from the beginning, since Ray starts calls in any order."""

    def __init__(self, worker: str, token: bytes) -> None:
        node = ray.util.get_node_ip_address()
        listener, self._address = listen(f"tcp:{f'[{node}]' if ':' in node else node}:0")
        self._server = WorkerServer(worker, listener, token)

    async def address(self) -> Address:
        return self._address

    async def serve(self, roles: Sequence[RoleName], build: bytes) -> None:
        await self._server.serve(lambda: pickle.loads(build)(roles))

    async def stop(self) -> None:
        self._server.stop()


def _interpreter() -> dict[str, str]:
    """Ray hands the path of Python to a shell as it is: one with a space has to be quoted."""
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}


class RayCluster:
    """The cluster at `address`, by Ray; one bundle per device, or for all of an engine's. Use as a context manager:
    leaving it ends every process that it started."""

    def __init__(
        self,
        address: str,
        placement: Placement,
        *,
        gpu: bool,
        start_timeout_s: float,
        call_timeout_s: float | None,
        per_engine: int = 1,
    ) -> None:
        self.address, self.placement, self.gpu = address, placement, gpu
        self._bundles = _bundles(placement, per_engine)
        self.start_timeout_s = start_timeout_s
        self.host = ""  # known once it is entered
        self._group: PlacementGroup | None = None
        self._stack = ExitStack()
        self._workers = ConnectedWorkers(start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s, here=False)
        self._actors: list[Any] = []
        self._serving: list[Any] = []
        self._starts: dict[str, tuple[Sequence[int], Sequence[RoleName], Build]] = {}

    def __enter__(self) -> RayCluster:
        self._stack.callback(ray.shutdown)
        try:
            ray.init(
                address=self.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": worker_environment(self.gpu)} | _interpreter(),
            )
            self._stack.callback(self._stop_workers)
            self.host = ray.util.get_node_ip_address()
            kinds = ("CPU", "GPU") if self.gpu else ("CPU",)
            bundles = [dict.fromkeys(kinds, float(len(devices))) for devices in self._bundles]
            self._group = placement_group([*bundles, {"CPU": 1.0}], strategy="PACK")
            if not self._group.wait(self.start_timeout_s):
                raise TimeoutError(
                    f"Ray could not place {self.placement.total} devices within {self.start_timeout_s} s; "
                    f"it has {ray.cluster_resources()}"
                )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start_queue(self, spec: QueueSpec) -> TransferQueue:
        """The queue of this run, in an actor, which ends with the run."""
        started = QueueActor.start(
            spec, timeout_s=self.start_timeout_s, call_timeout_s=self._workers.call_timeout_s or 60.0
        )
        self._stack.callback(started.stop)
        self._queue = started
        return started.queue

    def kill_queue(self) -> None:
        """Its process, whatever it is doing."""
        self._queue.kill()

    def start_worker(
        self, name: str, devices: Sequence[int], roles: Mapping[RoleName, type], build: Build
    ) -> list[RemoteRole[Any]]:
        """Start a worker on its bundle, in which `build(names of the roles)` makes its roles; returns at once. roles:
        with the class whose methods a handle has."""
        self._starts[name] = devices, list(roles), build
        return self._workers.add(name, *self._launch(name), roles)

    async def start_again(self, handle: Handle[Any]) -> None:
        """As `Runtime` says: on the same bundle, wherever that is."""
        await self._workers.start_again(handle, self._launch)

    def _launch(self, name: str) -> tuple[_RayProcess, bytes]:
        """Another actor of this worker, and the token for it."""
        token = new_token()
        devices, roles, build = self._starts[name]
        actor = self._start_actor(devices, name, token)
        serving = actor.serve.remote(list(roles), pickle.dumps(build))
        self._actors.append(actor)
        self._serving.append(serving)
        return _RayProcess(name, actor.address.remote(), serving, actor), token

    async def stop_clocks(self) -> float:
        """They stand still until they are started again. The latest of their times."""
        return await self._workers.stop_clocks()

    async def start_clocks(self, origin: float) -> None:
        """Time 0 of every worker that lives, a reading of time.monotonic here."""
        await self._workers.start_clocks(origin)

    def _start_actor(self, devices: Sequence[int], name: str, token: bytes) -> Any:
        every = range(len(self._bundles))
        bundle = next(k for k in every if devices[0] in self._bundles[k]) if devices else len(self._bundles)
        options: dict[str, Any] = {"num_cpus": float(len(devices) or 1)}
        if self.gpu and devices:
            options["num_gpus"] = float(len(devices))
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = ray.remote(WorkerActor).options(**options, scheduling_strategy=strategy, max_concurrency=3)
        return actor.remote(name, token)

    def _stop_workers(self) -> None:
        for worker in self._workers.connections.values():
            worker.ended = worker.ended or "it was stopped"  # once Ray is shut down, it cannot be asked
        for actor in self._actors:
            actor.stop.remote()
        if self._serving:
            ray.wait(self._serving, num_returns=len(self._serving), timeout=_STOP_S)


def _bundles(placement: Placement, per_engine: int) -> list[tuple[int, ...]]:
    """Devices that have to be on one node: those of an engine, where no other role has any of them; else one each."""
    rollout = placement.devices["rollout"]
    alone = len(placement.roles_on(rollout[0])) == 1
    size = per_engine if alone else 1
    engines = [rollout[start : start + size] for start in range(0, len(rollout), size)]
    others = [(device,) for device in range(placement.total) if device not in rollout]
    return sorted([*engines, *others])


class _RayProcess:
    """A `WorkerProcess`. listening: its address; serving: nothing, until it ends."""

    def __init__(self, worker: str, listening: Any, serving: Any, actor: Any) -> None:
        self._worker, self._listening, self._serving, self._actor = worker, listening, serving, actor

    async def address(self) -> Address:
        try:
            return await self._listening
        except RayError as error:
            raise WorkerDied(f"{self._worker} died as it started: {_reason(error)}") from error

    async def death(self, within_s: float) -> str | None:
        try:
            async with asyncio.timeout(None if within_s == float("inf") else within_s):
                await self._serving
        except RayError as error:
            return f"{_reason(error)}; its output is in Ray's logs"
        except TimeoutError:
            return None
        return "it was stopped"

    def kill(self) -> None:
        ray.kill(self._actor)


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        return f"its server failed: {error.cause}"
    return str(error).partition("\n")[0].rstrip(".")  # the rest is about Ray
