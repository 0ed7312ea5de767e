"""A queue in a Ray actor, for processes on all nodes of its cluster: the server of `remote`, over TCP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.process import HostedQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sockets import Address, new_token
from harness.transfer_queue.storage.protocol import Backend
from harness.transfer_queue.storage.ray_objects import RayBackend


class QueueHost:
    """The actor. The server lives in its event loop, and ends with it."""

    async def serve(self, spec: QueueSpec, backend: Backend, token: bytes) -> Address:
        """Listens on the address that this node has in the cluster, on a free port."""
        node = ray.util.get_node_ip_address()
        place = f"[{node}]" if ":" in node else node
        self._server = QueueServer(spec, backend, token=token, address=f"tcp:{place}:0")
        self._server.start()
        return self._server.address


@dataclass(slots=True)
class QueueActor(HostedQueue):
    actor: Any
    backend: RayBackend

    @classmethod
    def start(
        cls,
        spec: QueueSpec,
        *,
        units: int = 1,
        inline_bytes: int | None = None,
        timeout_s: float = 60.0,
        call_timeout_s: float = 60.0,
        **actor_options: Any,
    ) -> QueueActor:
        """Start the actor and its storage units, in the Ray that this process is connected to; they live until `stop`,
        or until this process ends. units, inline_bytes: see `RayBackend`; actor_options: Ray's (`name`,
        `scheduling_strategy`, ...), no CPU of its count unless given. TimeoutError if it does not listen in time."""
        options = {} if inline_bytes is None else {"inline_bytes": inline_bytes}
        backend = RayBackend.start(units, timeout_s=call_timeout_s, **options)
        actor = ray.remote(QueueHost).options(**{"num_cpus": 0} | actor_options).remote()
        token = new_token()
        try:
            address = _listening(actor.serve.remote(spec, backend, token), timeout_s)
        except BaseException:
            _end(actor, backend)
            raise
        return cls(RemoteQueue(Endpoint(address, token, backend, spec, call_timeout_s)), actor, backend)

    def kill(self) -> None:
        ray.kill(self.actor)

    def stop(self) -> None:
        _end(self.actor, self.backend)


def _listening(address: Any, timeout_s: float) -> Address:
    try:
        return ray.get(address, timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"the actor of the transfer queue did not listen within {timeout_s} s") from None
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise RuntimeError(f"the actor of the transfer queue died as it started: {error}") from error


def _end(actor: Any, backend: RayBackend) -> None:
    ray.kill(actor)
    backend.stop()
