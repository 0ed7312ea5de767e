"""Makes runs by `bench`, one after another in this process, while something happens to their rollout engines:

    python saboteur.py '[{"settings": ..., "moments": ...}, ...]'

Prints a line of JSON for each run, and for each look at one.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

import httpx2
from rich.console import Console

import harness.driver.run
from harness.cli import bench
from harness.cli.main import RESULTS
from harness.driver import PRELOAD
from harness.driver.listeners import RunListener
from harness.driver.session import Session
from harness.runtime.local_runtime import launch_server

Moments = Sequence[tuple[str, str, int]]
"""(what is heard for the first time, what then happens, to which engine). What is heard is "<role>: <what>"."""


def sabotaged(moments: Moments) -> type[Session]:
    class Sabotaged(Session, RunListener):
        service: tuple[str, str]
        asking: set[asyncio.Task[None]]
        processes: dict[str, int]
        left: list[tuple[str, str, int]]

        async def connect(self, say: Callable[[str], None] = lambda line: None) -> None:
            await super().connect(say)
            engines: Any = self.assembly.coordinator.fleet.working
            self.asking = set()
            self.processes = {engine.name: await engine.connected() for engine in engines}
            self.left = list(moments)
            self.recorder.listeners.append(self)

        def doing(self, role: str, what: str) -> None:
            for moment in [moment for moment in self.left if moment[0] == f"{role}: {what}"]:
                self.left.remove(moment)
                self.happen(moment[1], f"rollout[{moment[2]}]")

        def served(self, url: str, token: str) -> AbstractContextManager[None]:
            self.service = url, token
            return super().served(url, token)

        def happen(self, what: str, engine: str) -> None:
            if what == "dies":
                os.kill(self.processes[engine], signal.SIGKILL)
            else:  # the run itself answers
                self.asking.add(asyncio.create_task(self._ask(what, engine)))

        async def _ask(self, what: str, engine: str) -> None:
            url, token = self.service
            async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, trust_env=False) as client:
                (await client.post(f"{url}/members/{engine}/{what}")).raise_for_status()
                print(json.dumps({"topology": (await client.get(f"{url}/topology")).json()}), flush=True)

    return Sabotaged


def _message(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


if __name__ == "__main__":
    runs: list[dict[str, Any]] = json.loads(sys.argv[1])
    with closing(launch_server(PRELOAD)) as server:
        for run in runs:
            harness.driver.run.Session = sabotaged(run["moments"])  # type: ignore[misc]
            try:
                code = bench.run(run["settings"].split(), RESULTS, Console(), server)
                print(json.dumps({"code": code}), flush=True)
            except Exception as error:
                print(json.dumps({"code": 1, "error": _message(error)}), flush=True)
