"""Frames, messages and proofs on a stream; and bad input on every public surface: one clear error, nothing changed."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rpc.handshake import ANSWER, REFUSED, Handshake, new_nonce, new_token
from harness.rpc.sockets import HEADER, Framer, Outbox, Splitter, WireError, portions, receive, socket_address
from harness.transfer_queue import ColumnSpec, LeaseExpired, QueueClosed, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.rows.frames import BatchAssignment, Frame, Part
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.queue_sides import LocalSide, SocketSide
from tests.support.remote_queue import descriptors, rewards, tokens


def framed(call: int, body: bytes, descriptors: int = 0) -> bytes:
    return Framer().frame(call, body, [0] * descriptors)


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


def test_an_oversized_or_cut_off_frame_is_refused() -> None:
    splitter = Splitter()
    splitter.feed(framed(1, b"whole") + framed(2, b"half of it")[:-3])
    with pytest.raises(WireError, match="17 bytes into a frame"):
        splitter.close()
    with pytest.raises(WireError, match="1001 bytes was announced; the limit is 1000"):
        Splitter(limit=1000).feed(HEADER.pack(1001, 0, 1))
    with pytest.raises(ValueError, match="1001 bytes is over the limit of 1000: put fewer rows at a time"):
        Framer(limit=1000).frame(1, bytes(1001))
    with pytest.raises(WireError, match="0 descriptors instead of 1"):
        Splitter().feed(HEADER.pack(0, 1, 1))


@pytest.mark.parametrize("count", [1, 250, 251, 600])
def test_any_number_of_descriptors_arrives_with_its_frame(count: int) -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver, open(os.devnull) as file:
        before = descriptors()
        sender.setblocking(False)
        outbox = Outbox(sender)
        outbox.send(framed(7, b"body of it", count), [file.fileno()] * count)
        assert not outbox
        splitter, got = Splitter(), []
        while not got:
            got = splitter.feed(*receive(receiver))
        assert (got[0].call, got[0].body, len(got[0].descriptors)) == (7, b"body of it", count)
        for descriptor in got[0].descriptors:
            os.close(descriptor)
        assert descriptors() == before


def test_portions_are_whole_and_descriptors_of_cut_frames_closed() -> None:
    parts = portions(b"0123456789", list(range(600)))
    assert b"".join(data for data, _ in parts) == b"0123456789" and all(data for data, _ in parts)
    assert [d for _, lot in parts for d in lot] == list(range(600)) and max(len(lot) for _, lot in parts) <= 253
    before = descriptors()
    splitter = Splitter()
    splitter.feed(HEADER.pack(10, 1, 1), [os.open(os.devnull, os.O_RDONLY)])
    with pytest.raises(WireError):
        splitter.close()
    assert descriptors() == before


def test_what_a_socket_does_not_take_is_kept_with_copies_of_its_descriptors() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        before = descriptors()
        sender.setblocking(False)
        outbox, splitter = Outbox(sender), Splitter()
        body = bytes(1 << 20)
        for call in range(3):
            passed = os.open(os.devnull, os.O_RDONLY)
            outbox.send(framed(call, body, 1), [passed])
            os.close(passed)
        got = []
        while len(got) < 3:
            got += splitter.feed(*receive(receiver))
            outbox.flush()
        sizes = [(frame.call, len(frame.body), len(frame.descriptors)) for frame in got]
        assert sizes == [(call, len(body), 1) for call in range(3)]
        for frame in got:
            os.close(frame.descriptors[0])
        outbox.close()
        assert descriptors() == before and not outbox.nbytes


@given(st.binary(max_size=200))
def test_a_garbled_message_is_a_value_error_or_a_message(data: bytes) -> None:
    for decode in (m.decode_request, m.decode_answer):
        try:
            assert isinstance(decode(data), m.Message)
        except (msgspec.MsgspecError, ValueError):
            pass


def test_an_assignment_arrives_as_it_was_with_descriptors_for_their_indices() -> None:
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


def test_any_other_error_arrives_as_the_kind_that_holds_it() -> None:
    error = m.raised(m.failed(KeyError("why")))
    assert type(error) is RuntimeError and "KeyError" in str(error)
    assert type(m.raised(m.failed(UnicodeError("why")))) is ValueError
    with pytest.raises(ValueError, match="9 bytes are not int64"):
        m.to_rows(bytes(9))


def test_each_side_proves_the_token_for_one_connection_and_never_sends_it() -> None:
    token, challenge, nonce = new_token(), new_nonce(), new_nonce()
    client = Handshake(token, challenge, nonce)
    server = Handshake.admitted(token, challenge, client.said())
    assert server == client and len(client.said()) == ANSWER and token not in client.said()
    client.check(client.server_proof(), "the queue", "here")
    for said in (
        Handshake(b"", challenge, nonce).said(),
        Handshake(token, new_nonce(), nonce).said(),
        nonce + client.server_proof(),
        bytes(ANSWER),
        b"",
    ):
        assert Handshake.admitted(token, challenge, said) is None
    for proof in (client.client_proof(), Handshake(token, challenge, new_nonce()).server_proof(), b""):
        with pytest.raises(PermissionError, match="what listens on here has not the token of the queue"):
            client.check(proof, "the queue", "here")
    with pytest.raises(PermissionError, match="the queue refuses a client without its token"):
        client.check(REFUSED, "the queue", "here")


@pytest.mark.parametrize("wrong", ["", "unix:", "tcp:host", "tcp::80", "http://x", "/tmp/socket"])
def test_an_address_is_of_one_of_two_forms(wrong: str) -> None:
    with pytest.raises(ValueError, match="neither 'unix:PATH' nor 'tcp:HOST:PORT'"):
        socket_address(wrong)


SPEC = QueueSpec(
    {
        "tokens": ColumnSpec("int64", ragged=True),
        "reward": ColumnSpec("float32"),
        "vector": ColumnSpec("float32", shape=(2,)),
    },
    {
        "score": TaskSpec(("reward",), policy="ready", lease_s=3600),
        "train": TaskSpec(("tokens", "reward"), ranks=2, whole_groups=True),
    },
    capacity_rows=64,
)
ANSWER_S = 60.0
Call = Callable[..., Any]
"""call(verb, *arguments, **options)"""


@pytest.fixture(params=["local", "async client", "sync client"])
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """A queue with rows 0 to 7 in partition "a", groups of 2, of which row 0 has its reward; "gone" was cleared."""
    side = LocalSide(SPEC) if request.param == "local" else SocketSide(SPEC, ShmBackend(inline_bytes=0))
    consumer = "y" if request.param == "sync client" else "x"
    with closing(side):

        def call(verb: str, *arguments: Any, **options: Any) -> Any:
            return side.call(consumer, verb, *arguments, **options)

        call("create_partition", "gone", [90])
        call("clear", "gone")
        call("create_partition", "a", range(8), 2)
        call("put", "a", [0], rewards([0]))
        yield call


def goes_on(call: Call) -> None:
    """A correct put and get, of rows that no bad input was to touch."""
    call("put", "a", [6, 7], rewards([6, 7]))
    batch = call("get", "score", 8, minimum=1, partition="a", timeout_s=ANSWER_S)
    assert batch.rows.tolist() == [0, 6, 7] and batch.dense("reward").tolist() == [0, 6, 7]
    call("acknowledge", batch.lease)


@pytest.mark.parametrize(
    ("partition", "rows", "columns", "message"),
    [
        ("a", [1, 2], {"nonsense": np.zeros(2)}, "column 'nonsense' is unknown; the schema has"),
        ("a", [1, 2], rewards([1, 2, 3]), r"column 'reward' must be \[2\] for 2 rows, not \[3\]"),
        ("a", [1, 2], tokens([1]), "column 'tokens' has 1 rows for 2 row ids"),
        ("a", [1, 2], {"reward": np.zeros(2, np.int64)}, "column 'reward' holds float32, not int64: cast it"),
        ("a", [1, 2], {"reward": [1, 2]}, "column 'reward' takes an ndarray, not a list"),
        ("a", [1, 2], {"reward": tokens([1, 2])["tokens"]}, "column 'reward' takes an ndarray, not a Ragged"),
        ("a", [1, 2], {"tokens": np.zeros(2, np.int64)}, "column 'tokens' takes a Ragged, not a ndarray"),
        ("a", [1], {"tokens": Ragged.from_rows([np.zeros(2, np.int32)])}, "column 'tokens' holds int64, not int32"),
        ("a", [1, 2], {"vector": np.zeros((2, 3), np.float32)}, r"column 'vector' must be \[2, 2\] for 2 rows"),
        ("a", [1, 2], rewards([1, 2]) | {"vector": np.zeros((1, 2), np.float32)}, "column 'vector' must be"),
        ("a", [1, 99], rewards([1, 99]), "row 99 is not in partition 'a'"),
        ("a", [1, 1], rewards([1, 1]), "names a row twice"),
        ("a", [1, 0], rewards([1, 0]), "column 'reward' of row 0 in partition 'a' is already written"),
        ("a", [0.5, 1.5], rewards([1, 2]), "rows must be a list of integers"),
        ("gone", [90], rewards([90]), "partition 'gone' was cleared"),
        ("nowhere", [1], rewards([1]), "partition 'nowhere' is unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_put_is_refused(call: Call, partition: str, rows: list[Any], columns: Any, message: str) -> None:
    before = call("describe")["partitions"]["a"]["written"]
    with pytest.raises(ValueError, match=message):
        call("put", partition, rows, columns)
    assert call("describe")["partitions"]["a"]["written"] == before
    goes_on(call)


@pytest.mark.parametrize(
    ("task", "count", "options", "message"),
    [
        ("nothing", 2, {}, r"task 'nothing' is unknown; there are \['score', 'train'\]"),
        ("score", 0, {}, "1 <= minimum <= count, not minimum=0, count=0"),
        ("score", 2, {"minimum": 3}, "1 <= minimum <= count, not minimum=3, count=2"),
        ("score", 2, {"rank": 1}, "rank 1 of task 'score' is outside its 1 ranks"),
        ("train", 2, {"rank": -1}, "rank -1 of task 'train' is outside its 2 ranks"),
        ("train", 3, {}, "task 'train' takes whole groups of 2 rows: count 3 is not a multiple"),
        ("score", 2, {"first": ("nothing", ((1, 1),))}, "task 'nothing' is unknown"),
        ("train", 2, {"first": ("score", ((1, 1),))}, "task 'train' has 2 ranks and cannot get what comes first"),
        ("score", 2, {"first": ("score", ((1, 1),) * 5000)}, "at most 4096 pairs that come first, not 5000"),
        ("score", 5000, {"only": tuple(range(5000))}, "at most 4096 rows by their ids, not 5000"),
        ("train", 2, {"only": (2, 3)}, "task 'train' has 2 ranks and cannot get rows by their ids"),
        ("score", 4, {"only": (2, 3)}, "a get of only 2 rows takes count=2"),
    ],
)
def test_a_bad_get_is_refused(call: Call, task: str, count: int, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call("get", task, count, timeout_s=ANSWER_S, **options)
    goes_on(call)


def test_ranks_that_ask_for_different_counts_are_refused(call: Call) -> None:
    call("put", "a", range(1, 6), rewards(range(1, 6)))
    call("put", "a", range(6), tokens(range(6)))
    assert call("get", "train", 2, rank=0, timeout_s=ANSWER_S).rows.tolist() == [0, 1]
    with pytest.raises(ValueError, match="rank 1 of task 'train' asks for 4 rows where another rank asked for 2"):
        call("get", "train", 4, rank=1, timeout_s=ANSWER_S)
    assert call("get", "train", 2, rank=1, timeout_s=ANSWER_S).rows.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("name", "rows", "group_size", "message"),
    [
        ("a", [1], 1, "partition 'a' exists or was cleared: a name is used once"),
        ("gone", [1], 1, "partition 'gone' exists or was cleared"),
        ("b", [], 1, "partition 'b' needs one or more different rows"),
        ("b", [1, 1], 1, "partition 'b' needs one or more different rows"),
        ("b", range(3), 2, "partition 'b' has 3 rows, which are not whole groups of 2"),
        ("b", range(65), 1, "partition 'b' has 65 rows, more than capacity_rows=64"),
        ("b", [0.5], 1, "rows must be a list of integers"),
    ],
)
def test_a_bad_partition_is_refused(call: Call, name: str, rows: Any, group_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call("create_partition", name, rows, group_size)
    goes_on(call)


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("acknowledge", (7,), "lease 7 was never given"),
        ("give_back", (-1,), "lease -1 was never given"),
        ("clear", ("nowhere",), "partition 'nowhere' is unknown"),
        ("clear", ("gone",), "partition 'gone' was cleared"),
        ("set_bound", ("nothing", "0", 1), "task 'nothing' is unknown"),
        ("drop", ("train", "score", 1), "task 'train' has 2 ranks and cannot drop rows"),
        ("drop", ("nobody", "score", 1), "task 'nobody' is unknown"),
        ("drop", ("score", "nobody", 1), "task 'nobody' is unknown"),
    ],
)
def test_a_bad_word_on_what_is_there_is_refused(call: Call, verb: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(verb, *arguments)
    goes_on(call)


def test_a_late_acknowledgement_and_a_late_partition_are_refused(call: Call) -> None:
    batch = call("get", "score", 1, consumer="dead", timeout_s=ANSWER_S)
    call("release", "dead")
    with pytest.raises(LeaseExpired, match=f"lease {batch.lease} is over"):
        call("acknowledge", batch.lease)
    goes_on(call)
    call("close")
    with pytest.raises(QueueClosed, match="partition 'late' comes after the queue was closed"):
        call("create_partition", "late", [1])
