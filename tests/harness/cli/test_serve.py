"""`cadence serve`: what it refuses before anything listens; and that it speaks TLS where it is told to."""

import os
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from harness.cli import main as cli
from harness.rpc.http_server import LOOPBACK, serving
from harness.service.app import service_app
from tests.support.certificates import certificate_in, needs_openssl

TOKEN = "a token"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["port=http"], "port=http is no port; use a number such as port=8767, or 0 for a free one"),
        (["host=0.0.0.0"], "host=0.0.0.0 is not this machine alone: give --certificate and --key, PEM files, too"),
        (["certificate=nope.pem"], "certificate=nope.pem is no file; TLS takes certificate= and --key, PEM files"),
        (["jobs=2"], "serve does not take jobs=2; it takes --port --host --certificate --key"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CADENCE_TOKEN", TOKEN)
    assert cli.main(["serve", *arguments]) == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_without_a_token_nothing_is_served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CADENCE_TOKEN", raising=False)
    assert cli.main(["serve"]) == 2
    assert "set CADENCE_TOKEN to the token that trainer and engines will send" in capsys.readouterr().err


@needs_openssl
async def test_with_a_certificate_it_speaks_tls_alone(tmp_path: Path) -> None:
    files = certificate_in(tmp_path)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with serving(service_app(TOKEN, tmp_path), certificate=files) as url:
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(files[0]))
        async with httpx2.AsyncClient(verify=trusted, headers=headers, trust_env=False) as http:
            assert (await http.get(f"{url}/health")).json()["job"] is False
        async with httpx2.AsyncClient(headers=headers, trust_env=False) as http:
            with pytest.raises(httpx2.TransportError):
                await http.get(f"http{url.removeprefix('https')}/health")


SERVE_UNTIL_PROMPTS_COME = """
import os, sys
import harness.service.app
from harness.cli.main import main
from harness.runtime.interrupts import keep_interrupts

def decode(body):
    os.kill(os.getpid(), {number})
    raise ValueError("no prompts")

harness.service.app.decode = decode
keep_interrupts()
sys.exit(main(["serve", "port=0"]))
"""


ENGINES = 300  # more than anybody else may have who serves HTTP here


@pytest.mark.slow
@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_signal_ends_it_in_a_line_whoever_waits(number: signal.Signals, told: str, tmp_path: Path) -> None:
    script = SERVE_UNTIL_PROMPTS_COME.format(number=int(number))
    environment = os.environ | {"CADENCE_TOKEN": TOKEN, "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as serving_one:
        try:
            port = int(serving_one.stdout.readline().split()[4].rpartition(":")[2])
            with ExitStack() as connections:
                engines = [connections.enter_context(connected(port)) for _ in range(ENGINES)]
                for engine in engines:
                    assert asked(engine, "GET /health") == b"200"
                    begin(engine, "GET /versions?timeout_s=60")
                assert asked(connections.enter_context(connected(port)), "POST /load_prompt_data") == b"400"
                out, err = serving_one.communicate(timeout=60)
        finally:
            serving_one.kill()
    assert (serving_one.returncode, out, err) == (128 + number, f"{told}; the job is over\n", "")
    assert not list(tmp_path.iterdir())


def connected(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), timeout=60)


def begin(connection: socket.socket, request: str) -> None:
    connection.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())


def asked(connection: socket.socket, request: str) -> bytes:
    """The status of the answer."""
    begin(connection, request)
    return connection.recv(1 << 12).split()[1]
