"""Where a queue listens: "unix:NAME", an abstract socket of this node, which leaves nothing on disk, or
"tcp:HOST:PORT", over which no descriptors travel."""

from __future__ import annotations

import secrets
import socket

BACKLOG = 4096

Address = str
Endpoint = tuple[socket.AddressFamily, str | tuple[str, int]]


def new_address() -> Address:
    """An abstract unix socket that nobody else listens on."""
    return f"unix:transfer-queue-{secrets.token_hex(8)}"


def takes_descriptors(address: Address) -> bool:
    return address.startswith("unix:")


def endpoint(address: Address) -> Endpoint:
    """Socket family and the address in it. ValueError for anything else than the two forms."""
    scheme, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if scheme == "unix" and place:
        return socket.AF_UNIX, "\0" + place
    if scheme == "tcp" and host and port.isdigit():
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))
    raise ValueError(f"address {address!r} is neither 'unix:NAME' nor 'tcp:HOST:PORT'")


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A non-blocking listening socket, and the address with the port that it got (port 0 = any)."""
    family, place = endpoint(address)
    listener = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    if family == socket.AF_UNIX:
        return listener, address
    host, port = listener.getsockname()[:2]
    return listener, f"tcp:{host}:{port}"


class ClientSocket(socket.socket):
    """Goes quietly with whoever holds it: a queue's client has no `close`, for a queue outlives its clients."""

    def __del__(self) -> None:
        self.close()


def client_socket(address: Address) -> tuple[ClientSocket, str | tuple[str, int]]:
    """A socket to connect, and what to."""
    family, place = endpoint(address)
    return ClientSocket(family), place


def send_at_once(sock: socket.socket) -> None:
    """Requests are small and are waited for: TCP must not collect them."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
