"""Runs of a comparison: each driver, and its workers, from one process that has imported what all of them need."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.campaigns.process import RunProcess
from harness.cli.console import PlainTextConsole
from harness.cli.main import answered
from harness.driver import PRELOAD
from harness.runtime.fork_server import ForkServer
from harness.runtime.interrupts import keep_interrupts
from harness.runtime.local_runtime import launch_server, server_environment

DRIVER_PRELOAD = (
    "harness.cli.bench",
    "harness.driver.run",
    "harness.planner.automatic",
    "harness.report.plots",
    "harness.report.summary",
    "harness.metrics.mlflow_mirror",
    "mlflow.store.tracking.sqlalchemy_store",
)
"""Modules that a driver imports besides what workers do, MLflow above all."""


class ForkedRuns:
    """Starts runs as `python -m harness bench` would, without its imports, which begin with the first run. As a context
    manager; leaving it ends all that is left of them."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    def start(self, what: str, settings: Sequence[str], log: Path, results: Path) -> RunProcess:
        """A `StartRun`."""
        if self._server is None or self._server.has_ended():
            self._server = launch_server([*PRELOAD, *DRIVER_PRELOAD])
        import torch

        environment, threads = os.environ | {"CADENCE_RESULTS": str(results)}, torch.get_num_threads()
        return RunProcess.fork(what, self._server, _bench, (list(settings), results, environment, threads), log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()


def _bench(settings: list[str], results: Path, environment: Mapping[str, str], threads: int, descriptor: int) -> None:
    """The whole life of a driver's process: as one that was started with this environment."""
    import torch

    from harness.cli import bench

    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_interrupts()
    for name in server_environment():
        os.environ.pop(name, None)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    sys.argv = [str(Path(bench.__file__).parents[1] / "__main__.py"), "bench", *settings]
    with closing(ForkServer.join(descriptor)) as server:
        sys.exit(
            answered(lambda: bench.run(settings, results, PlainTextConsole(), server), PlainTextConsole(stderr=True))
        )
