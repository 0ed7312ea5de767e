"""Every socket that a run listens on: where it is, and what it tells those without the token (docs/security.md)."""

import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest

from harness.rpc.handshake import ANSWER, REFUSED, STEP
from tests.support.another_user import open_folder, tried_by_another_user
from tests.support.project import ROOT
from tests.support.real_runs import SMALL, STARTED_WITHIN_S, command, environment, wait_for_lines

pytestmark = pytest.mark.slow

EXPERIMENT = "listening"


def said_to_a_stranger(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(STARTED_WITHIN_S)
        stranger.connect(path)
        stranger.sendall(os.urandom(ANSWER))
        heard = b""
        while more := stranger.recv(4096):
            heard += more
    return heard


@pytest.fixture
def results() -> Iterator[Path]:
    with open_folder() as path:
        yield path


def test_a_run_listens_for_its_user_on_this_machine_alone_and_refuses_who_has_no_token(results: Path) -> None:
    settings = (*SMALL.split(), "schedule=fully_async", "iterations=10000", "cluster.serve_membership=true")
    run = subprocess.Popen(
        command(f"experiment={EXPERIMENT}", "seeds=[0]", *settings),
        cwd=ROOT,
        env=environment(results),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_lines(results, EXPERIMENT, 3, run)
        family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        unix = {one.laddr for process in family for one in process.net_connections("unix") if one.laddr}
        inet = {
            one.laddr
            for process in family
            for one in process.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        assert unix and inet, "a queue, workers, Gloo, and the membership"
        for path in unix:
            folder = Path(path).parent
            assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.geteuid()), path
            heard = said_to_a_stranger(path)
            assert heard[STEP:] == REFUSED, path
        assert {address.ip for address in inet} == {"127.0.0.1"}
        (served,) = results.glob(f"{EXPERIMENT}/*/seed=0/membership.json")
        given = msgspec.json.decode(served.read_bytes())
        url = given["url"]
        driver = [one.laddr.port for one in family[0].net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert driver == [httpx2.URL(url).port], "ranks meet in a file, at no store of torch's"
        assert stat.S_IMODE(served.stat().st_mode) == 0o600
        if os.geteuid() == 0:
            closed = [*unix, str(served)]
            assert tried_by_another_user(closed) == dict.fromkeys(closed, "EACCES")
            for path in unix:
                Path(path).parent.chmod(0o755)
                Path(path).chmod(0o666)
            assert tried_by_another_user(unix) == dict.fromkeys(unix, "heard 0 bytes"), "nobody answers them"
        for path in ("/topology", "/health", "/metrics", "/docs", "/openapi.json"):
            assert httpx2.get(f"{url}{path}", trust_env=False).status_code == 401
        metrics = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {given['token']}"}, trust_env=False)
        for told in ('cadence_role_up{role="actor[0]"} 1.0', 'cadence_metric{name="throughput/samples_per_s"}'):
            assert told in metrics.text
        for address in inet:  # Gloo's ask for no token, and nobody gets through to one
            if address.port not in driver:
                with pytest.raises(TimeoutError):
                    socket.create_connection(address, timeout=0.3)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
