"""The runtime of one machine: workers are forked from a process that has imported what they need."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.machine import VISIBLE, gpus
from harness.config.plugins import import_folders
from harness.logs import RUN, run_in
from harness.rpc.handshake import new_token
from harness.rpc.sockets import Address, forget_address, listen, new_address
from harness.runtime.fork_server import ForkedProcess, ForkServer
from harness.runtime.runtime import Handle, Storage
from harness.runtime.worker_client import ConnectedRuntime
from harness.runtime.worker_server import run_worker
from harness.transfer_queue import QueueSpec, TransferQueue
from harness.transfer_queue.remote.process import QueueProcess

_WORKER = "harness.runtime.worker_server"


class LocalRuntime(ConnectedRuntime):
    """Workers as processes of this machine. Use as a context manager: leaving it ends every process it started.

    gpu: a worker sees its own devices only; preload: modules (`module`, or `module:function` to call) that are
    imported once for all workers: none may start a thread or touch a device; logs: a folder, for the output of each
    worker in a file of its name; by default it goes where that of this process goes. server: one that is there already,
    and stays, instead of one with this preload.
    """

    host = "127.0.0.1"
    stop_s = 5.0
    """Seconds that workers have to close their roles."""

    def __init__(
        self,
        *,
        gpu: bool,
        start_timeout_s: float,
        call_timeout_s: float | None,
        logs: Path | None = None,
        preload: Sequence[str] = (),
        server: ForkServer | None = None,
    ) -> None:
        super().__init__(start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s, here=True)
        self.gpu, self.logs, self.preload = gpu, logs, preload
        self._server = server
        self._processes: list[ForkedProcess] = []
        self._addresses: list[Address] = []

    def __enter__(self) -> LocalRuntime:
        """Importing begins; nothing waits for it."""
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
        if self._server is None:
            self._server = launch_server(self.preload, self.logs and self.logs / "fork_server.log")
            self._stack.callback(self._server.close)
        self._stack.callback(self._end_workers)
        return self

    def host_of(self, handle: Handle[Any]) -> str:
        return self.host

    def start_queue(self, spec: QueueSpec, saves: Path | None = None, storage: Storage | None = None) -> TransferQueue:
        """The queue of this run, in a process of its own, which ends with the run."""
        started = QueueProcess.start(
            spec,
            None if storage is None else storage(),
            timeout_s=self.start_timeout_s,
            call_timeout_s=self.call_timeout_s or 60.0,
            saves=None if saves is None else str(saves),
            run="" if self.logs is None else run_in(self.logs),
        )
        self._stack.callback(started.stop)
        self._queue = started
        return started.queue

    def _launch(self, name: str) -> tuple[_LocalProcess, bytes]:
        assert self._server is not None, "a worker is started within the context"
        devices, roles, build = self._starts[name]
        pickled, token = pickle.dumps(build), new_token()
        listener, address = listen(new_address())
        self._addresses.append(address)
        with listener:
            process = self._server.start(
                run_worker,
                (name, list(roles), pickled, token),
                [listener.fileno()],
                environment=({} if self.gpu else {"GLOO_SOCKET_IFNAME": "lo"})  # workers find each other
                | (device_environment(devices) if self.gpu else {})
                | ({} if self.logs is None else {RUN: run_in(self.logs)}),
                log=self.logs and self.logs / f"{name}.log",
            )
        self._processes.append(process)
        return _LocalProcess(self.reached_at(name, address), process), token

    def reached_at(self, worker: str, address: Address) -> Address:
        """The address at which this process connects to a worker that listens there."""
        return address

    def _end_workers(self) -> None:
        self._stopped()
        try:
            for process in self._processes:
                process.signal(signal.SIGTERM)
            until = time.monotonic() + self.stop_s
            begun = [process for process in self._processes if process.has_begun()]  # the server ends the others
            for process in begun:
                if process.wait(max(0.0, until - time.monotonic())) is None:
                    process.signal(signal.SIGKILL)
            for process in begun:
                process.wait(self.stop_s)
        finally:
            for process in self._processes:
                process.close()
            for address in self._addresses:
                forget_address(address)


class _LocalProcess:
    """A `WorkerProcess`."""

    def __init__(self, address: Address, process: ForkedProcess) -> None:
        self._address, self._process = address, process

    async def address(self) -> Address:
        return self._address

    async def death(self, within_s: float) -> str | None:
        how = await asyncio.to_thread(self._process.wait, within_s)
        return how if how is None or self._process.log is None else f"{how}; its output is in {self._process.log}"

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)


def launch_server(preload: Sequence[str], log: Path | None = None) -> ForkServer:
    """A fork server for workers of this machine, which imports what all of them need and these modules."""
    return ForkServer.launch([_WORKER, *preload], os.environ | server_environment(), log)


def device_environment(devices: Sequence[int]) -> dict[str, str]:
    """Environment by which a process sees these of the devices that this process sees, in this order. In a trial the
    one there is stands for all of them (`check_devices`)."""
    there = gpus() if devices else []
    return {VISIBLE: ",".join(there[device % len(there)].visible_as for device in devices)}


_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc keeps freed memory: else every forward of a small model pays page faults for its activations again."""

FORKABLE = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU initialises nothing
}
"""Environment without which what a server imports starts threads, or a driver, that no fork survives."""


def server_environment() -> dict[str, str]:
    """Environment of a fork server, and so of each worker, beyond that of this process."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(import_folders())  # where code of the user's is
    return environment | _MALLOC | FORKABLE
