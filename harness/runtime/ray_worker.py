"""A worker of a Ray cluster, on its node: an actor that serves as any worker does, and what it prints."""

import asyncio
import errno
import os
import pickle
import socket
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from harness.config.fields import ConfigError
from harness.config.machine import VISIBLE
from harness.logs import RUN, log_as_lines, run_in
from harness.rpc.sockets import Address, listen
from harness.runtime.runtime import Built, RoleName, role_name
from harness.runtime.worker_server import WorkerServer

_MOST_OUTPUT = 16 << 20  # bytes of what it prints
_ASKED_EVERY_S = 10  # a driver that says nothing, by TCP, whether its host is there


@dataclass(frozen=True)
class Listening:
    """The address where a worker listens, its node by Ray's name, and whether that node has the driver's folder of
    logs."""

    address: Address
    node: str
    sees_logs: bool


@dataclass(frozen=True)
class Output:
    """The output of a worker: in `log` of the driver's folder, where its node sees that, as it does if it sees `proof`,
    a file of this run; else in the temporary file `aside`, from where it is brought once the worker has ended."""

    log: Path
    proof: Path
    aside: str


class WorkerActor:
    """The actor. The worker's server lives in its event loop, and ends with it. It listens on the address that this
    node has in the cluster, on a free port; from the beginning, since Ray starts calls in any order.

    Its process ends with the connection to the driver: where the driver's host is lost, Ray's head may be lost with it,
    and nobody is left to end it. start_s: that the driver has to connect; silence_s: that its host may say nothing.

    output: None leaves it to Ray.
    """

    def __init__(self, worker: str, token: bytes, start_s: float, silence_s: float, output: Output | None) -> None:
        node = ray.util.get_node_ip_address()
        _bind_to(node)
        listener, _ = listen(f"tcp:{f'[{node}]' if ':' in node else node}:0")
        _end_with_peer(listener, silence_s)
        self._server = WorkerServer(worker, listener, token, self._leave)
        self._start_s, self._left = start_s, False
        self._output = output
        sees_logs = output is not None and output.proof.exists()
        self._listening = Listening(self._server.address, ray.get_runtime_context().get_node_id(), sees_logs)

    async def listening(self) -> Listening:
        """The address and node where it listens."""
        return self._listening

    async def visible(self) -> str:
        """The GPUs that it sees, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get(VISIBLE, "")

    async def serve(
        self,
        roles: Sequence[RoleName],
        build: bytes,
        folder: Path,
        reads: Sequence[Path],
        results: Path | None,
        *beside: str,
    ) -> None:
        """Serve the roles of this worker. folder: that the driver works in; reads: what is read of others; results:
        where its roles write, if any; beside: GPUs of other workers here that an engine of this one has besides."""
        if beside:
            os.environ[VISIBLE] = ",".join([os.environ[VISIBLE], *beside])

        def made() -> Built | Coroutine[Any, Any, Built]:
            self._share(folder, reads, results, roles)
            return pickle.loads(build)(roles)

        asyncio.get_running_loop().call_later(self._start_s, self._leave_alone)
        self._server.end_with_driver()
        await self._server.serve(made)
        if self._left:
            os._exit(1)  # Ray's own way out asks its head

    def _leave_alone(self) -> None:
        if not self._server.clients:
            self._leave()

    def _leave(self) -> None:
        self._left = True
        self._server.leave()

    def _share(self, folder: Path, reads: Sequence[Path], results: Path | None, roles: Sequence[RoleName]) -> None:
        here = ray.util.get_node_ip_address()
        try:
            os.chdir(folder)
            for path in reads:
                path.stat()
            if results is not None and not self._listening.sees_logs:  # it may have one of an earlier run there
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(results))
            if self._output is not None:
                os.environ[RUN] = run_in(self._output.log.parent)
                log_as_lines(self._server.worker, self._server.version)
                file = self._opened(self._output)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.close(file)
                print(f"{', '.join(map(role_name, roles))} on {here}", flush=True)
        except OSError as error:
            raise ConfigError(
                f"{self._server.worker} on {here} has no {error.filename}, or may not write it: the folder of the code "
                "has to be such as all nodes of the cluster share, and so has that of results (CADENCE_RESULTS names "
                "one), where roles on them read or write: first weights, checkpoints, final weights "
                "(save_weights=false keeps none)"
            ) from error

    def _opened(self, output: Output) -> int:
        if self._listening.sees_logs:
            return os.open(output.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        alone = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(Path(tempfile.gettempdir(), output.aside), os.O_WRONLY | os.O_APPEND | alone, 0o600)

    async def stop(self) -> None:
        """Stop serving."""
        self._server.stop()


def interface_of(address: str) -> str:
    """The network interface of this host that has it. Raises LookupError."""
    for name, its in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in its):
            return name
    raise LookupError(f"no network interface of this host has the address {address}, which its Ray was started with")


def _bind_to(address: str) -> None:
    """Gloo and NCCL of this process meet others over the interface of this address; a host has several, and its name
    may lead to loopback."""
    name = interface_of(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _end_with_peer(listener: socket.socket, silence_s: float) -> None:
    """Connections that it accepts end once the other host has acknowledged nothing for so long, whether or not there is
    something to send. A process that is stopped is one whose host acknowledges."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, min(_ASKED_EVERY_S, int(silence_s / 2)))
    for option, value in (
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_USER_TIMEOUT, int(silence_s * 1000)),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


@ray.remote(num_cpus=0)
def taken_output(name: str) -> bytes:
    """A file of this node's temporary folder, which is then gone."""
    return take_end(Path(tempfile.gettempdir(), name), _MOST_OUTPUT)


def take_end(file: Path, most: int) -> bytes:
    """The last bytes of it, at most so many, under a line that says how many were left out. The file is gone then."""
    with file.open("rb") as opened:
        left_out = max(0, file.stat().st_size - most)
        opened.seek(left_out)
        said = opened.read(most)
    file.unlink()
    return (f"[{left_out} bytes before this were left out]\n".encode() if left_out else b"") + said
