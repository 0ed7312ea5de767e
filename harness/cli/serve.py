"""`cadence serve`: rows and weights of a job over HTTP, for trainers and engines that are not Cadence's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError

TOKEN = "CADENCE_TOKEN"
_PORT = "8767"


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Serve one job until interrupted, on loopback; on another address with a certificate only."""
    own, others = own_arguments(arguments, "port", "host", "certificate", "key")
    if others:
        raise ConfigError(f"serve does not take {others[0]}; it takes port=, host=, certificate= and key=")
    given = {name: values[-1] for name, values in own.items() if values and values[-1]}
    port = given.get("port", _PORT)
    if not port.isdecimal() or not int(port) < 65536:
        raise ConfigError(f"port={port} is no port; use a number such as port={_PORT}, or 0 for a free one")
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"set {TOKEN} to the token that trainer and engines will send: export {TOKEN}=$(openssl rand -hex 32)"
        )
    from harness.runtime.http_server import LOOPBACK

    host, certificate = given.get("host", LOOPBACK), _certificate(given)
    if host != LOOPBACK and certificate is None:
        raise ConfigError(f"host={host} is not this machine alone: give certificate= and key=, PEM files, too")
    try:
        asyncio.run(_serve(host, int(port), token, certificate, console))
    except OSError as error:
        raise ConfigError(f"host={host} port={port} cannot be had: {error.strerror or error}") from error
    return 0


def _certificate(given: Mapping[str, str]) -> tuple[Path, Path] | None:
    """And its key."""
    if not {"certificate", "key"} & given.keys():
        return None
    for name in ("certificate", "key"):
        if not Path(given.get(name, "")).is_file():
            raise ConfigError(f"{name}={given.get(name, '')} is no file; TLS takes certificate= and key=, PEM files")
    return Path(given["certificate"]), Path(given["key"])


async def _serve(host: str, port: int, token: str, certificate: tuple[Path, Path] | None, console: Console) -> None:
    from harness.runtime.http_server import serving
    from harness.service.app import service_app

    with TemporaryDirectory(prefix="cadence-service-") as folder:  # which nobody else may enter
        async with serving(service_app(token, Path(folder)), host, port, certificate=certificate) as url:
            console.print(f"serving one job on {url} (Ctrl-C ends it)", highlight=False)
            await asyncio.Event().wait()
