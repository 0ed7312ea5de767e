"""Processes that end with their parent, or with who they work for, however that ends; and with what they started."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_LOOKED_EVERY_S = 1.0
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before anybody forks


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal once the thread that started it ends, also where no thread of this
    one gets its turn. On Linux only. May be called between fork and exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)


def end_with_parent() -> None:
    """End this process, one of multiprocessing's, with the process that started it, whichever thread of that did."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class HasDescriptor(Protocol):
    """A stream socket, or what has one."""

    def fileno(self) -> int:
        """Number of its descriptor, below 0 once it is closed."""


def end_with_peer(connections: Callable[[], Sequence[HasDescriptor]], within_s: float) -> None:
    """End this process so many seconds after the other side of one of its connections has gone, if it has not ended by
    itself: its event loop may be stuck in a collective call of which that side was to be told."""
    threading.Thread(target=_wait_for_peer, args=(connections, within_s), daemon=True).start()


def _wait_for_peer(connections: Callable[[], Sequence[HasDescriptor]], within_s: float) -> None:
    while not _any_left(connections()):
        time.sleep(_LOOKED_EVERY_S)
    time.sleep(within_s)
    os._exit(1)


def _any_left(connections: Sequence[HasDescriptor]) -> bool:
    watch = select.poll()
    for number in [connection.fileno() for connection in connections]:
        if number >= 0:
            watch.register(number, select.POLLRDHUP)  # and hang-ups and errors, which are always told
    return bool(watch.poll(0))


def kill_group(leader: int) -> None:
    """Kill what is in the process group of this process; nothing where all of it has gone, or it never made one."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
