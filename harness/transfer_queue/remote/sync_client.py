"""The queue for threads without an event loop: the verbs of a TransferQueue, blocking."""

import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from harness.rpc.handshake import greet_blocking
from harness.rpc.sockets import (
    Framed,
    Framer,
    Splitter,
    WireError,
    abandon_in_children,
    close_all,
    connected_blocking,
    limit_waits,
    portions,
    receive,
    send_some,
)
from harness.transfer_queue.control.spec import GetRequest, QueueSpec, with_get_options
from harness.transfer_queue.remote import calls
from harness.transfer_queue.remote import messages as m
from harness.transfer_queue.rows.columns import Batch
from harness.transfer_queue.storage.protocol import QueueSession, Storage

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class SyncConnection:
    """One call at a time. Connects when it is made: PermissionError without the right token, ConnectionError where no
    queue listens."""

    storage: Storage

    def __init__(self, endpoint: calls.Endpoint) -> None:
        self._endpoint = endpoint
        self._framer, self._splitter = Framer(), Splitter()
        self._frames: list[Framed] = []
        self._calls = 0
        self._used = threading.Lock()
        self.ended: str | None = None
        self.inherited = False
        try:
            self._sock = connected_blocking(endpoint.address, endpoint.call_timeout_s)
        except PermissionError:
            raise
        except OSError as error:
            raise ConnectionError(f"no transfer queue listens on {endpoint.address}: {error}") from None
        abandon_in_children(self)
        try:
            self._greet()
        except BaseException:
            self.end("the transfer queue did not let this client in")
            raise

    def _greet(self) -> None:
        self._channel = greet_blocking(self._sock, self._endpoint.token, "the transfer queue", self._endpoint.address)
        answer, _ = self._reply(0)
        if not isinstance(answer, m.Welcome):
            raise ConnectionError(f"what listens on {self._endpoint.address} is no transfer queue")
        self.storage = self._endpoint.backend.storage(QueueSession(answer.queue, answer.writer))
        limit_waits(self._sock, self._endpoint.call_timeout_s)

    def run(self, call: calls.Call) -> Any:
        """The call's result; raises what it raises. RuntimeError if another thread is in the middle of one."""
        if not self._used.acquire(blocking=False):
            raise RuntimeError("a SyncQueue is for one thread at a time: give each its own")
        try:
            step = next(call)
            while True:
                try:
                    result = self._carry_out(step)
                except BaseException as error:
                    step = call.throw(error)
                else:
                    step = call.send(result)
        except StopIteration as end:
            return end.value
        finally:
            self._used.release()

    def _carry_out(self, step: calls.Step) -> Any:
        if isinstance(step, calls.AskServer):
            return self._request(step)
        if isinstance(step, calls.Notify):
            return self._send(self._framed(step.message)[1])
        return step.work(self.storage)

    def _request(self, step: calls.AskServer) -> calls.Response:
        if self.ended is not None:
            raise ConnectionError(self.ended)
        call, frame = self._framed(step.message, step.descriptors)  # what it refuses has not touched the connection
        asked = False
        try:
            self._send(frame, step.descriptors)
            asked = True
            return self._reply(call, step.waits)
        except BlockingIOError:
            self.end(calls.waited(self._endpoint, calls.describe(step.message)))
            raise TimeoutError(self.ended) from None
        except OSError as error:
            self.end(calls.lost(self._endpoint, error))
            raise ConnectionError(self.ended) from None
        except BaseException:  # an interrupt: where in a frame that was is unknown
            if asked:  # what was asked for, here already or on its way, goes back
                self._send(self._framed(m.Withdraw(call))[1])
            self.end("a call was interrupted")
            raise

    def _framed(self, request: m.Message, descriptors: Sequence[int] = ()) -> tuple[int, bytes]:
        """The number of the call, and its frame. ValueError for a message that the queue would refuse."""
        self._calls += 1
        return self._calls, self._framer.frame(self._calls, m.encode(request), descriptors)

    def _send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        for portion, passed in portions(self._channel.seal(frame), descriptors):
            sent = send_some(self._sock, portion, passed)
            if sent < len(portion):
                self._sock.sendall(portion[sent:])

    def _reply(self, call: int, waits: bool = False) -> calls.Response:
        while True:
            while self._frames:
                frame = self._frames[0]
                answer = self._decoded(frame)
                del self._frames[0]  # from here on its descriptors are the caller's
                if frame.call == call:
                    return answer, frame.descriptors
                close_all(frame.descriptors)
                if frame.call == 0 and isinstance(answer, m.Failed):
                    raise ConnectionError(answer.text)
                if frame.call == 0:
                    calls.handle_notice(self.storage, answer)
            try:
                data, descriptors = receive(self._sock)
            except BlockingIOError:
                if waits:
                    continue
                raise
            if not data:
                raise ConnectionError("its process has ended")
            self._frames += self._splitter.feed(self._channel.unseal(data), descriptors)

    def _decoded(self, frame: Framed) -> m.AnyResponse:
        try:
            return m.decode_answer(frame.body)
        except msgspec.MsgspecError as error:
            raise WireError(f"this is no answer: {error}") from None

    def end(self, why: str) -> None:
        """End the connection; later calls raise for this reason."""
        self.ended = self.ended or why
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first
        self._let_go()

    def abandon(self) -> None:
        """See `sockets.Inherited`."""
        self.inherited = True
        self.ended = "this process was forked from the one that was connected"
        self._let_go()

    def _let_go(self) -> None:
        self._sock.close()
        for frame in self._frames:
            close_all(frame.descriptors)
        self._frames.clear()
        try:
            self._splitter.close()
        except WireError:
            pass  # the end has its reason already
        if hasattr(self, "storage"):
            self.storage.close()


def _blocking(
    verb: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Returned]],
) -> Callable[Concatenate[Any, Arguments], Returned]:
    """A verb of `calls.Verbs` whose call blocks, so that its coroutine comes to its end at once."""

    @wraps(verb)
    def call(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            verb(self, *args, **kwargs).send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a blocking call has waited")

    return call


class SyncQueue:
    """A client for one thread at a time; no thread and no event loop of its own. What the calls promise stands in
    `queue.py`.

    Connects with its first call, in a forked child anew, and after a failure never again: every call then raises
    ConnectionError. Leaving its context disconnects: what it holds under a lease goes out again. Picklable.
    """

    keeps = True

    def __init__(self, endpoint: calls.Endpoint) -> None:
        self.endpoint = endpoint
        self._connection: SyncConnection | None = None

    @property
    def spec(self) -> QueueSpec:
        """The queue's columns and tasks."""
        return self.endpoint.spec

    create_partition = _blocking(calls.Verbs.create_partition)
    put = _blocking(calls.Verbs.put)
    get_batch = _blocking(calls.Verbs.get_batch)
    set_bound = _blocking(calls.Verbs.set_bound)
    drop = _blocking(calls.Verbs.drop)
    begin_again = _blocking(calls.Verbs.begin_again)
    give_up = _blocking(calls.Verbs.give_up)
    finish = _blocking(calls.Verbs.finish)
    acknowledge = _blocking(calls.Verbs.acknowledge)
    give_back = _blocking(calls.Verbs.give_back)
    reassign = _blocking(calls.Verbs.reassign)
    release = _blocking(calls.Verbs.release)
    clear = _blocking(calls.Verbs.clear)
    clear_finished = _blocking(calls.Verbs.clear_finished)
    waiting = _blocking(calls.Verbs.waiting)
    save = _blocking(calls.Verbs.save)
    close = _blocking(calls.Verbs.close)
    describe = _blocking(calls.Verbs.describe)

    @with_get_options
    def get(self, request: GetRequest) -> Batch | None:
        """`get_batch`, called with the fields of a request."""
        return self.get_batch(request)

    def disconnect(self) -> None:
        """Disconnect: what it holds under a lease goes out again."""
        if self._connection is not None:
            self._connection.end("this client has disconnected")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.disconnect()

    def __reduce__(self) -> tuple[Any, ...]:
        return SyncQueue, (self.endpoint,)

    async def _run(self, call: calls.Call) -> Any:
        return self._connected().run(call)

    def _connected(self) -> SyncConnection:
        if self._connection is None or self._connection.inherited:
            self._connection = SyncConnection(self.endpoint)
        return self._connection
