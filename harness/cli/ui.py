"""`make ui`: MLflow on what was written."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError
from harness.metrics.formatting import redacted

_LINKS = 5  # experiments that are printed
_VIEW = "compareRunsMode=CHART&workflowType=machine_learning"  # MLflow's own opens on traces, of which there are none


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Serve MLflow on what was written, on loopback, until interrupted."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if server.startswith("http"):
        mirrored = f"runs are mirrored to {redacted(server)} (MLFLOW_TRACKING_URI): it is its own page"
        console.print(mirrored, highlight=False, markup=False, soft_wrap=True)
        return 0
    database = (results / "mlflow.db").resolve()
    if not database.exists():
        raise ConfigError(f"{database} is not there yet; run `make bench` first")
    port = arguments[0].removeprefix("port=") if arguments else "5000"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"port={port} is no port; use a number such as PORT=5001")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise ConfigError(
                f"port={port} cannot be had ({error.strerror}); use another, such as PORT=5001"
            ) from error
    from harness.metrics.mlflow_mirror import MlflowException, MlflowStore, first_line

    try:
        experiments = MlflowStore(results).newest_experiments()
    except MlflowException as failure:
        raise ConfigError(f"{database}: {first_line(failure)}") from failure
    console.print(f"MLflow on http://127.0.0.1:{port} (Ctrl-C ends it); runs and charts, newest first:")
    for name, number in list(experiments.items())[:_LINKS]:
        link = f"http://127.0.0.1:{port}/#/experiments/{number}/runs?{_VIEW}"
        console.print(f"  {name}: {link}", highlight=False, markup=False, soft_wrap=True)
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # eight processes that no page here asks of
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", port]
    os.execv(sys.executable, [*command, "--backend-store-uri", f"sqlite:///{database}"])
