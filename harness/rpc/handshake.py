"""How both ends of a connection prove that they have the same token, before either reads a message of the other.

The server says 32 random bytes; the client 32 of its own and a proof; the server its own proof, or 32 zeros. A proof is
an HMAC-SHA256 of both random numbers: it is good for one side of one connection, and the token itself never travels.
Every step has a fixed size, so that nothing is decoded, and nothing else kept, of who has proved nothing.

Over TCP all of it is said inside TLS (`channel`), whose certificate the client has held against its address before.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from harness.rpc.channel import Channel, channel_to, open_channel

STEP = 32
ANSWER = 2 * STEP
"""Bytes of what the client says: its random number, and its proof."""
REFUSED = bytes(STEP)


def new_token() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(32)


Role = Literal["reader", "writer", "admin"]
"""Roles of clients: what one may do (of a queue: `requests.MAY`) follows from its token. An admin makes the others'
from its own."""


def token_for(role: Role, token: bytes) -> bytes:
    """The token that a client of this role is to prove, from the admin's token."""
    return token if role == "admin" else hmac.digest(token, b"token of a " + role.encode(), "sha256")


def new_nonce() -> bytes:
    """32 bytes that no other connection is challenged with."""
    return secrets.token_bytes(STEP)


@dataclass(frozen=True)
class Handshake:
    """The facts that both ends know of a connection once each has said its random number."""

    token: bytes = field(repr=False)
    challenge: bytes
    answer: bytes

    def client_proof(self) -> bytes:
        """The client's proof that it has the token."""
        return self._made_for(b"client's proof")

    def server_proof(self) -> bytes:
        """The server's proof that it has the token."""
        return self._made_for(b"server's proof")

    def _made_for(self, use: bytes) -> bytes:
        return hmac.digest(self.token, use + self.challenge + self.answer, "sha256")

    @classmethod
    def admitted(cls, token: bytes, challenge: bytes, said: bytes) -> Self | None:
        """The server's, of what a client said; None where it does not prove that it has the token."""
        handshake = cls(token, challenge, said[:STEP])
        return handshake if hmac.compare_digest(handshake.client_proof(), said[STEP:]) else None

    def said(self) -> bytes:
        """The client's answer to the server's challenge."""
        return self.answer + self.client_proof()

    def check(self, proof: bytes, server: str, address: str) -> None:
        """The client's word on what the server answered: PermissionError unless it proves that it has the token."""
        if hmac.compare_digest(proof, REFUSED):
            raise PermissionError(f"{server} refuses a client without its token")
        if not hmac.compare_digest(proof, self.server_proof()):
            raise PermissionError(f"what listens on {address} has not the token of {server}")


class Admission:
    """The server's side of a greeting, without its socket: what a client says goes in.

    tokens: of each role; channel: a new one, which is open when a role is known; send: takes what the client is to get.
    """

    def __init__(self, tokens: Mapping[Role, bytes], channel: Channel, send: Callable[[bytes], None]) -> None:
        self._tokens, self._channel, self._send = tokens, channel, send
        self._challenge, self._said = new_nonce(), b""
        self._challenged = False

    def feed(self, data: bytes) -> Role | None:
        """The role of the client, once it has proved it; nothing to begin with, which sends the challenge where the
        channel needs nothing of the client. PermissionError, and a refusal is sent, without the proof; ConnectionError
        where the channel cannot be opened."""
        if self._challenged:
            return self._proved(self._channel.unseal(data))
        self._send(self._channel.begin(data))
        if self._channel.is_open:
            self._challenged = True
            self._send(self._channel.seal(self._challenge))
        return None

    def _proved(self, data: bytes) -> Role | None:
        self._said += data
        if len(self._said) < ANSWER:
            return None
        for role, token in self._tokens.items():  # none is admitted that says more
            if (handshake := Handshake.admitted(token, self._challenge, self._said)) is not None:
                self._send(self._channel.seal(handshake.server_proof()))
                return role
        self._send(self._channel.seal(REFUSED))
        raise PermissionError("a client without a token was refused")


async def greet(sock: socket.socket, token: bytes, server: str, address: str) -> Channel:
    """The client's side, over a connected socket that does not block. PermissionError as in `check`, and where another
    certificate is shown than the address names; ConnectionError at the end of the stream. server, address: for these
    errors."""
    loop = asyncio.get_running_loop()
    steps = _greeting(token, server, address)
    try:
        say, nbytes = next(steps)
        while True:
            await loop.sock_sendall(sock, say)
            said = b""
            while len(said) < nbytes:
                said += _not_ended(await loop.sock_recv(sock, nbytes - len(said)))
            say, nbytes = steps.send(said)
    except StopIteration as end:
        return end.value


def greet_blocking(sock: socket.socket, token: bytes, server: str, address: str) -> Channel:
    """`greet`, over a socket that blocks."""
    steps = _greeting(token, server, address)
    try:
        say, nbytes = next(steps)
        while True:
            sock.sendall(say)
            said = b""
            while len(said) < nbytes:
                said += _not_ended(sock.recv(nbytes - len(said)))
            say, nbytes = steps.send(said)
    except StopIteration as end:
        return end.value


def _greeting(token: bytes, server: str, address: str) -> Generator[tuple[bytes, int], bytes, Channel]:
    """Bytes that the client sends, and how many bytes it then receives: none beyond the server's proof."""
    channel = channel_to(address)
    say = yield from open_channel(channel)
    challenge = yield from channel.receive(say, STEP)
    handshake = Handshake(token, challenge, new_nonce())
    proof = yield from channel.receive(channel.seal(handshake.said()), STEP)
    handshake.check(proof, server, address)
    return channel


def _not_ended(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("its process has ended")
    return data
