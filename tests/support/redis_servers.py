"""Redis servers on unix sockets, with a password, that keep nothing on disk."""

import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    path: Path
    password: str

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{self.path}"

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url)


@contextmanager
def redis_server(*settings: str) -> Iterator[Server]:
    """Settings go through its standard input, so that no process list shows the password."""
    with tempfile.TemporaryDirectory() as folder:
        password, path = secrets.token_urlsafe(16), Path(folder) / "socket"
        told = [f"requirepass {password}", f"unixsocket {path}", f"dir {folder}", "port 0", 'save ""', "appendonly no"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(["redis-server", "-"], text=True, **pipes) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n".join([*told, *settings]))
            process.stdin.close()
            try:
                for line in process.stdout:
                    if "ready to accept connections" in line.lower():
                        break
                yield Server(process, path, password)
            finally:
                process.kill()


def keys(servers: tuple[Server, Server]) -> list[bytes]:
    found: list[bytes] = []
    for server in servers:
        with server.client() as client:
            found += client.keys("*")
    return found
