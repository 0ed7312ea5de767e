"""All that happens on a socket below the messages: addresses, and frames with descriptors.

An address is "unix:PATH", a socket of this node that only processes of the same user may speak through, or
"tcp:HOST:PORT", over which no descriptors travel; for those who connect, "tcp:HOST:PORT#DIGEST" (`channel`). A frame is
a header, a message, and the descriptors that come with it.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import os
import resource
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Protocol

from harness.rpc.process_id import ProcessId, process_id

_PREFIX = "cadence"
_LONGEST = 30  # characters of where folders are: with folder and name, the kernel takes 107

_folder: Path | None = None
_names: set[str] = set()  # in use
_lock = threading.Lock()


def new_path() -> str:
    """Path of a new socket, or of another file for processes of this host and user; its folder is there, 0700."""
    global _folder
    with _lock:
        if _folder is None:
            shared = Path(tempfile.gettempdir())
            shared = shared if len(str(shared)) <= _LONGEST else Path("/tmp")
            _remove_those_of_the_dead(shared)
            _folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{_own_name()}-", dir=shared))
            atexit.register(_remove, _folder, os.getpid())
        path = str(_folder / secrets.token_hex(8))
        _names.add(path)
        return path


def forget(path: str) -> None:
    """Nobody listens there, or meets, any more. Nothing happens where the path is not of `new_path` in this process."""
    global _folder
    with _lock:
        if path in _names:
            _names.discard(path)
            Path(path).unlink(missing_ok=True)
            if not _names and _folder is not None:
                _remove(_folder, os.getpid())
                _folder = None


def meeting_place(host: str) -> str:
    """The place where processes that reach each other at this address meet: for those of one host a file."""
    return new_path() if ip_address(host).is_loopback else host


def _own_name() -> str:
    """Name of this process: pids are of a namespace, and come again."""
    return f"{_namespace()}-{os.getpid()}-{process_id(os.getpid()).started}"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _remove_those_of_the_dead(shared: Path) -> None:
    for folder in shared.glob(f"{_PREFIX}-{_namespace()}-*-*-*"):
        with suppress(FileNotFoundError):  # another process may remove it, too, or its own
            own = folder.stat().st_uid == os.geteuid()
            if own and not ProcessId(*map(int, folder.name.split("-")[2:4])).alive:
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def _leave_to_parent() -> None:
    global _folder, _lock
    _folder, _lock = None, threading.Lock()
    _names.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


BACKLOG = 4096
_CREDENTIALS = struct.Struct("=iII")  # of a process: its id, user and group

Address = str
SocketAddress = tuple[socket.AddressFamily, str | tuple[str, int]]


def new_address() -> Address:
    """A Unix socket of a new name, in this process's folder."""
    return f"unix:{new_path()}"


def takes_descriptors(address: Address) -> bool:
    """Whether descriptors travel to this address."""
    return address.startswith("unix:")


def socket_address(address: Address) -> SocketAddress:
    """Socket family and the address in it. ValueError for anything else than the two forms."""
    scheme, _, place = address.partition(":")
    host, _, port = place.partition("#")[0].rpartition(":")
    if scheme == "unix" and place:
        return socket.AF_UNIX, place
    if scheme == "tcp" and host and port.isdigit():
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))
    raise ValueError(f"address {address!r} is neither 'unix:PATH' nor 'tcp:HOST:PORT'")


def digest_in(address: Address) -> str:
    """Digest of the certificate that is shown at an address. ValueError without one."""
    place, _, digest = address.partition("#")
    if not digest:
        raise ValueError(f"address {place!r} names no certificate: connect to the one that its server tells")
    return digest


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A non-blocking listening socket, and the address with the port that it got (port 0 = any)."""
    family, place = socket_address(address)
    listener = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        if isinstance(place, str):
            os.chmod(place, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener, address_of(listener)


def address_of(listener: socket.socket) -> Address:
    """The address of a listener, without the digest of a certificate."""
    place = listener.getsockname()
    return f"unix:{place}" if is_of_this_node(listener) else f"tcp:{place[0]}:{place[1]}"


def forget_address(address: Address) -> None:
    """Nobody listens there any more: what a Unix socket of this process left in the file system goes."""
    _, place = socket_address(address)
    if isinstance(place, str):
        forget(place)


def check_peer(sock: socket.socket) -> None:
    """PermissionError where a process of another user is at the other end of a Unix socket, or listened there."""
    if is_of_this_node(sock):
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            raise PermissionError(f"a process of user {uid} is at the other end, not one of user {os.geteuid()}")


def send_at_once(sock: socket.socket) -> None:
    """Requests are small and are waited for: TCP must not collect them."""
    if not is_of_this_node(sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_of_this_node(sock: socket.socket) -> bool:
    """Whether it is a Unix socket."""
    return sock.family == socket.AF_UNIX


class Inherited(Protocol):
    """A client's connection. A forked child has a copy of its parent's, and must not use it."""

    def abandon(self) -> None:
        """Close what this process has of it, and tell neither the other side nor an event loop."""


_held: weakref.WeakSet[Inherited] = weakref.WeakSet()


def abandon_in_children(connection: Inherited) -> None:
    """Let a forked child abandon the connection at once, for as long as it lives."""
    _held.add(connection)


def _forked() -> None:
    for connection in list(_held):
        connection.abandon()
    _held.clear()


os.register_at_fork(after_in_child=_forked)


class ClientSocket(socket.socket):
    """Closed with its last reference, without a warning: a queue's client has no `close`, for a queue outlives its
    clients."""

    def abandon(self) -> None:
        """See `Inherited`."""
        self.close()

    def __del__(self) -> None:
        self.close()


def client_socket(address: Address) -> tuple[ClientSocket, str | tuple[str, int]]:
    """A socket to connect, and what to. A forked child abandons it."""
    family, place = socket_address(address)
    sock = ClientSocket(family)
    abandon_in_children(sock)
    return sock, place


async def connected(address: Address) -> ClientSocket:
    """A socket that does not block, connected to who listens there. OSError where nobody does, PermissionError where
    that is another user."""
    sock, place = client_socket(address)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, place)
        check_peer(sock)
        send_at_once(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def connected_blocking(address: Address, timeout_s: float) -> ClientSocket:
    """`connected`, with a socket that blocks for so long."""
    sock, place = client_socket(address)
    try:
        sock.settimeout(timeout_s)
        sock.connect(place)
        check_peer(sock)
        send_at_once(sock)
    except BaseException:
        sock.close()
        raise
    return sock


_TIMEVAL = struct.Struct("@ll")


def limit_waits(sock: socket.socket, timeout_s: float) -> None:
    """Let it block, in the kernel alone, for so many seconds at most: then a call raises BlockingIOError."""
    sock.settimeout(None)
    limit = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


HEADER = struct.Struct("<IHI")
"""Bytes of the message, descriptors that come with it, number of the call."""
MESSAGE_LIMIT = 512 << 20
"""Bytes: a put, or what a get takes, where payloads are in messages. None is made room for before it comes."""
CHUNK = 64 << 10
ANY_NUMBER = (1 << 16) - 1  # of descriptors, as many as a header can say
_PER_SEND = 250  # descriptors; the kernel takes 253 at a time
_ANCILLARY = socket.CMSG_SPACE(253 * 4)
_CLOSE_ON_EXEC, _CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)  # as enums they cost more than the call


class WireError(ConnectionError):
    """Raised for bytes that are no frame: the stream is of no use any more."""


class Framed(NamedTuple):
    """A frame that was received."""

    call: int
    body: bytes
    descriptors: list[int]


class Framer:
    """Makes frames of messages, which are to be sent in this order. limit: bytes of a message."""

    def __init__(self, limit: int = MESSAGE_LIMIT) -> None:
        self.limit = limit

    def frame(self, call: int, body: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """ValueError for a message that the other side would refuse."""
        if len(body) > self.limit:
            raise ValueError(
                f"a message of {len(body)} bytes is over the limit of {self.limit}: put fewer rows at a time"
            )
        return HEADER.pack(len(body), len(descriptors), call) + body


class Splitter:
    """Cuts a stream into frames. Owns the descriptors that came and belong to no frame yet.

    limit: bytes of a message; WireError on a longer one as soon as it is announced. descriptors: so many may come with
    one; WireError on more.
    """

    def __init__(self, limit: int = MESSAGE_LIMIT, descriptors: int = ANY_NUMBER) -> None:
        self.limit, self.descriptors = limit, descriptors
        self._data = bytearray()
        self._wanted = HEADER.size  # bytes that make the first frame of them whole, as far as is known
        self._descriptors: deque[int] = deque()

    @property
    def unfinished(self) -> int:
        """Bytes of the frame that has begun and is not whole; 0 where none has."""
        return self._wanted if self._data else 0

    @property
    def come(self) -> int:
        """Bytes of it that are here."""
        return len(self._data)

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> list[Framed]:
        """The frames that are complete now."""
        self._descriptors += descriptors
        if self._data:
            self._data += data
            if len(self._data) < self._wanted:
                return []
            data = bytes(self._data)
        frames: list[Framed] = []
        try:
            rest = self._cut(data, frames)
        except WireError:
            for frame in frames:
                close_all(frame.descriptors)
            raise
        self._data = bytearray(data[rest:])
        return frames

    def _cut(self, data: bytes, frames: list[Framed]) -> int:
        """Append the frames that are whole; where the rest begins."""
        start, size, self._wanted = 0, len(data), HEADER.size
        while (body := start + HEADER.size) <= size:
            length, passed, call = HEADER.unpack_from(data, start)
            if length > self.limit:
                raise WireError(f"a message of {length} bytes was announced; the limit is {self.limit}")
            if passed > self.descriptors:
                raise WireError(f"a message with {passed} descriptors was announced; the limit is {self.descriptors}")
            end = body + length
            if size < end:
                self._wanted = HEADER.size + length
                break
            if len(self._descriptors) < passed:
                raise WireError(f"a message came with {len(self._descriptors)} descriptors instead of {passed}")
            descriptors = [self._descriptors.popleft() for _ in range(passed)] if passed else []
            frames.append(Framed(call, data[body:end], descriptors))
            start = end
        if len(self._descriptors) > self.descriptors:
            raise WireError(f"{len(self._descriptors)} descriptors came with no message")
        return start

    def close(self) -> None:
        """The stream has ended. WireError if that was in the middle of a frame."""
        rest = len(self._data)
        self._data.clear()
        close_all(self._descriptors)
        self._descriptors.clear()
        if rest:
            raise WireError(f"the stream ended {rest} bytes into a frame")


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bytes that are there to read, and the descriptors that came with them; no bytes at the end of the stream."""
    data, ancillary, flags, _ = sock.recvmsg(CHUNK, _ANCILLARY, _CLOSE_ON_EXEC)
    if not ancillary:
        return data, []
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if flags & _CUT:
        close_all(descriptors)
        raise WireError("descriptors were lost: this process may open no more files (ulimit -n)")
    return data, descriptors.tolist()


def send_some(sock: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
    """Send by one system call; returns how many bytes went; the descriptors go with the first."""
    if not descriptors:
        return sock.send(data)
    passed = array.array("i", descriptors)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])


def portions(data: bytes, descriptors: Sequence[int]) -> list[tuple[bytes, Sequence[int]]]:
    """Portions that go in one system call each: only so many descriptors can, and each lot needs a byte to ride on."""
    if len(descriptors) <= _PER_SEND:
        return [(data, descriptors)]
    lots = [descriptors[i : i + _PER_SEND] for i in range(0, len(descriptors), _PER_SEND)]
    ends = [*range(1, len(lots)), len(data)]
    return [(data[i:end], lot) for i, (end, lot) in enumerate(zip(ends, lots, strict=True))]


class Outbox:
    """The bytes that a non-blocking socket could not take yet. Holds copies of the descriptors that it owes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._owed: deque[tuple[memoryview, list[int]]] = deque()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._owed)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends what the socket takes, and keeps the rest for `flush`."""
        if not descriptors and not self._owed:
            if (sent := self._try(data, ())) < len(data):
                self.keep(data[sent:])
            return
        for portion, passed in portions(data, descriptors):
            sent = 0 if self._owed else self._try(portion, passed)
            if sent < len(portion):
                self.keep(portion[sent:], passed if not sent else ())

    def keep(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Goes with the next flush."""
        self._owed.append((memoryview(data), [os.dup(descriptor) for descriptor in descriptors]))
        self.nbytes += len(data)

    def flush(self) -> bool:
        """Whether nothing is owed any more."""
        while self._owed:
            data, descriptors = self._owed[0]
            sent = self._try(data, descriptors)
            if not sent:
                return False
            close_all(descriptors)
            self.nbytes -= sent
            if sent < len(data):
                self._owed[0] = data[sent:], []
                return False
            self._owed.popleft()
        return True

    def close(self) -> None:
        """Drop what is owed."""
        for _, descriptors in self._owed:
            close_all(descriptors)
        self._owed.clear()
        self.nbytes = 0

    def _try(self, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
        try:
            return send_some(self._sock, data, descriptors)
        except BlockingIOError:
            return 0


def allow_many_files() -> None:
    """Allow as many open files as this process may have: each connection is one, and each segment of a queue."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def close_all(descriptors: Sequence[int] | deque[int] | array.array[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
