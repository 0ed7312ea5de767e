"""A trainer and engines in processes of their own, with faults on request: for fault tests of weight sync."""

import asyncio
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from engines.torch.model import build_model
from harness.protocols import Request
from harness.runtime.runtime import WorkerDied
from harness.weight_sync import collective, host_staged, ipc
from harness.weight_sync.plan import digests
from harness.workers.actor import ActorRole
from tests.support.forking import forking
from tests.support.proxies import Proxy
from tests.support.role_setting import CPU, SMALL, CountingQueue, TickingClock, rollout_role, torch_engine

PROMPT = np.array([5, 3, 8, 2])


@dataclass(frozen=True)
class Fault:
    """What happens to a process when it is in the middle of `version`."""

    version: int
    tensor: int = 3
    times: int = 1
    """How often it happens, where the process survives it."""


@dataclass
class Weights(Mapping[str, torch.Tensor]):
    """The trainer's: version v is the model drawn from seed v. With a fault, the process dies over one tensor."""

    version: int
    dies: Fault | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self.dies and self.version == self.dies.version and list(self).index(name) == self.dies.tensor:
            os._exit(9)
        return tensors(self.version)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tensors(self.version))

    def __len__(self) -> int:
        return len(tensors(self.version))


@cache
def tensors(version: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build_model(SMALL, seed=version).named_parameters()}


class Trainer(ActorRole):
    """Rank 0 of one; `train` makes the next version. damages: a byte of a bucket changes after its digest was taken."""

    def __init__(self, dies: Fault | None, damages: Fault | None) -> None:
        super().__init__(self, TickingClock(), rank=0, reader=None, device=CPU)  # type: ignore[arg-type]
        self._weights, self._damages = Weights(0, dies), damages
        self._left = damages.times if damages else 0
        for module in (collective, host_staged, ipc):
            module.digests = self._damaging  # type: ignore[attr-defined]

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        return self._weights

    def holders(self) -> dict[str, tuple[int, ...]]:
        return {}

    async def become(self, version: int) -> None:
        self._weights.version = version

    def _damaging(self, bucket: Any, data: torch.Tensor) -> torch.Tensor:
        taken = digests(bucket, data)
        if self._damages and self._weights.version == self._damages.version and self._left:
            self._left -= 1
            data[bucket.tensors[0].offset] ^= 1
        return taken


class Engine:
    """A rollout role around a torch engine; `dies` in the middle of loading."""

    def __init__(self, dies: Fault | None) -> None:
        self.role, self.engine = None, torch_engine()
        self.dies = dies
        self.load_as_it_is = self.engine.load_weights
        self.engine.load_weights = self._load  # type: ignore[method-assign]

    async def _load(self, version: int, weights: Any) -> None:
        await self.load_as_it_is(version, self._passing(version, weights))

    def _passing(self, version: int, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights):
            if self.dies and (version, number) == (self.dies.version, self.dies.tensor):
                os._exit(9)
            yield item

    async def sample(self) -> tuple[list[int], set[int]]:
        """A response, and the versions that sampled it."""
        self.engine.submit([Request(0, PROMPT)])
        (done,) = await self.engine.finished()
        return done.tokens.tolist(), set(done.versions.tolist())

    def __getattr__(self, name: str) -> Any:
        if self.__dict__["role"] is None:
            self.role = rollout_role(self.engine, CountingQueue())
        return getattr(self.role, name)


def expected(version: int) -> tuple[list[int], set[int]]:
    """What an engine at this version samples, and nothing else."""

    async def sample() -> tuple[list[int], set[int]]:
        engine = Engine(None)
        await engine.engine.load_weights(version, tensors(version).items())
        return await engine.sample()

    return asyncio.run(sample())


@dataclass
class ProcessHandle:
    """`harness.runtime.runtime.Handle` on a process."""

    name: str
    process: BaseProcess
    connection: Connection
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def role(self) -> Any:
        return Proxy(self._call)

    async def _call(self, method: str, *arguments: Any) -> Any:
        async with self._one:
            try:
                self.connection.send_bytes(pickle.dumps((method, arguments)))
                fine, answer = pickle.loads(await asyncio.to_thread(self.connection.recv_bytes))
            except (EOFError, OSError) as error:
                raise WorkerDied(f"{self.name} died during {method}") from error
        if not fine:
            raise answer
        return answer

    async def death(self, within_s: float = 5.0) -> str | None:
        await asyncio.to_thread(self.process.join, 0.5)
        return None if self.process.is_alive() else f"exit code {self.process.exitcode}"

    async def end(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.join)


@contextmanager
def worker_processes(makers: Mapping[str, Callable[[], Any]]) -> Iterator[dict[str, ProcessHandle]]:
    """A process for each; none of them outlives the block."""
    context = forking()
    handles: dict[str, ProcessHandle] = {}
    try:
        for name, make in makers.items():
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, make), daemon=True)
            process.start()
            there.close()
            handles[name] = ProcessHandle(name, process, here)
        yield handles
    finally:
        for handle in handles.values():
            handle.process.kill()
            handle.process.join()
            handle.connection.close()


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    torch.set_num_threads(1)

    async def serve() -> None:
        role = make()
        while True:
            method, arguments = pickle.loads(await asyncio.to_thread(connection.recv_bytes))
            try:
                answer = (True, await getattr(role, method)(*arguments))
            except Exception as error:
                answer = (False, error)
            connection.send_bytes(pickle.dumps(answer))

    try:
        asyncio.run(serve())
    except EOFError:
        pass  # the test is over
