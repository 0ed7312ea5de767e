"""The runtime of a cluster: Ray places workers, starts and ends them, and says when one died. Calls on roles travel as
everywhere else, here over TCP, between the addresses that nodes have in the cluster."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from harness.config.fields import ConfigError, whole_number
from harness.config.machine import VISIBLE, Machine, gpus, host_bytes
from harness.config.placement import Placement
from harness.logs import run_in
from harness.rpc.handshake import new_token
from harness.rpc.sockets import Address, socket_address
from harness.runtime.local_runtime import server_environment
from harness.runtime.ray_worker import Listening, Output, WorkerActor, taken_output
from harness.runtime.runtime import Handle, RoleName, Storage, WorkerDied
from harness.runtime.worker_client import ConnectedRuntime, RemoteRole
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.ray_host import QueueActor

_REACHED_S = 10.0  # longest wait for the head of a cluster to accept a connection
_PROBED_S = 60.0  # and for a node to say which GPUs it has


@dataclass(frozen=True)
class Node:
    """A node of the cluster, with what its Ray may give away; its name is Ray's."""

    name: str
    address: str
    cpus: int
    gpus: int

    def devices(self, gpu: bool) -> int:
        """Devices that the node has for a job."""
        return self.gpus if gpu else self.cpus


@contextmanager
def connected(address: str, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Take part in the cluster. environment: of the processes that are started there. Raises ConfigError where nobody
    answers, or who does lets this process in."""
    _reach(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=({"env_vars": dict(environment)} if environment else {}) | _interpreter(),
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        why = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(f"RAY_ADDRESS={address}: this process cannot take part in the cluster: {why}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own, in Python and below it, end the process at once
    try:
        yield
    finally:
        ray.shutdown()


def _interpreter() -> dict[str, str]:
    """Ray hands the path of Python to a shell as it is: one with a space has to be quoted."""
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}


def _reach(address: str) -> None:
    """Ray itself says nothing for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if whole_number(port) is None or "/" in host:
        raise ConfigError(
            f"RAY_ADDRESS={address} is no host:port; the driver runs on a node of the cluster, and names its head, as "
            "10.0.0.1:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no head of a Ray cluster answers there ({error}); start one, or unset it to use "
            "this machine alone"
        ) from error


def nodes() -> list[Node]:
    """Nodes that live, the first being this one. This process takes part in the cluster."""
    here = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.name != here)


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """Ray's strategy to schedule on this node."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def cluster_machine(address: str) -> Machine:
    """The devices that the cluster has for a job. Raises ConfigError."""
    with connected(address):
        there = nodes()
        with_gpus = [node for node in there if node.gpus]
        asked = [_devices_there.options(scheduling_strategy=on_node(node.name)).remote() for node in with_gpus]
        try:
            answers = ray.get(asked, timeout=_PROBED_S)
        except TimeoutError:
            names = ", ".join(node.address for node in with_gpus)
            raise ConfigError(f"no word within {_PROBED_S:g} s of which GPUs there are on {names}") from None
    memory = [found for _, of_node in answers for found in of_node]
    able = with_gpus or there
    return Machine(
        cores=sum(node.cpus for node in there),
        gpus=sum(node.gpus for node in there),
        gpu_bytes=min((gpu_bytes for gpu_bytes, _ in memory), default=0),
        divided=any(divided for _, divided in memory),
        nodes=len(able),
        host_bytes=min((host for host, _ in answers), default=math.inf),
    )


@ray.remote(num_cpus=0)
def _devices_there() -> tuple[int, list[tuple[int, bool]]]:
    """Bytes of the host; of each GPU its own, and whether it is an instance of a divided one. Ray hides them from
    whoever asked for none."""
    os.environ.pop(VISIBLE, None)
    return host_bytes(), [(gpu.memory_bytes, gpu.instance) for gpu in gpus()]


_STOP_S = 5.0  # that workers have to close their roles
_BROUGHT_S = 120.0  # that the output of a worker may take to come from its node, where a process starts for it


@dataclass(frozen=True)
class ClusterSettings:
    """A run on the cluster at `address`.

    silence_s: that the driver's host may say nothing; then workers on others end. per_engine: devices of an engine,
    which are on one node, as are `together` neighbours in training. logs: a folder, in that of results, for the output
    of each worker in a file of its name, brought there from nodes that do not see it; Ray keeps it by default. reads:
    what workers read of other folders; writes: whether a role writes into that of results.
    """

    address: str
    placement: Placement
    gpu: bool
    start_timeout_s: float
    call_timeout_s: float | None
    silence_s: float = 600.0
    per_engine: int = 1
    together: int = 1
    logs: Path | None = None
    reads: Sequence[Path] = ()
    writes: Callable[[RoleName], bool] = lambda role: False


class RayCluster(ConnectedRuntime):
    """The cluster, by Ray. Use as a context manager: leaving it ends every process that it started."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(start_timeout_s=settings.start_timeout_s, call_timeout_s=settings.call_timeout_s, here=False)
        self.settings = settings
        self.host = ""  # known once it is entered
        self._proof = f".seen-{secrets.token_hex(8)}"
        self._bundles: list[tuple[int, ...]] = []
        self._here = ""  # this node, by Ray's name
        self._group: PlacementGroup | None = None
        self._processes = defaultdict[str, list[_RayProcess]](list)  # of each worker, the last one at work
        self._of_device: dict[int, Any] = {}  # the actor of a worker, by its first device

    def __enter__(self) -> RayCluster:
        settings, placement = self.settings, self.settings.placement
        try:
            if settings.logs is not None:
                settings.logs.mkdir(parents=True, exist_ok=True)
                proof = settings.logs / self._proof
                proof.touch()
                self._stack.callback(proof.unlink)
            self._stack.enter_context(connected(settings.address, server_environment()))
            self._stack.callback(self._stop_workers)
            there = nodes()
            self._here, self.host = there[0].name, there[0].address
            devices = [node.devices(settings.gpu) for node in there]
            self._bundles = bundles(placement, devices, per_engine=settings.per_engine, together=settings.together)
            kinds = ("CPU", "GPU") if settings.gpu else ("CPU",)
            wanted = [dict.fromkeys(kinds, float(len(bundle))) for bundle in self._bundles]
            self._group = placement_group(wanted, strategy="PACK")
            if not self._group.wait(settings.start_timeout_s):
                raise ConfigError(
                    f"Ray could not place {placement.total} devices within {settings.start_timeout_s:g} s "
                    f"(cluster.wait_timeout_s): wanted {', '.join(str(len(its)) for its in self._bundles)}, each on "
                    "one node, and free or taken by others there are "
                    f"{', '.join(f'{node.devices(settings.gpu)} on {node.address}' for node in there)}"
                )
        except BaseException:
            self._stack.close()
            raise
        return self

    def host_of(self, handle: Handle[Any]) -> str:
        assert isinstance(handle, RemoteRole), "it is of this runtime"
        return self._processes[handle.connection.worker][-1].host

    def start_queue(self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None) -> TransferQueue:
        """The queue of this run, in an actor on this node, which ends with the run: no other node takes it along."""
        started = QueueActor.start(
            spec,
            None if storage is None else storage(),
            timeout_s=self.start_timeout_s,
            call_timeout_s=self.call_timeout_s or 60.0,
            node=self._here,
            saves=None if saves is None else str(saves),
            run="" if self.settings.logs is None else run_in(self.settings.logs),
        )
        self._stack.callback(started.stop)
        self._queue = started
        return started.queue

    def _launch(self, name: str) -> tuple[_RayProcess, bytes]:
        """Launch it on the bundle of its devices, wherever that is; devices of which another worker was started before
        are that one's, and an engine here uses them too."""
        token = new_token()
        devices, roles, build = self._starts[name]
        output = results = None
        if self.settings.logs is not None:
            logs = self.settings.logs.absolute()
            output = Output(logs / f"{name}.log", logs / self._proof, f"cadence-{secrets.token_hex(8)}.log")
            results = logs.parent if any(map(self.settings.writes, roles)) else None
        beside = [self._of_device[device] for device in devices[1:] if device in self._of_device]
        actor = self._start_actor(devices[: len(devices) - len(beside)], name, token, output)
        self._of_device |= dict.fromkeys(devices[:1], actor)
        seen = [other.visible.remote() for other in beside if self.settings.gpu]
        serving = actor.serve.remote(list(roles), pickle.dumps(build), Path.cwd(), self.settings.reads, results, *seen)
        process = _RayProcess(name, actor.listening.remote(), serving, actor, output)
        self._processes[name].append(process)
        return process, token

    def _start_actor(self, devices: Sequence[int], name: str, token: bytes, output: Output | None) -> Any:
        """One without a device is on this node, as the queue is."""
        options: dict[str, Any] = {"num_cpus": float(len(devices))}
        if self.settings.gpu and devices:
            options["num_gpus"] = float(len(devices))
        if devices:
            bundle = next(number for number, its in enumerate(self._bundles) if devices[0] in its)
            strategy: Any = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        else:
            strategy = on_node(self._here)
        actor = ray.remote(WorkerActor).options(**options, scheduling_strategy=strategy, max_concurrency=3)
        return actor.remote(name, token, self.settings.start_timeout_s, self.settings.silence_s, output)

    def _stop_workers(self) -> None:
        self._stopped()
        processes = [process for of_worker in self._processes.values() for process in of_worker]
        for process in processes:
            process.actor.stop.remote()
        if serving := [process.serving for process in processes]:
            ray.wait(serving, num_returns=len(serving), timeout=_STOP_S)
        for thread in [process.bring_output() for process in processes]:
            if thread is not None:
                thread.join()


def bundles(
    placement: Placement, there: Sequence[int], *, per_engine: int = 1, together: int = 1
) -> list[tuple[int, ...]]:
    """Devices that have to be on one node, together: those of an engine, where no other role has any of them; of all
    others as many as the largest nodes have, so that a training world is on as few as can be.

    there: devices of each node; together: neighbours that no two nodes may share, as engines beside them may not."""
    rollout = placement.devices["rollout"]
    alone = len(placement.roles_on(rollout[0])) == 1
    together = together if alone else math.lcm(together, per_engine)
    engines = [rollout[start : start + per_engine] for start in range(0, len(rollout) if alone else 0, per_engine)]
    others = [device for device in range(placement.total) if not (alone and device in rollout)]
    worlds = []
    for devices in sorted(there, reverse=True):
        size = max(devices // together, 1) * together
        worlds.append(tuple(others[:size]))
        others = others[size:]
    worlds += [tuple(others[start : start + together]) for start in range(0, len(others), together)]
    return sorted(bundle for bundle in [*map(tuple, engines), *worlds] if bundle)


class _RayProcess:
    """A `WorkerProcess`. listening: where it does; serving: nothing, until it ends."""

    def __init__(self, worker: str, listening: Any, serving: Any, actor: Any, output: Output | None) -> None:
        self._worker, self._listening, self.serving, self.actor = worker, listening, serving, actor
        self._log, self._to_bring = output and output.log, output
        self._bringing: threading.Thread | None = None
        self.host = ""
        """Address of the host, once it is known where it was placed."""

    async def address(self) -> Address:
        try:
            found: Listening = await self._listening
        except RayError as error:
            raise WorkerDied(f"{self._worker} died as it started: {_reason(error)}") from error
        self.host = str(socket_address(found.address)[1][0])
        return found.address

    async def death(self, within_s: float) -> str | None:
        try:
            async with asyncio.timeout(None if within_s == float("inf") else within_s):
                await self.serving
        except RayError as error:
            self.bring_output()  # nobody waits for it: others act on a death at once
            where = self.host and f" (on {self.host})"
            return f"{_reason(error)}{where}; its output is in {self._log or 'the logs of Ray'}"
        except TimeoutError:
            return None
        return "it was stopped"

    def bring_output(self) -> threading.Thread | None:
        """Bring what an ended process printed on a node that does not see the folder of logs there, once, in a thread
        that ends when it has; None where there is nothing to bring."""
        output, self._to_bring = self._to_bring, None
        if output is not None:
            with suppress(RayError):  # it never listened, and has printed nothing there
                found: Listening = ray.get(self._listening, timeout=0)
                if not found.sees_logs:
                    taken = taken_output.options(scheduling_strategy=on_node(found.node)).remote(output.aside)
                    self._bringing = threading.Thread(
                        target=_keep, args=(taken, found.address, output.log), name="output", daemon=True
                    )
                    self._bringing.start()
        return self._bringing

    def kill(self) -> None:
        ray.kill(self.actor)


def _keep(taken: Any, address: Address, log: Path) -> None:
    """Appends what Ray brings of this worker, or why it does not."""
    try:
        said = ray.get(taken, timeout=_BROUGHT_S)
    except RayError as error:
        why = str(error).strip().rpartition("\n")[2]
        said = f"[what this worker printed on {socket_address(address)[1][0]} is lost: {why}]\n".encode()
    with log.open("ab") as file:
        file.write(said)


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        return f"its server failed: {error.cause}"
    return str(error).partition("\n")[0].rstrip(".")  # the rest is about Ray
