"""Processes that end with their parent, or with who they work for, however that ends; calls in parallel in such
ones."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import HasFileno

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


def end_with_peer(connections: Callable[[], Sequence[HasFileno]], within_s: float) -> None:
    """End this process so many seconds after the other side of one of its connections has gone, if it has not ended by
    itself: its event loop may be stuck in a collective call of which that side was to be told. connections: stream
    sockets, whose number is below 0 once they are closed."""
    threading.Thread(target=_wait_for_peer, args=(connections, within_s), daemon=True).start()


def _wait_for_peer(connections: Callable[[], Sequence[HasFileno]], within_s: float) -> None:
    while not _any_left(connections()):
        time.sleep(_LOOKED_EVERY_S)
    time.sleep(within_s)
    os._exit(1)


def _any_left(connections: Sequence[HasFileno]) -> bool:
    watch = select.poll()
    for number in [connection.fileno() for connection in connections]:
        if number >= 0:
            watch.register(number, select.POLLRDHUP)  # and hang-ups and errors, which are always told
    return bool(watch.poll(0))


def has_come(descriptor: int, within_s: float) -> bool:
    """Whether there is something to read, within so many seconds. `select` takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s == float("inf") else max(0.0, 1000 * within_s)))


def kill_group(leader: int) -> None:
    """Kill what is in the process group of this process; nothing where all of it has gone, or it never made one."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def parallel_as_completed(
    work: Callable[[_Argument], _Result], arguments: Sequence[_Argument], *, processes: int, timeout_s: float, what: str
) -> Iterator[tuple[int, _Result]]:
    """(index of the argument, its result) as results come; the first arguments are started first.

    With one process, or one argument, all is done in this process. Raises what `work` raises, and TimeoutError, naming
    `what` was waited for, where all of it takes longer than timeout_s.
    """
    if processes < 2 or len(arguments) < 2:
        yield from ((number, work(argument)) for number, argument in enumerate(arguments))
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # the parent has threads: it must not be forked
    pool = ProcessPoolExecutor(min(processes, len(arguments)), context, _begin)
    try:
        calls = {pool.submit(work, argument): number for number, argument in enumerate(arguments)}
        for done in as_completed(calls, timeout=timeout_s):
            yield calls[done], done.result()
    except TimeoutError:
        raise TimeoutError(f"waited {timeout_s:g} s for {what}") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def parallel_map(
    work: Callable[[_Argument], _Result], arguments: Sequence[_Argument], *, processes: int, timeout_s: float, what: str
) -> list[_Result]:
    """The results of all arguments, in their order. Raises as `parallel_as_completed` does."""
    found = dict(parallel_as_completed(work, arguments, processes=processes, timeout_s=timeout_s, what=what))
    return [found[number] for number in range(len(arguments))]


def _begin() -> None:
    """Ends at once where the command is interrupted, and where its process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
