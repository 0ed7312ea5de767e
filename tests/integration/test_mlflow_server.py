"""The MLflow mirror, against a tracking server that is killed in the middle of a run and comes back."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from harness.config import ConfigError
from harness.metrics.done import INCOMPLETE
from harness.metrics.manifest import RunIdentity
from tests.support.mirrored_run import finished_run, mirrored

# mlflow's own dependencies deprecate things that it still uses.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
START_TIMEOUT_S = 120


class Server:
    """`mlflow server` on loopback, over a database and artifacts that outlive it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = socket.socket()  # bound, so that the kernel gives this port to nobody while no server listens
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        store, artifacts = f"sqlite:///{self.folder / 'server.db'}", str(self.folder / "kept")
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", store, "--artifacts-destination", artifacts]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            log = (self.folder / "server.log").read_text()
            assert self._process.poll() is None and time.monotonic() < deadline, f"mlflow server is not up: {log}"
            time.sleep(0.1)

    def close(self) -> None:
        self.kill()
        self._held.close()

    def kill(self) -> None:
        """kill -9, it and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server.start()
    yield server
    server.close()


def test_a_server_that_is_killed_loses_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.cli.look import mlflow_sync

    results, console = tmp_path / "results", Console(width=200)
    finished_run(results, RunIdentity("whole", "cell", 0, "fully_async", "tiny", "torch", "real"))
    assert not (results / "mlflow.db").exists()

    path = finished_run(
        results, RunIdentity("broken", "cell", 0, "fully_async", "tiny", "torch", "real"), before=at(3, server.kill)
    )
    assert "127.0.0.1" in (path / INCOMPLETE).read_text()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*; start the server, or set MLFLOW_TRACKING_URI"):
        mlflow_sync([], results, console)

    server.start()
    (broken,) = mirrored(results, "broken").values()
    assert broken["status"] == "RUNNING" and set(broken["points"]["reward/mean"]) == {0, 1, 2}
    mlflow_sync([], results, console)
    expected = mirrored(results, "whole")
    assert mirrored(results, "broken") == expected and not (path / INCOMPLETE).exists()
    files = "config.yaml manifest.json metrics.jsonl summary.json system.jsonl".split()
    assert expected["cell seed=0"]["artifacts"] == files
    mlflow_sync([], results, console)
    assert mirrored(results, "broken") == expected
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "brought up to date" in line] == [
        f"2 finished runs, {changed} brought up to date in {server.url}" for changed in (1, 0)
    ]


def at(iteration: int, do: Callable[[], None]) -> Callable[[int], None]:
    return lambda now: do() if now == iteration else None
