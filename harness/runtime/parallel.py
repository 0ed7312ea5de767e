"""Calls in parallel processes, which end with the process that made the calls, however it ends."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from harness.rpc.children import end_with_parent

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def parallel_as_completed(
    work: Callable[[_Argument], _Result],
    arguments: Sequence[_Argument],
    *,
    processes: int,
    timeout_s: float,
    what: str,
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
    work: Callable[[_Argument], _Result],
    arguments: Sequence[_Argument],
    *,
    processes: int,
    timeout_s: float,
    what: str,
) -> list[_Result]:
    """The results of all arguments, in their order. Raises as `parallel_as_completed` does."""
    found = dict(parallel_as_completed(work, arguments, processes=processes, timeout_s=timeout_s, what=what))
    return [found[number] for number in range(len(arguments))]


def _begin() -> None:
    """Ends at once where the command is interrupted, and where its process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
