"""What travels between processes: frames, descriptors, messages, and the proof of the token."""

from __future__ import annotations

import os
import socket

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.transfer_queue import LeaseExpired, QueueClosed
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.sockets import (
    HEADER,
    Outbox,
    Splitter,
    WireError,
    check_digest,
    header,
    new_nonce,
    new_token,
    portions,
    receive,
    socket_address,
    token_digest,
)
from harness.transfer_queue.rows.frames import BatchAssignment, Frame, Part


def framed(call: int, body: bytes) -> bytes:
    return header(call, body) + body


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framed(call, body) for call, body in enumerate(bodies))
    splitter, got, turn = Splitter(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        got += splitter.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert [(frame.call, frame.body) for frame in got] == list(enumerate(bodies))
    splitter.close()


def test_a_stream_that_ends_inside_a_frame_is_an_error() -> None:
    splitter = Splitter()
    splitter.feed(framed(1, b"whole") + framed(2, b"half of it")[:-3])
    with pytest.raises(WireError, match="17 bytes into a frame"):
        splitter.close()


def test_an_oversized_frame_is_refused_as_soon_as_it_is_announced() -> None:
    with pytest.raises(WireError, match="1001 bytes was announced; the limit is 1000"):
        Splitter(limit=1000).feed(HEADER.pack(1001, 0, 1))


def test_a_message_over_the_limit_does_not_leave() -> None:
    with pytest.raises(ValueError, match="1001 bytes is over the limit of 1000: put fewer rows at a time"):
        header(1, bytes(1001), limit=1000)


def test_a_frame_without_the_descriptors_it_announces_is_refused() -> None:
    with pytest.raises(WireError, match="0 descriptors instead of 1"):
        Splitter().feed(HEADER.pack(0, 1, 1))


@pytest.mark.parametrize("count", [1, 250, 251, 600])
def test_any_number_of_descriptors_arrives_with_its_frame(count: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:
        before = descriptors()
        ours.setblocking(False)
        outbox = Outbox(ours)
        outbox.send(header(7, b"body of it", [0] * count) + b"body of it", [file.fileno()] * count)
        assert not outbox
        splitter, got = Splitter(), []
        while not got:
            got = splitter.feed(*receive(theirs))
        assert (got[0].call, got[0].body, len(got[0].descriptors)) == (7, b"body of it", count)
        for descriptor in got[0].descriptors:
            os.close(descriptor)
        assert descriptors() == before


def test_portions_are_the_whole_in_order() -> None:
    parts = portions(b"0123456789", list(range(600)))
    assert b"".join(data for data, _ in parts) == b"0123456789" and all(data for data, _ in parts)
    assert [d for _, lot in parts for d in lot] == list(range(600)) and max(len(lot) for _, lot in parts) <= 253


def test_what_a_socket_does_not_take_is_kept_with_copies_of_its_descriptors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = descriptors()
        ours.setblocking(False)
        outbox, splitter = Outbox(ours), Splitter()
        body = bytes(1 << 20)
        for call in range(3):
            passed = os.open(os.devnull, os.O_RDONLY)
            outbox.send(header(call, body, [passed]) + body, [passed])
            os.close(passed)
        got = []
        while len(got) < 3:
            got += splitter.feed(*receive(theirs))
            outbox.flush()
        assert [(frame.call, len(frame.body), len(frame.descriptors)) for frame in got] == [
            (call, len(body), 1) for call in range(3)
        ]
        for frame in got:
            os.close(frame.descriptors[0])
        outbox.close()
        assert descriptors() == before and not outbox.nbytes


def test_descriptors_of_a_frame_that_never_came_whole_are_closed() -> None:
    before = descriptors()
    splitter = Splitter()
    splitter.feed(HEADER.pack(10, 1, 1), [os.open(os.devnull, os.O_RDONLY)])
    with pytest.raises(WireError):
        splitter.close()
    assert descriptors() == before


@given(st.binary(max_size=200))
def test_a_garbled_message_is_a_value_error_or_a_message(data: bytes) -> None:
    for decode in (m.decode_request, m.decode_answer, m.decode_proof):
        try:
            assert isinstance(decode(data), m.Message)
        except (msgspec.MsgspecError, ValueError):
            pass


@pytest.mark.parametrize(
    "garbled",
    [
        ["Put", "p", b"", [1, {"a": -1}, b""], {}, None],
        ["Put", "p", b"", [1, {"a": 1}, "text"], {}, None],
        ["Get", "t", "many", 1, "0", 0, None, None, None],
        ["Pickle", b""],
    ],
)
def test_a_message_of_wrong_types_is_refused(garbled: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_request(msgspec.msgpack.encode(garbled))


def test_row_ids_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes are not int64"):
        m.to_rows(bytes(9))


def test_a_handout_arrives_as_it_was_with_descriptors_for_their_indices() -> None:
    frames = (Frame(2, {"a": 16}, (0, 64)), Frame(1, {"a": 8}, bytes(8)))
    sent = BatchAssignment(3, "p", np.array([5, 6]), frames, (Part(("a",), ((0, 1, 2), (1, 0, 1))),))
    message = m.decode_answer(m.encode(m.assigned(sent, sent.frames, False)))
    assert isinstance(message, m.Assigned)
    got = m.to_assignment(message, [99])
    assert (got.lease, got.partition, got.rows.tolist(), got.parts) == (3, "p", [5, 6], sent.parts)
    assert [frame.place for frame in got.frames] == [(99, 64), bytes(8)] and got.rows.flags.writeable


@pytest.mark.parametrize("kind", [ValueError, TimeoutError, LeaseExpired, QueueClosed, PermissionError])
def test_errors_that_the_queue_documents_arrive_as_they_are(kind: type[Exception]) -> None:
    error = m.raised(m.failed(kind("why")))
    assert type(error) is kind and str(error) == "why"


def test_any_other_error_arrives_as_a_runtime_error_that_names_it() -> None:
    error = m.raised(m.failed(KeyError("why")))
    assert type(error) is RuntimeError and "KeyError" in str(error)


def test_a_special_value_error_arrives_as_a_value_error() -> None:
    assert type(m.raised(m.failed(UnicodeError("why")))) is ValueError


def test_the_token_is_proved_and_never_sent() -> None:
    token, nonce = new_token(), new_nonce()
    proof = token_digest(token, nonce)
    check_digest(token, nonce, proof)
    assert token not in proof
    for wrong in (token_digest(b"", nonce), token_digest(token, new_nonce()), b""):
        with pytest.raises(PermissionError, match="without its token"):
            check_digest(token, nonce, wrong)


@pytest.mark.parametrize("wrong", ["", "unix:", "tcp:host", "tcp::80", "http://x", "/tmp/socket"])
def test_an_address_is_of_one_of_two_forms(wrong: str) -> None:
    with pytest.raises(ValueError, match="neither 'unix:NAME' nor 'tcp:HOST:PORT'"):
        socket_address(wrong)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
