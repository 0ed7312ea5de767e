"""A queue in a Ray actor, for processes on all nodes of its cluster: the server of `remote`, over TCP inside TLS."""

import os
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from harness.logs import RUN, log_as_lines
from harness.rpc.handshake import new_token
from harness.rpc.sockets import Address
from harness.transfer_queue.control.spec import QueueSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.process import HostedQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.protocol import QueueBackend


class QueueHost:
    """The actor. The server lives in its event loop, and ends with it."""

    async def serve(self, spec: QueueSpec, backend: QueueBackend, token: bytes, saves: str | None, run: str) -> Address:
        """Listens on the address that this node has in the cluster, on a free port."""
        os.environ[RUN] = run
        log_as_lines("queue", lambda: None)
        node = ray.util.get_node_ip_address()
        place = f"[{node}]" if ":" in node else node
        self._server = QueueServer(spec, backend, token=token, address=f"tcp:{place}:0", saves=saves)
        self._server.start()
        return self._server.address


@dataclass(slots=True)
class QueueActor(HostedQueue):
    """A queue in a Ray actor."""

    actor: Any

    @classmethod
    def start(
        cls,
        spec: QueueSpec,
        backend: QueueBackend | None = None,
        *,
        timeout_s: float = 60.0,
        call_timeout_s: float = 60.0,
        node: str | None = None,
        saves: str | None = None,
        run: str = "",
        **actor_options: Any,
    ) -> Self:
        """Start the actor, in the Ray that this process is connected to; it lives until `stop`, or until this process
        ends. backend: all payloads are in its messages, and so inside TLS, unless given; a `RayBackend` stays to be
        stopped; node: for the actor, by Ray's name of it; saves, run: see `QueueProcess`; actor_options: Ray's (`name`,
        ...), no CPU of its count unless given. TimeoutError if it does not listen in time."""
        backend = InlineBackend() if backend is None else backend
        if node is not None:
            actor_options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(QueueHost).options(**{"num_cpus": 0} | actor_options).remote()
        token = new_token()
        try:
            address = _listening(actor.serve.remote(spec, backend, token, saves, run), timeout_s)
        except BaseException:
            ray.kill(actor)
            raise
        return cls(RemoteQueue(Endpoint(address, token, backend, spec, call_timeout_s)), actor)

    def kill(self) -> None:
        ray.kill(self.actor)

    def stop(self) -> None:
        self.kill()


def _listening(address: Any, timeout_s: float) -> Address:
    try:
        return ray.get(address, timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"the actor of the transfer queue did not listen within {timeout_s} s") from None
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise RuntimeError(f"the actor of the transfer queue died as it started: {error}") from error
