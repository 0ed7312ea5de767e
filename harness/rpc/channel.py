"""Channels of connections: plain bytes over a Unix socket, TLS 1.3 over TCP.

A listener on TCP makes a certificate of its own, in memory alone, and its address ends with the digest of it: a client
takes this certificate and no other, so that neither hosts' names, nor clocks, nor a list of authorities count.
"""

import os
import socket
import ssl
from collections.abc import Callable, Generator
from datetime import datetime
from functools import cache, partial
from hashlib import sha256
from hmac import compare_digest
from typing import NoReturn, Protocol

from harness.rpc.sockets import Address, address_of, digest_in, is_of_this_node, takes_descriptors

_HEADER = 5  # bytes of a record, of which the last two say how many follow
_RECORD = 16 << 10  # bytes of one at most, when it is open
_PIECE = 256 << 10  # sealed at a time: the buffer between stays small

Reading = Generator[tuple[bytes, int], bytes, bytes]
"""Yields what to send, and how many bytes to receive after it; is sent these."""


class Channel(Protocol):
    """A side of a connection. What is sealed has to be sent, in this order; after an error it is of no use."""

    is_open: bool
    """Whether both sides have said what it needs first."""

    def begin(self, said: bytes) -> bytes:
        """Bytes to send next until it is open, once the other side has said this. ConnectionError where it cannot be,
        PermissionError where the server has another certificate than its address names."""

    def seal(self, data: bytes) -> bytes:
        """Bytes to send for the data."""

    def unseal(self, data: bytes) -> bytes:
        """Data that the other side sent, as far as it is here. ConnectionError where somebody in between changed it."""

    def receive(self, say: bytes, nbytes: int) -> Reading:
        """Read so many bytes that the other side sent; no byte of what follows is received. say: goes first, as it
        is."""


class Plain:
    """The channel of a Unix socket: the kernel lets nobody else read it."""

    is_open = True

    def begin(self, said: bytes) -> bytes:
        return b""

    def seal(self, data: bytes) -> bytes:
        return data

    def unseal(self, data: bytes) -> bytes:
        return data

    def receive(self, say: bytes, nbytes: int) -> Reading:
        return (yield say, nbytes)


class Tls:
    """The channel of a TCP connection. digest: of the certificate that the other side has to have; None for a server,
    whose clients have none."""

    def __init__(self, context: ssl.SSLContext, digest: str | None = None) -> None:
        self.is_open = False
        self._digest = digest
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=digest is None)

    def begin(self, said: bytes) -> bytes:
        self._incoming.write(said)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._outgoing.read()
        except ssl.SSLError as error:
            _fail(error)
        if self._digest is not None:
            theirs = sha256(self._tls.getpeercert(binary_form=True) or b"").hexdigest()
            if not compare_digest(theirs, self._digest):
                raise PermissionError("another certificate than that of its address is shown there")
        self.is_open = True
        return self._outgoing.read()

    def seal(self, data: bytes) -> bytes:
        sealed, rest = [], memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_PIECE]) :]
                sealed.append(self._outgoing.read())
        except ssl.SSLError as error:
            _fail(error)
        return b"".join(sealed)

    def unseal(self, data: bytes) -> bytes:
        self._incoming.write(data)
        opened = []
        try:
            while portion := self._tls.read(_RECORD):
                opened.append(portion)
        except ssl.SSLWantReadError:
            return b"".join(opened)
        except ssl.SSLError as error:
            _fail(error)
        raise ConnectionError("the other side has ended the connection")

    def receive(self, say: bytes, nbytes: int) -> Reading:
        received = b""
        while len(received) < nbytes:
            received += self.unseal((yield from _record(say)))
            say = b""
        return received


def _record(say: bytes) -> Reading:
    header = yield say, _HEADER
    return header + (yield b"", int.from_bytes(header[-2:]))


def _fail(error: ssl.SSLError) -> NoReturn:
    why = (error.reason or str(error)).replace("_", " ").lower()
    raise ConnectionError(f"what came is not what the other side sent, or no TLS: {why}") from None


def server_channels(listener: socket.socket) -> tuple[Callable[[], Channel], Address]:
    """A maker of the server's side of each connection to this listener; and its address, as clients have to have it."""
    address = address_of(listener)
    if is_of_this_node(listener):
        return Plain, address
    context = _tls_1_3(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody comes back to a session
    key_and_certificate, digest = _new_certificate()
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, key_and_certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return partial(Tls, context), f"{address}#{digest}"


def channel_to(address: Address) -> Channel:
    """The client's side. ValueError where the address is one of TCP and names no certificate."""
    return Plain() if takes_descriptors(address) else Tls(_client_context(), digest_in(address))


def open_channel(channel: Channel) -> Reading:
    """The client's steps until it is open; what to say next."""
    say = channel.begin(b"")
    while not channel.is_open:
        header = yield say, _HEADER
        say = channel.begin(header)  # what is no record ends it here
        body = yield say, int.from_bytes(header[-2:])
        say = channel.begin(body)
    return say


@cache
def _client_context() -> ssl.SSLContext:
    context = _tls_1_3(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # by an authority; `Tls` holds it against its digest
    return context


def _tls_1_3(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _new_certificate() -> tuple[bytes, str]:
    """A private key with its certificate, as PEM, and the digest of the latter."""
    from cryptography import x509  # 60 ms that no Unix socket needs
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cadence")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime(1970, 1, 1))
        .not_valid_after(datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return private + public, certificate.fingerprint(hashes.SHA256()).hex()
