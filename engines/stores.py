"""The store where the processes of a torch.distributed group meet: on one host a file that only their user can open;
between hosts torch's server, which asks nobody who they are, on one address. torch's own listens on all there are."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Built = TypeVar("Built")

_BEAT_S = 0.2  # how often one that waits for the others says that it lives
_SILENT_BEATS = 5  # after which one that said nothing is taken for dead


def open_store(place: str, size: int, timeout_s: float) -> tuple[dist.Store, str]:
    """A store for `size` processes, which lives as long as it is held, and the place where the others join it. place: a
    path, in a folder of their user's own, or an address of this host."""
    if place.startswith("/"):
        return join_store(place, size, timeout_s), place
    store = listening_store(place, size, timeout_s)
    return store, f"{place}:{store.port}"


def join_store(place: str, size: int, timeout_s: float) -> dist.Store:
    """The store that was opened for `size` processes at this place. RuntimeError where there is none."""
    if place.startswith("/"):
        store: dist.Store = dist.FileStore(place, size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    host, _, port = place.rpartition(":")
    return dist.TCPStore(host, int(port), size, False, timedelta(seconds=timeout_s), wait_for_workers=False)


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
