"""How the processes of a group over Gloo connect to each other and to nobody else, and what a wait for them says."""

import ctypes
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Built = TypeVar("Built")

_BEAT_S = 0.2  # how often one that waits for the others says that it lives
_SILENT_BEATS = 5  # after which one that said nothing is taken for dead
_PROOF = 32  # random bytes that a member sends to each other one
_SO_ATTACH_FILTER, _RETURN = 26, 0x06  # of Linux: the option, and the instruction that says how much of a packet passes


def listening_store(host: str, size: int, timeout_s: float) -> dist.TCPStore:
    """A store for `size` processes on a free port (`store.port`) of this address, and of no other. Whoever reaches the
    address may join."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(place)
        port: int = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            size,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


_lock = threading.Lock()
_forming = 0  # groups, in this process
_open_before: set[int] = set()  # listeners, by inode, as the first of them began


@contextmanager
def shut_doors() -> Iterator[None]:
    """Let nobody else connect to the listeners of Gloo that are opened meanwhile, once the last of the groups that form
    in this process has formed. A connection is of no use by then, but that each costs a file, for as long as the group
    lives: the process ends at its limit."""
    global _forming, _open_before
    with _lock:
        if not _forming:
            _open_before = {inode for inode, _ in _polled_listeners()}
        _forming += 1
    try:
        yield
    finally:
        with _lock:
            _forming -= 1
            if not _forming:
                for inode, listener in _polled_listeners():
                    if inode not in _open_before:
                        _drop_all(listener)


@shut_doors()
def all_connected(
    build: Callable[[], Built],
    store: dist.Store,
    what: str,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    aborted: Callable[[], bool] = lambda: False,
) -> Built:
    """The result of `build`, in which all of these ranks connect to each other over Gloo: a process group, or several.

    Gloo waits five times its timeout for one that died since it came (`waitUntilConnected` in gloo's
    transport/tcp/pair.cc), and cannot be stopped: so a thread builds, and this one waits for timeout_s, or until
    `aborted`. Raises TimeoutError, naming the ranks that were silent, or RuntimeError, the same with what Gloo says.
    """
    if len(ranks) == 1:
        return build()
    beside = store.clone()  # type: ignore[attr-defined]  # the thread waits in the other connection
    beats = dist.PrefixStore(f"{what} {beside.add(f'{what} of {rank}', 1)}", beside)
    built: Future[Built] = Future()

    def work() -> None:
        try:
            built.set_result(build())
        except BaseException as error:
            built.set_exception(error)

    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline and not aborted():
        beats.add(f"{rank}", 1)
        thread.join(_BEAT_S)
    if built.done() and built.exception() is None:
        beats.set(f"{rank} is done", "")
        return built.result()
    beats.set(f"{rank} is done", "")  # it has given up, and is none that others wait for
    heard = {other: beats.add(f"{other}", 0) for other in ranks}
    time.sleep(_SILENT_BEATS * _BEAT_S)
    left = [other for other in ranks if other != rank and not beats.check([f"{other} is done"])]
    silent = [other for other in left if beats.add(f"{other}", 0) == heard[other]] or left
    said = f"{what}: rank {rank} waited for {', '.join(f'rank {other}' for other in silent) or 'the others'}"
    if built.done():
        raise RuntimeError(f"{said}: {built.exception()}") from built.exception()
    raise TimeoutError(f"{said}, and gave up after {timeout_s - max(0.0, deadline - time.monotonic()):.0f} s")


def prove(group: Any, store: dist.Store) -> None:
    """Raise PermissionError unless the members of this group over Gloo are those that meet in this store: each hears
    from each other one what that one wrote there. Gloo itself takes whoever connects first. Of groups that meet in one
    store each has a name.

    Nobody can hand on what a member says: it goes to the address that the other one wrote down.
    """
    name = getattr(group, "group_name", "")
    rank, ranks, beside = group.rank(), range(group.size()), dist.PrefixStore(f"proofs {name}", store)
    beside.set(f"{rank}", secrets.token_hex(_PROOF * len(ranks)))
    written = torch.stack([_proofs(beside.get(f"{other}").decode()) for other in ranks])  # by whom, for whom
    heard = torch.zeros_like(written[:, rank])
    others = [other for other in ranks if other != rank]
    said = [group.send([written[rank, other]], other, 0) for other in others]
    for work in [group.recv([heard[other]], other, 0) for other in others]:
        work.wait()
    strangers = [other for other in others if not heard[other].equal(written[other, rank])]
    if strangers:
        raise PermissionError(f"somebody else took the place of {', '.join(f'rank {other}' for other in strangers)}")
    for work in said:
        work.wait()


def _proofs(written: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(written), dtype=torch.uint8).view(-1, _PROOF)


def _polled_listeners() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets that listen and that an epoll waits for, by inode, as Gloo's do, and none of NCCL's."""
    if sys.platform != "linux":  # there is no such filter
        return
    polled: set[str] = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now
            if os.readlink(one) == "anon_inode:[eventpoll]":
                polled |= set(re.findall(r"tfd:\s*(\d+)", Path(f"/proc/self/fdinfo/{one.name}").read_text()))
    for descriptor in polled:
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as sock:
            tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield os.fstat(sock.fileno()).st_ino, sock


def _drop_all(listener: socket.socket) -> None:
    """Drop whatever comes to it. It cannot be closed: Gloo would end the process."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
