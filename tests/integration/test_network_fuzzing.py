"""What anybody may say to a queue: nothing of it hangs it, ends in a traceback or takes memory that stays, and who
behaves is served meanwhile. Of services: tests/harness/service/test_fuzzed_requests."""

import gc
import logging
import socket
from contextlib import closing, suppress
from random import Random

import msgspec
import numpy as np
import psutil
import pytest

from harness.rpc.channel import channel_to
from harness.rpc.handshake import ANSWER, greet_blocking, token_for
from harness.rpc.sockets import HEADER, Framer, socket_address
from harness.transfer_queue import GetRequest
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.requests import read_verb
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.inline import InlineBackend
from tests.support.mutations import spoilt
from tests.support.queue_sides import ServerThread
from tests.support.remote_queue import SPEC, ids, tokens

pytestmark = pytest.mark.slow

ANSWER_S = 60.0
ROWS = np.arange(4).tobytes()
KNOWN = [
    m.encode(message)
    for message in (
        m.CreatePartition("x", ROWS, 2, None), m.OpenSegment("x", 1 << 32),
        m.Put("x", ROWS, Frame(4, {"reward": 16}, bytes(16)), {}),
        m.Put("x", ROWS, Frame(4, {"tokens": 72}, bytes(72)), {"tokens": ROWS}),
        m.Get(GetRequest("score", 2, minimum=1, timeout_s=0.0)),
        m.Get(GetRequest("train", 2, partition="x", first=("score", ((1, 1),)), only=(1, 2))), m.Received(3),
        m.Withdraw(3), m.Verb("set_bound", ("score", "0", 7)), m.Verb("drop", ("train", "score", 7)),
        m.Verb("begin_again", ("x", [1, 2])), m.Verb("give_up", ("x", [1])), m.Verb("finish", ("x", [0])),
        m.Verb("acknowledge", (1,)), m.Verb("give_back", (1 << 62,)), m.Verb("release", ("0",)),
        m.Verb("clear", ("x",)), m.Verb("clear_finished"), m.Verb("waiting"), m.Verb("describe"),
        m.Verb("lacking", ("actor", "step/1", 2)), m.Verb("note", ("engine 0", "begun", 1)),
    )
]  # fmt: skip


def spoiled(random: Random, data: bytes) -> bytes:
    """At random, or by what is nothing to msgpack, or the beginning of very much."""
    if random.random() < 0.8:
        return spoilt(data, random)
    at = random.randrange(len(data) + 1)
    return (
        data[:at]
        + random.choice([b"\xff", b"\x91" * 3000, b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xcb\x7f\xf0"])
        + data[at:]
    )


def anything(random: Random) -> bytes:
    """A stream of frames, most of them nearly right."""
    said = b""
    for call in range(1, random.randrange(2, 5)):
        body = random.choice(KNOWN)
        body = spoiled(random, body) if random.random() < 0.8 else body
        frame = Framer().frame(call, body)
        said += frame if random.random() < 0.8 else spoiled(random, frame)
    return said if random.random() < 0.9 else HEADER.pack(random.randrange(1 << 32), random.randrange(3), 1) + said


def say(server: ServerThread, said: bytes, token: bytes | None) -> None:
    """Over a connection of its own, which ends with what is said."""
    family, place = socket_address(server.endpoint.address)
    with closing(socket.socket(family)) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(place)
        if token is not None:
            greet_blocking(sock, token, "the transfer queue", server.endpoint.address)
        with suppress(ConnectionError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def hello(random: Random, server: ServerThread) -> bytes:
    """How TLS begins, or nearly."""
    said = channel_to(server.endpoint.address).begin(b"")
    return said if random.random() < 0.1 else spoiled(random, said)


@pytest.mark.parametrize(
    ("admitted", "address"),
    [(False, None), (True, None), (False, "tcp:127.0.0.1:0")],
    ids=["without the token", "a writer", "without TLS"],
)
def test_2000_things_said_to_a_queue(admitted: bool, address: str | None, caplog: pytest.LogCaptureFixture) -> None:
    random = Random(int(admitted))
    with ServerThread(SPEC, InlineBackend(), address) as server, SyncQueue(server.endpoint) as honest:
        writer = token_for("writer", server.endpoint.token)
        honest.create_partition("x", range(100, 104))
        for number in range(2000):
            said = anything(random) if admitted else random.choice([anything(random), random.randbytes(ANSWER + 9)])
            said = hello(random, server) if address is not None and number % 3 else said
            say(server, said, writer if admitted else None)
            if number == 500:
                before = resident()
            if number % 200 == 0:
                name = f"honest {number}"
                honest.create_partition(name, range(4))
                honest.put(name, range(4), tokens(range(4)))
                assert ids(honest.get("score", 4, partition=name, timeout_s=ANSWER_S)) == [0, 1, 2, 3]
                honest.clear(name)
        assert honest.waiting() == []
        assert resident() < before + (64 << 20)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_what_is_said_is_nearly_right() -> None:
    """Else the one above would show nothing: some of it is understood."""
    random, understood = Random(1), 0
    for _ in range(1000):
        with suppress(msgspec.MsgspecError, ValueError, KeyError, RecursionError):
            asked = m.decode_request(spoiled(random, random.choice(KNOWN)))
            if isinstance(asked, m.Verb):
                read_verb(asked)
            understood += 1
    assert 5 < understood < 995
