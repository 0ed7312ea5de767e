"""`cadence serve`: rows and weights of a job over HTTP, for trainers and engines that are not Cadence's."""

import asyncio
import os
import signal
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError
from harness.config.fields import whole_number
from harness.metrics.formatting import say

TOKEN = "CADENCE_TOKEN"
_PORT = "8767"
_OTHERS = 256  # connections, beside two of each engine: for rows, and for weights


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Serve one job until interrupted, on loopback; on another address with a certificate only."""
    given, _ = own_arguments(arguments, "port", "host", "certificate", "key")
    port = whole_number(given.get("port", _PORT))
    if port is None or not port < 65536:
        raise ConfigError(f"port={given['port']} is no port; use a number such as port={_PORT}, or 0 for a free one")
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"set {TOKEN} to the token that trainer and engines will send: export {TOKEN}=$(openssl rand -hex 32)"
        )
    from harness.rpc.http_server import LOOPBACK

    host, certificate = given.get("host", LOOPBACK), _certificate(given)
    if host != LOOPBACK and certificate is None:
        raise ConfigError(f"host={host} is not this machine alone: give certificate= and key=, PEM files, too")
    try:
        number = asyncio.run(_serve(host, port, token, certificate, console))
    except OSError as error:
        raise ConfigError(f"host={host} port={port} cannot be had: {error.strerror or error}") from error
    console.print(f"{'interrupted' if number == signal.SIGINT else 'ended by SIGTERM'}; the job is over")
    return 128 + number


def _certificate(given: Mapping[str, str]) -> tuple[Path, Path] | None:
    """Paths of certificate and key; None where neither is given."""
    if not {"certificate", "key"} & given.keys():
        return None
    for name in ("certificate", "key"):
        if not Path(given.get(name, "")).is_file():
            raise ConfigError(f"{name}={given.get(name, '')} is no file; TLS takes certificate= and key=, PEM files")
    certificate, key = Path(given["certificate"]), Path(given["key"])
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"certificate={certificate} key={key} are not PEM files of TLS: {error}; docs/clusters.md makes such"
        ) from error
    return certificate, key


async def _serve(host: str, port: int, token: str, certificate: tuple[Path, Path] | None, console: Console) -> int:
    """Serve until a signal ends it; returns which one."""
    from harness.rpc.http_server import serving
    from harness.rpc.sockets import allow_many_files
    from harness.service.app import service_app
    from harness.service.requests import MOST_ENGINES

    allow_many_files()
    many = 2 * MOST_ENGINES + _OTHERS
    ended = _end_asked()
    with TemporaryDirectory(prefix="cadence-service-") as folder:  # which nobody else may enter
        app = service_app(token, Path(folder))
        async with serving(app, host, port, certificate=certificate, connections=many) as url:
            say(console, f"serving one job on {url} (Ctrl-C ends it)")
            return await ended


def _end_asked() -> asyncio.Future[int]:
    """The first SIGINT or SIGTERM from now on: neither ends what the event loop does just then, which would tell it as
    an error of a request and go on. Those that are ignored stay so."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[int] = loop.create_future()

    def ask(number: int) -> None:
        if not asked.done():
            asked.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, ask, number)
    return asked
