"""Payloads in redis servers: the only import of redis.

A partition is one hash on each server (`<queue>:<partition>`), with one field for each column of a frame. So a reader
gets the columns it asks for in one round trip per server, and dropping a partition is one command, which also takes
what writers left that died before they announced it. Hashes expire: a queue that was killed leaves nothing for ever.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from harness.transfer_queue.rows.frames import Buffer
from harness.transfer_queue.storage.inline import SMALL
from harness.transfer_queue.storage.protocol import QueueSession
from harness.transfer_queue.storage.units import FrameColumn, UnitStorage, UnitStore

DAY_S = 86_400
SERVERS = "CADENCE_REDIS"


@dataclass(frozen=True, slots=True)
class RedisBackend:
    """urls: redis://user:password@host:port/database, rediss://... or unix://...; a partition spreads over all of them.
    timeout_s: how long a server may take to accept a connection, or to take or give bytes.
    expire_s: how long a partition outlives its last write or read, if it is not dropped.
    inline_bytes: of a put that goes in its message.

    Servers must not evict (maxmemory-policy noeviction, which is redis's default). ValueError for what is no such URL.
    """

    urls: tuple[str, ...] = field(repr=False)  # they hold passwords
    timeout_s: float = 10.0
    expire_s: int = DAY_S
    inline_bytes: int = SMALL

    def __post_init__(self) -> None:
        if not self.urls or isinstance(self.urls, str):
            raise ValueError("urls must be a tuple of the URLs of one or more redis servers")
        if self.timeout_s <= 0 or self.expire_s < 1:
            raise ValueError(f"timeout_s and expire_s must be positive, not {self.timeout_s} and {self.expire_s}")
        for i, url in enumerate(self.urls):
            try:
                parse_url(url)
            except ValueError:  # its text may hold the password
                raise ValueError(f"urls[{i}] is not redis://, rediss:// or unix://, percent-encoded") from None

    def storage(self, session: QueueSession) -> UnitStorage:
        return UnitStorage(self._servers(session.queue), session.writer, self.inline_bytes)

    def store(self, queue: str) -> UnitStore:
        """Connects: ConnectionError, TimeoutError or PermissionError for a server that cannot be used; ValueError for
        one that may evict."""
        return UnitStore(self.checked(queue))

    def checked(self, queue: str) -> list[RedisServer]:
        """The servers, once all of them have answered. Raises as `store`."""
        servers = self._servers(queue)
        for server in servers:
            server.check()
        return servers

    def _servers(self, queue: str) -> list[RedisServer]:
        return [RedisServer(url, queue, self.timeout_s, self.expire_s) for url in self.urls]


@dataclass(frozen=True, slots=True)
class RedisServers:
    """Settings of a job of its servers (`cluster.queue=redis`). urls: as `RedisBackend` has them, without a password,
    which would stand in config.yaml; those of the environment variable CADENCE_REDIS, with blanks between them and
    passwords where there are any, unless given."""

    urls: tuple[str, ...] = ()
    timeout_s: float = 10.0
    expire_s: int = DAY_S
    inline_bytes: int = SMALL

    def open(self) -> RedisBackend:
        """Raises ValueError for what is no URL, or has a password."""
        if any(urlsplit(url).password for url in self.urls):
            raise ValueError(f"a URL of urls holds a password, which config.yaml would tell; set {SERVERS} to it")
        urls = self.urls or tuple(os.environ.get(SERVERS, "").split())
        if not urls:
            raise ValueError(
                f"no server is named; set cluster.queue_options.urls=[redis://127.0.0.1:6379/0], or {SERVERS}"
            )
        return RedisBackend(urls, self.timeout_s, self.expire_s, self.inline_bytes)

    def check(self) -> None:
        """Ask every server, within timeout_s. Raises as `RedisBackend.store`."""
        for server in self.open().checked("check"):
            server.close()


class RedisServer:
    """A `Unit`. Its errors name it and what was asked of it, never its password."""

    def __init__(self, url: str, queue: str, timeout_s: float, expire_s: int) -> None:
        self.name = f"redis at {_public(url)}"
        self._queue = queue
        self._timeout_s = timeout_s
        self._expire_s = expire_s
        self._redis = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )

    def check(self) -> None:
        """Raises ValueError where the server may evict rows."""
        (memory,) = self._ask("tell of its memory", ("INFO", "memory"))
        if (policy := memory["maxmemory_policy"]) != "noeviction":
            raise ValueError(f"{self.name} may evict rows: set its maxmemory-policy to noeviction, not {policy}")

    def store(self, partition: str, number: int, buffers: Mapping[str, Buffer]) -> None:
        key = self._key(partition)
        cells = chain.from_iterable((_field(number, column), buffer.data) for column, buffer in buffers.items())
        self._ask(f"write to partition {partition!r}", ("HSET", key, *cells), ("EXPIRE", key, self._expire_s))

    def load(self, partition: str, cells: Sequence[FrameColumn]) -> list[Buffer | None]:
        key = self._key(partition)
        fields = [_field(cell.number, cell.column) for cell in cells]
        what = f"read partition {partition!r}"
        values, _ = self._ask(what, ("HMGET", key, *fields), ("EXPIRE", key, self._expire_s))
        return [None if value is None else np.frombuffer(value, np.uint8) for value in values]

    def forget(self, partition: str, number: int, columns: Collection[str]) -> None:
        fields = [_field(number, column) for column in columns]
        self._ask(f"delete from partition {partition!r}", ("HDEL", self._key(partition), *fields))

    def drop(self, partitions: Collection[str]) -> None:
        self._ask(f"drop {len(partitions)} partitions", ("UNLINK", *map(self._key, partitions)))

    def clear(self) -> None:
        cursor, pattern = 0, f"{glob.escape(self._queue)}:*"
        while True:
            ((cursor, keys),) = self._ask("list its keys", ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
            if keys:
                self._ask(f"drop {len(keys)} partitions", ("UNLINK", *keys))
            if not cursor:
                return

    def close(self) -> None:
        self._redis.close()

    def _key(self, partition: str) -> str:
        return f"{self._queue}:{partition}"

    def _ask(self, what: str, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to these commands, in one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return pipeline.execute()
        except redis.TimeoutError as error:
            raise TimeoutError(f"{self.name} took more than {self._timeout_s} s to {what}") from error
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise PermissionError(f"{self.name} refused to {what}: {error}") from error
        except redis.ConnectionError as error:
            raise ConnectionError(f"{self.name} could not {what}: {error}") from error
        except redis.RedisError as error:
            raise RuntimeError(f"{self.name} could not {what}: {error}") from error


def _field(number: int, column: str) -> str:
    return f"{number}:{column}"


def _public(url: str) -> str:
    """The URL without user, password and options."""
    parts = parse_url(url)
    if "path" in parts:
        return f"unix://{parts['path']}"
    return f"redis://{parts.get('host', 'localhost')}:{parts.get('port', 6379)}/{parts.get('db', 0)}"
