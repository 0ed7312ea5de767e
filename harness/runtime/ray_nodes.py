"""The nodes of a Ray cluster: how this process comes to take part, and what they have for a job."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from harness.config.fields import ConfigError
from harness.config.machine import VISIBLE, Machine, gpus

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
    if not port.isdigit() or "/" in host:
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
        asked = [_gpus_there.options(scheduling_strategy=on_node(node.name)).remote() for node in with_gpus]
        try:
            memory = [found for of_node in ray.get(asked, timeout=_PROBED_S) for found in of_node]
        except TimeoutError:
            names = ", ".join(node.address for node in with_gpus)
            raise ConfigError(f"no word within {_PROBED_S:g} s of which GPUs there are on {names}") from None
    able = with_gpus or there
    return Machine(
        cores=sum(node.cpus for node in there),
        gpus=sum(node.gpus for node in there),
        gpu_bytes=min((gpu_bytes for gpu_bytes, _ in memory), default=0),
        divided=any(divided for _, divided in memory),
        nodes=len(able),
    )


@ray.remote(num_cpus=0)
def _gpus_there() -> list[tuple[int, bool]]:
    """Bytes of each, and whether it is an instance of a divided one. Ray hides them from whoever asked for none."""
    os.environ.pop(VISIBLE, None)
    return [(gpu.memory_bytes, gpu.instance) for gpu in gpus()]
