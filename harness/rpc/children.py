"""Processes that end with their parent, however that ends, and with all that they started."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
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


def kill_group(leader: int) -> None:
    """Kill what is in the process group of this process; nothing where all of it has gone, or it never made one."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
