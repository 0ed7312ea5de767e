"""Accepting connections: of those who prove that they have a token, in their time, and of so many strangers at once."""

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping

from harness.rpc.channel import Channel, server_channels
from harness.rpc.handshake import Admission, Role
from harness.rpc.sockets import CHUNK, check_peer, send_at_once

_HANDSHAKE_S = 30.0  # that a stranger has to prove itself
_STRANGERS = 256  # connections that have proved nothing yet
_PATIENCE_S = 1.0  # that each of them has, where there are so many
_RETRY_S = 0.1  # between two tries to accept while this process may open no more files, or no more strangers are let in

Admitted = Callable[[socket.socket, Channel, Role], None]


class Listener:
    """Hands over connections that proved a role, from `start` to `close`, in the event loop that runs.

    sock: listens, does not block; tokens: of each role; on_admitted: takes over a socket with its open channel. Where
    there are too many strangers, the oldest goes once it has had its time, and others wait in the backlog.
    """

    def __init__(self, sock: socket.socket, tokens: Mapping[Role, bytes], on_admitted: Admitted) -> None:
        self._sock = sock
        self.tokens, self.on_admitted = tokens, on_admitted
        self._new_channel, self.address = server_channels(sock)
        self.strangers: dict[_Stranger, None] = {}  # in the order in which they came

    def start(self) -> None:
        """Accept connections in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Strangers are sent away; who was handed over is not touched."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        for stranger in list(self.strangers):
            stranger.close()

    def _accept(self) -> None:
        if not self._has_room():
            return self._pause()
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                raise
            return self._pause()
        try:
            check_peer(sock)
        except PermissionError:
            return sock.close()
        sock.setblocking(False)
        send_at_once(sock)
        _Stranger(self, sock, self._new_channel()).begin()

    def _has_room(self) -> bool:
        """Whether there is room for one more stranger: the oldest goes where it has had its time."""
        if len(self.strangers) < _STRANGERS:
            return True
        oldest = next(iter(self.strangers))
        if self._loop.time() - oldest.since < _PATIENCE_S:
            return False
        oldest.close()
        return True

    def _pause(self) -> None:
        """Clients wait in the backlog until another has gone, or proved itself."""
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)


class _Stranger:
    """A connection that has proved nothing yet. What it is sent before is so little that a new socket takes it."""

    def __init__(self, listener: Listener, sock: socket.socket, channel: Channel) -> None:
        self._listener, self._sock, self._channel = listener, sock, channel
        self._admission = Admission(listener.tokens, channel, self._send)
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._deadline = self._loop.call_later(_HANDSHAKE_S, self.close)

    def begin(self) -> None:
        self._listener.strangers[self] = None
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._feed(b"")

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._leave()
            self._sock.close()

    def _leave(self) -> None:
        """Be a stranger no more."""
        self._deadline.cancel()
        self._loop.remove_reader(self._sock.fileno())
        del self._listener.strangers[self]

    def _readable(self) -> None:
        """No descriptor is taken: the kernel closes those of bytes that are read without asking for them."""
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            return self.close()
        if data:
            self._feed(data)
        else:
            self.close()

    def _feed(self, data: bytes) -> None:
        try:
            role = self._admission.feed(data)
        except OSError:  # it has gone, it speaks no TLS, or it was refused
            return self.close()
        if role is not None:
            self._leave()
            self._listener.on_admitted(self._sock, self._channel, role)

    def _send(self, data: bytes) -> None:
        if data and self._sock.send(data) < len(data):
            raise ConnectionError("a stranger takes nothing")
