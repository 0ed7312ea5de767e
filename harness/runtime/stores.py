"""The store where the processes of a torch.distributed group meet: on one host a file that only their user can open;
between hosts a server of the run's own, inside TLS and for those who have its token, which is a part of the place that
they are told. torch's own server asks nobody who they are."""

import asyncio
import json
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from harness.rpc.channel import Channel
from harness.rpc.handshake import Role, greet_blocking, new_token
from harness.rpc.listener import Listener
from harness.rpc.sockets import CHUNK, Framed, Framer, Splitter, connected_blocking, listen
from harness.rpc.stream import Room, ServedStream

_LIMIT = 1 << 20  # bytes of a message: addresses, and what groups count
_LOOK_AGAIN_S = 1e-3, 0.05  # at first, and at most, where a key is waited for


def open_store(place: str, size: int, timeout_s: float) -> tuple[dist.Store, str]:
    """A store for `size` processes, which lives as long as it is held, and the place where the others join it. place: a
    path, in a folder of their user's own, or an address of this host."""
    if place.startswith("/"):
        return join_store(place, size, timeout_s), place
    server = _Server(place)
    store = join_store(server.place, size, timeout_s)
    weakref.finalize(store, server.end)
    return store, server.place


def join_store(place: str, size: int, timeout_s: float) -> dist.Store:
    """The store that was opened for `size` processes at this place. RuntimeError where there is none."""
    if not place.startswith("/"):
        return _Joined(place, timeout_s)
    store = dist.FileStore(place, size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class _Request(NamedTuple):
    """A wish of a member. add: to the number that is there; without it, and without a value, the key is looked up."""

    key: str
    value: str | None = None
    add: int | None = None
    delete: bool = False


_BYTES = "latin-1"  # of values, as JSON has them: a bare machine has no msgspec


class _Server:
    """Keeps the values, in a thread of its own, until `end`."""

    def __init__(self, host: str) -> None:
        listener, _ = listen(f"tcp:{host}:0")
        token = new_token()
        self._values: dict[str, str] = {}
        self._room, self._streams = Room(), set[ServedStream]()
        self._listener = Listener(listener, {"admin": token}, self._admit)
        self.place = f"{self._listener.address} {token.hex()}"
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        async def start() -> None:
            self._listener.start()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._listener.close()
        for stream in list(self._streams):
            stream.close()
        self._loop.close()

    def _admit(self, sock: socket.socket, channel: Channel, role: Role) -> None:
        def answer(frame: Framed) -> None:
            stream.send(frame.call, json.dumps(self._answer(_Request(*json.loads(frame.body)))).encode())

        stream = ServedStream(
            sock,
            channel,
            answer,
            lambda error: self._streams.discard(stream),
            name="a member of a group",
            refusal=lambda error: b"",
            room=self._room,
            limit=_LIMIT,
        )
        self._streams.add(stream)

    def _answer(self, asked: _Request) -> str | None:
        """The value, as it is now; of one that is deleted, as it was."""
        if asked.delete:
            return self._values.pop(asked.key, None)
        if asked.add is not None:
            self._values[asked.key] = str(int(self._values.get(asked.key, "0")) + asked.add)
        elif asked.value is not None:
            self._values[asked.key] = asked.value
        return self._values.get(asked.key)


class _Joined(dist.Store):
    """A member's, for any of its threads. torch holds no more of it than what is in C++: who made it holds it as long
    as a group of it is used."""

    def __init__(self, place: str, timeout_s: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        address, _, token = place.partition(" ")
        self._asking, self._framer, self._splitter = threading.Lock(), Framer(_LIMIT), Splitter(_LIMIT)
        try:
            self._sock = connected_blocking(address, timeout_s)
            self._channel = greet_blocking(self._sock, bytes.fromhex(token), "the store", address)
        except OSError as error:
            raise RuntimeError(f"no store of this run is at {address.partition('#')[0]}: {error}") from error

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_Request(key, (value.encode() if isinstance(value, str) else value).decode(_BYTES)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(_Request(key)) or b""

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_Request(key, add=amount)) or 0)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask(_Request(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self.timeout  # type: ignore[attr-defined]
        deadline, (pause, longest) = time.monotonic() + limit.total_seconds(), _LOOK_AGAIN_S
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"wait timeout: nobody wrote {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def delete_key(self, key: str) -> bool:
        return self._ask(_Request(key, delete=True)) is not None

    def clone(self) -> dist.Store:
        return self

    def _ask(self, request: _Request) -> bytes | None:
        frame = self._framer.frame(1, json.dumps(request).encode())
        with self._asking:
            try:
                self._sock.sendall(self._channel.seal(frame))
                while True:
                    data = self._sock.recv(CHUNK)
                    if not data:
                        raise ConnectionError("its process has ended")
                    if frames := self._splitter.feed(self._channel.unseal(data)):
                        answer = json.loads(frames[0].body)
                        return None if answer is None else answer.encode(_BYTES)
            except OSError as error:
                self._sock.close()
                raise RuntimeError(f"the store does not answer: {error}") from error
