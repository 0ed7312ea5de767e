"""Connections that end, clients that break the rules, and requests that are refused: the queue goes on."""

import asyncio
import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.rpc import listener, stream
from harness.rpc.handshake import ANSWER, REFUSED, STEP
from harness.rpc.sockets import CHUNK, HEADER, MESSAGE_LIMIT, Framer, forget_address, new_address
from harness.transfer_queue import GetRequest
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.server import QueueServer
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.frames import Frame
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.project import ROOT
from tests.support.remote_queue import SPEC, Stranger, descriptors, endpoint_of, ids, rewards, serving, tokens, until


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancelled_get_loses_no_row(turns: int) -> None:
    """Cancelled after so many turns of the event loop: while it is pending, answered, on its way, or here."""
    async with serving() as (_, queue):
        await queue.create_partition("a", range(2))
        await queue.put("a", [0], rewards([0]))
        get = asyncio.create_task(queue.get("score", 1))
        await until(queue, lambda waiting: len(waiting) == 1)
        put = asyncio.create_task(queue.put("a", range(2), tokens(range(2))))
        for _ in range(turns):
            await asyncio.sleep(0)
        get.cancel()
        await put
        taken = [] if (await asyncio.gather(get, return_exceptions=True))[0] is None else ids_or_none(get)
        while (batch := await queue.get("score", 1, partition="a")) is not None:
            taken += ids(batch)
        assert sorted(taken) == [0, 1]


def ids_or_none(get: asyncio.Task[object]) -> list[int]:
    return [] if get.cancelled() else ids(get.result())  # type: ignore[arg-type]


async def test_when_the_server_ends_every_client_is_told_at_once() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        get = asyncio.create_task(queue.get("score", 1))
        await until(queue, lambda waiting: len(waiting) == 1)
        server.close()
        with pytest.raises(ConnectionError, match="its process has ended"):
            await get
        with pytest.raises(ConnectionError, match="its process has ended"):
            await queue.put("a", range(4), tokens(range(4)))


async def test_a_server_that_does_not_answer_is_named_with_what_was_asked() -> None:
    async with serving() as (server, _):
        queue = RemoteQueue(replace(endpoint_of(server), call_timeout_s=0.2))
        await queue.waiting()
        server.service.clear = lambda partition: None  # type: ignore[method-assign]
        for one in server._clients.values():
            one.stream._on_frame = lambda frame: None  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match=r"did not answer clear\('a'\) within 0.2 s"):
            await queue.clear("a")
        await queue.disconnect()


async def test_an_assignment_that_no_message_takes_goes_back() -> None:
    async with serving(InlineBackend(), limit=100_000) as (_, queue):
        await queue.create_partition("a", range(40))
        for start in (0, 20):
            await queue.put("a", range(start, start + 20), tokens(range(start, start + 20)))
        for _ in range(2):
            with pytest.raises(ValueError, match="over the limit of 100000"):
                await queue.get("score", 40)
        assert ids(await queue.get("score", 20)) == list(range(20))


async def test_a_client_that_reads_nothing_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_UNSENT", 1000)
    async with serving(InlineBackend()) as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(400))
        await queue.put("a", range(400), tokens(range(400)))
        get = m.encode(m.Get(GetRequest("score", 200)))
        await stranger.say(2, get)
        await stranger.say(3, get)
        async with asyncio.timeout(60):  # the second get, of all that is left, is not even begun
            while (await queue.describe())["partitions"]["a"]["tasks"]["score"]["depth"] > 200:
                pass
        assert (await queue.describe())["partitions"]["a"]["tasks"]["score"]["depth"] == 200
        assert [call for call, _ in (await stranger.hear(), await stranger.hear())] == [2, 3]


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LOST", 1000 - MESSAGE_LIMIT)
    async with serving(InlineBackend()) as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(400))
        await queue.put("a", range(400), tokens(range(400)))
        await stranger.say(2, m.encode(m.Get(GetRequest("score", 400))))
        await until(queue, lambda _: len(server._clients) == 1)
        monkeypatch.undo()
        assert ids(await queue.get("score", 400)) == list(range(400))


async def test_descriptors_go_with_the_partition_and_with_the_client() -> None:
    async with serving() as (_, queue):
        await queue.create_partition("first", range(1))
        await queue.put("first", range(1), tokens(range(1), 1000))
        await queue.clear("first")
        await queue.waiting()
        before = descriptors()
        for i in range(50):
            await queue.create_partition(str(i), range(4))
            await queue.put(str(i), range(4), tokens(range(4)))
            assert ids(await queue.get("score", 4)) == [0, 1, 2, 3]
        assert descriptors() == before + 100  # the writer's and the server's
        for i in range(50):
            await queue.clear(str(i))
        await queue.waiting()
        assert descriptors() == before


async def test_a_mapped_batch_survives_its_partition() -> None:
    async with serving(ShmBackend(0, 0)) as (_, queue):
        await queue.create_partition("a", range(4))
        before = descriptors()
        await queue.put("a", range(4), tokens(range(4), 100_000))
        batch = await queue.get("score", 4)
        await queue.clear("a")
        await queue.waiting()
        assert descriptors() == before  # a mapping holds none
        assert ids(batch) == [0, 1, 2, 3] and batch is not None
        batch.ragged("tokens").values[:] = 7


async def test_clients_and_portals_travel_and_connect_on_their_own() -> None:
    async with serving() as (server, queue):
        other = pickle.loads(pickle.dumps(queue))
        await other.create_partition("a", range(4))
        assert list((await queue.describe())["partitions"]) == ["a"] and len(server._clients) == 1
        sync = pickle.loads(pickle.dumps(SyncQueue(queue.endpoint)))
        assert list((await asyncio.to_thread(sync.describe))["partitions"]) == ["a"]
        sync.disconnect()
    async with serving() as (_, queue):

        def through() -> object:
            with queue.portal() as portal:
                portal(queue.create_partition("a", range(4)))
                return portal(queue.waiting())

        assert await asyncio.to_thread(through) == []
        assert list((await queue.describe())["partitions"]) == ["a"]


async def test_a_queue_is_saved_below_the_folder_that_it_was_started_with_and_nowhere_else(tmp_path: Path) -> None:
    saves = tmp_path / "checkpoints"
    saves.mkdir()
    (saves / "out").symlink_to(tmp_path)
    async with serving(InlineBackend(), saves=str(saves)) as (_, queue):
        await queue.save(str(saves / "one"))
        for folder in (tmp_path / "other", saves / ".." / "other", saves / "out" / "other"):
            with pytest.raises(PermissionError, match="this queue may be saved below"):
                await queue.save(str(folder))
    async with serving(InlineBackend()) as (_, queue):
        with pytest.raises(PermissionError, match="saved in no folder; start it with saves="):
            await queue.save(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists() and (saves / "one" / "snapshot.msgpack").exists()


async def test_a_client_does_what_its_role_may(tmp_path: Path) -> None:
    async with serving(InlineBackend()) as (server, queue):
        reader, writer = queue.for_role("reader"), queue.for_role("writer")
        await queue.create_partition("a", range(2))
        with pytest.raises(PermissionError, match="a reader of the queue may not ask for Put"):
            await reader.put("a", range(2), tokens(range(2)))
        await writer.put("a", range(2), tokens(range(2)))
        assert ids(await reader.get("score", 1)) == [0] and ids(await writer.get("score", 1)) == [1]
        for begin in (
            lambda: writer.close(),
            lambda: writer.save(str(tmp_path / "queue")),
            lambda: writer.create_partition("b", range(2)),
            lambda: writer.release("0"),
            lambda: writer.clear("a"),
            lambda: writer.clear_finished(),
            lambda: writer.drop("train", "score", 9),
            lambda: writer.begin_again("a", range(2)),
            lambda: writer.give_up("a", range(2)),
        ):
            with pytest.raises(PermissionError, match="a writer of the queue may not ask for"):
                await begin()
        await queue.create_partition("b", range(2))
        assert not os.listdir(tmp_path)


async def test_descriptors_of_a_stranger_are_not_taken() -> None:
    async with serving() as (server, queue), Stranger.at(server, known=False) as stranger, Stranger.at(server) as known:
        before = descriptors()
        for _ in range(4):
            socket.send_fds(stranger.sock, [b"x"], [stranger.sock.fileno()] * 250)
        assert await known.asks(m.Verb("waiting")) == m.Done([])
        assert descriptors() == before
        await known.say(3, b"", [known.sock.fileno()] * 2)
        answer = (await known.hear())[1]
        assert isinstance(answer, m.Failed) and "2 descriptors was announced; the limit is 1" in answer.text
        assert await queue.waiting() == []


async def test_a_unix_socket_is_for_processes_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (server, queue):
        path = Path(server.address.removeprefix("unix:"))
        assert [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)] == [0o700, 0o600]
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as if all others were of another
        with pytest.raises(PermissionError, match="a process of user"):
            await RemoteQueue(endpoint_of(server, b"not asked for")).waiting()
        with pytest.raises(PermissionError, match="a process of user"):
            await asyncio.to_thread(SyncQueue(queue.endpoint).waiting)
        async with Stranger.at(server, known=False) as stranger:
            with pytest.raises(ConnectionError):
                await stranger.hear()
        monkeypatch.undo()
        assert await queue.waiting() == [] and len(server._clients) == 1
    assert not os.path.exists(path)  # noqa: ASYNC240


_MAKES_A_FOLDER = """
import os
from harness.rpc.sockets import listen, new_address
kept, address = listen(new_address())
child = os.fork()
if not child:
    raise SystemExit  # leaves its parent's
os.waitpid(child, 0)
print(os.path.exists(address.removeprefix("unix:")), address, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_folders_of_sockets_go_with_their_process_or_with_the_next(tmp_path: Path, end: str) -> None:
    def folders(how: str) -> set[str]:
        program = [sys.executable, "-c", _MAKES_A_FOLDER.format(end=how)]
        done = subprocess.run(program, cwd=ROOT, env=os.environ | {"TMPDIR": short}, capture_output=True, text=True)
        assert done.stdout.startswith("True unix:"), done.stderr
        return {done.stdout.split("unix:")[1].rpartition("/")[0]}

    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        left = folders(end)
        assert set(map(str, Path(short).iterdir())) == (left if "kill" in end else set())
        folders("")
        assert not list(Path(short).iterdir())


async def test_a_client_that_has_gone_before_it_was_let_in_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, queue):
        with socket.socket(socket.AF_UNIX) as hasty:
            hasty.connect(server.address.removeprefix("unix:"))
        assert await queue.waiting() == [] and len(server._clients) == 1
    assert not caplog.records


async def test_a_stranger_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_S", 0.01)
    async with serving() as (server, _), Stranger.at(server, known=False) as stranger:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stranger.sock, b"x" * (ANSWER - 1))
        assert [len(await loop.sock_recv(stranger.sock, 4096)) for _ in range(2)] == [STEP, 0]


async def test_a_server_without_the_token_is_not_spoken_to() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(range(STEP)))
        await reader.readexactly(ANSWER)
        writer.write(b"\x01" * STEP)
        heard.put_nowait(await reader.read())
        writer.close()

    heard: asyncio.Queue[bytes] = asyncio.Queue()
    address = new_address()
    async with await asyncio.start_unix_server(pretend, address.removeprefix("unix:")):
        endpoint = Endpoint(address, b"token", InlineBackend(), SPEC)
        with pytest.raises(PermissionError, match="has not the token of the transfer queue"):
            await RemoteQueue(endpoint).close()
        with pytest.raises(PermissionError, match="has not the token of the transfer queue"):
            await asyncio.to_thread(SyncQueue(endpoint).close)
        assert [await heard.get() for _ in range(2)] == [b"", b""]
    forget_address(address)


CLEAR = b"\x93\xa4Verb\xa5clear"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xc1", "MessagePack"),
        (b"", ""),
        (CLEAR + b"\x91" * 100_000, ""),
        (CLEAR + b"\x91\xa2\xff\xfe", ""),
        (m.encode(m.Done()), ""),
        (m.encode(["Get", 1, 2]), ""),
        (m.encode(["Get", "t", "many", 1, "0", 0, None, None, None]), "Expected "),
        (m.encode(["Nonsense"]), "Nonsense"),
        (m.encode(["Put", "p", b"", [1, {"a": "1"}, b""], {}]), "Expected "),
        (m.encode(["Put", "p", b"", [1, {"a": 1}, "text"], {}]), "Expected "),
        (m.encode(m.Put("a", bytes(7), Frame(0, {}, b""), {})), "7 bytes are not int64 numbers"),
        (m.encode(m.Put("a", bytes(8), Frame(2, {}, b""), {})), "a frame of 2 rows came for 1 row ids"),
        (m.encode(m.Put("a", bytes(8), Frame(1, {"x": 8}, bytes(8)), {})), "column 'x' is unknown"),
        (m.encode(m.Put("a", bytes(8), Frame(1, {"reward": 5}, bytes(5)), {})), "5 bytes cannot hold 1 rows"),
        (m.encode(m.Put("a", bytes(8), Frame(1, {"reward": 4}, bytes(3)), {})), "4 bytes came with 3"),
        (m.encode(m.Put("a", bytes(8), Frame(1, {"reward": 4}, (7, 0)), {})), "has no segment 7 in"),
        (m.encode(m.Put("a", bytes(8), Frame(1, {"reward": 4}, {}), {})), "columns stays in its process"),
        (m.encode(m.OpenSegment("a", 0)), "a segment comes with its descriptor, not with 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_nonsense_is_the_error_of_its_call(body: bytes, message: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, queue), Stranger.at(server) as stranger:
        await stranger.say(7, body)
        call, answer = await stranger.hear()
        assert call == 7 and isinstance(answer, m.Failed) and answer.kind == "ValueError" and message in answer.text
        assert not caplog.records
        assert await stranger.asks(m.Verb("waiting")) == m.Done([]) and await queue.waiting() == []


async def test_frames_that_end_in_the_middle_or_are_too_long_take_nothing_else_down() -> None:
    loop, body = asyncio.get_running_loop(), m.encode(m.Verb("describe"))
    async with serving() as (server, queue):
        for cut in (1, HEADER.size, HEADER.size + 3):
            async with Stranger.at(server) as stranger:
                await loop.sock_sendall(stranger.sock, (HEADER.pack(len(body) + 8, 0, 1) + body)[:cut])
        assert (await queue.describe())["partitions"] == {}
        async with Stranger.at(server) as stranger:
            await loop.sock_sendall(stranger.sock, HEADER.pack(1 << 30, 0, 1))
            _, answer = await stranger.hear()
            assert isinstance(answer, m.Failed) and "a message of 1073741824 bytes was announced" in answer.text
            with pytest.raises(ConnectionError):
                await stranger.hear()


@pytest.mark.parametrize("said", [m.encode(m.Verb("describe")), b"\x91" * 10_000, b"GET / HTTP/1.1\r\n" * 8])
async def test_nothing_that_a_stranger_says_is_decoded_or_logged(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    loop, heard = asyncio.get_running_loop(), b""
    async with serving() as (server, queue), Stranger.at(server, known=False) as stranger:
        await loop.sock_sendall(stranger.sock, said.ljust(ANSWER))
        with suppress(ConnectionResetError):  # there was more than it read
            while more := await loop.sock_recv(stranger.sock, 4096):
                heard += more
        assert heard[STEP:] == REFUSED and not caplog.records and await queue.waiting() == []


async def test_an_oversized_put_is_refused_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Framer.__init__, "__defaults__", (10_000,))
    monkeypatch.setitem(stream.FramedStream.__init__.__kwdefaults__, "limit", 10_000)
    async with serving(InlineBackend()) as (_, queue):
        await queue.create_partition("a", range(4))
        with pytest.raises(ValueError, match="over the limit of 10000: put fewer rows at a time"):
            await queue.put("a", range(4), tokens(range(4)))
        await queue.put("a", [0], tokens([0]))

        def blocking() -> None:
            with SyncQueue(queue.endpoint) as sync:
                with pytest.raises(ValueError, match="over the limit of 10000: put fewer rows at a time"):
                    sync.put("a", range(1, 4), tokens(range(1, 4)))
                sync.put("a", [1], tokens([1]))

        await asyncio.to_thread(blocking)


LARGE = 2 << 20


@pytest.mark.parametrize("comes", [True, False])
async def test_large_messages_share_so_much_memory(monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    """One that does not come makes room for the next."""
    monkeypatch.setattr(stream, "ROOM", LARGE)
    monkeypatch.setattr(stream, "PATIENCE_S", 3600.0)
    body = b"\xc1" * LARGE
    async with serving(InlineBackend()) as (server, queue), AsyncExitStack() as stack:
        first, *others = [await stack.enter_async_context(Stranger.at(server)) for _ in range(4)]
        slow = server._clients[first.writer].stream
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(first.sock, HEADER.pack(LARGE, 0, 5) + body[:-1])
        await until(queue, lambda _: slow.come() >= LARGE)
        said = [asyncio.create_task(other.say(6, body)) for other in others]
        await until(queue, lambda _: sum(one.stream in server.room for one in server._clients.values()) == 4)
        assert sum(one.stream.come() for one in server._clients.values()) <= LARGE + HEADER.size + 3 * CHUNK
        if comes:
            await loop.sock_sendall(first.sock, body[-1:])
        else:
            server.room._check(slow, slow.come())  # as after some time
        _, answer = await first.hear()
        assert isinstance(answer, m.Failed) and ("did not come, and others wait" in answer.text) != comes
        assert [(await other.hear())[0] for other in others] == [6, 6, 6]
        await asyncio.gather(*said)
        assert not server.room._sizes


async def test_a_segment_that_could_shrink_is_refused_and_closed() -> None:
    async with serving() as (server, queue), Stranger.at(server) as stranger:
        await queue.create_partition("a", range(2))
        before = descriptors()
        unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        answer = await stranger.asks(m.OpenSegment("a", stranger.writer << 32), [unsealed])
        os.close(unsealed)
        assert isinstance(answer, m.Failed) and "not sealed against shrinking" in answer.text
        await until(queue, lambda _: descriptors() == before)


async def test_that_no_queue_listens_or_none_can_is_a_clear_error() -> None:
    queue = RemoteQueue(Endpoint("unix:no-queue-here", b"", ShmBackend(), SPEC))
    with pytest.raises(ConnectionError, match="no transfer queue listens on unix:no-queue-here"):
        await queue.describe()
    with pytest.raises(ConnectionError, match="no transfer queue listens on unix:no-queue-here"):
        SyncQueue(queue.endpoint).describe()
    with pytest.raises(ValueError, match="no descriptors travel over tcp:127.0.0.1:0"):
        QueueServer(SPEC, ShmBackend(), address="tcp:127.0.0.1:0")


def test_a_folder_of_sockets_that_goes_as_it_is_looked_at_is_no_error() -> None:
    """Its process removes it, or another that comes at the same time."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        Path(shared, f"cadence-{namespace}-1-0-gone").symlink_to("nowhere")
        code = "from harness.rpc.sockets import new_path; print(new_path())"
        environment = os.environ | {"TMPDIR": shared}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith(shared), done.stderr


async def test_what_never_arrived_goes_out_again() -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        await queue.put("a", range(4), tokens(range(4)))
        async with Stranger.at(server) as stranger:
            get = m.Get(GetRequest("score", 2))
            assert isinstance(await stranger.asks(get), m.Assigned)
        assert ids(await queue.get("score", 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_get_of_a_client_that_went_takes_nothing_whether_it_was_begun(begun: bool) -> None:
    async with serving() as (server, queue):
        await queue.create_partition("a", range(4))
        async with Stranger.at(server) as stranger:
            await stranger.say(2, m.encode(m.Get(GetRequest("score", 2))))
            if begun:
                assert isinstance(await stranger.asks(m.Verb("waiting")), m.Done)
        await until(queue, lambda waiting: not waiting and len(server._clients) == 1)
        await queue.put("a", range(4), tokens(range(4)))
        assert ids(await queue.get("score", 4)) == [0, 1, 2, 3]
