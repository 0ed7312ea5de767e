"""Ctrl-C, which is never lost; and SIGTERM, which asks a run to leave when it has a checkpoint.

The import system takes and releases locks, partly where exceptions are swallowed: a KeyboardInterrupt there is lost, or
leaves a lock held that another thread waits for, for ever. MLflow is loaded beside the start of the roles, so there is
such a thread. A KeyboardInterrupt in the callback of a weak reference or in a finalizer is lost, too: Python prints it
and goes on (`sys.unraisablehook`).
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_Result = TypeVar("_Result")

_IMPORTS = "<frozen importlib._bootstrap>"
_AGAIN_S = 0.05


def keep_interrupts() -> None:
    """Let an interrupt of the main thread wait until it imports nothing, which a second SIGINT does not, and raise it
    again where it was raised in vain.

    Uses SIGALRM. Where SIGINT is ignored, or has a handler of its own, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    interrupt = _Interrupt(sys.unraisablehook)
    sys.unraisablehook = interrupt.hear
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, interrupt)
    # An alarm that is still to come would kill an interpreter which has given up its handlers.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)


class _Interrupt:
    """A handler of signals that raises KeyboardInterrupt, after what cannot be interrupted.

    Args:
        unraisable: told of all else that is raised in vain.
    """

    def __init__(self, unraisable: Callable[[UnraisableHookArgs], Any]) -> None:
        self._unraisable = unraisable
        self._waits = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM and not self._waits:
            return  # it was on its way when a second SIGINT did not wait
        if _importing(frame) and not (self._waits and number == signal.SIGINT):
            self._try_again()
            return
        self._waits = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise KeyboardInterrupt

    def hear(self, unraisable: UnraisableHookArgs) -> None:
        """Take what was raised where nobody can catch it."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._try_again()
        else:
            self._unraisable(unraisable)

    def _try_again(self) -> None:
        self._waits = True
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def run_in(runner: asyncio.Runner, work: Coroutine[Any, Any, _Result]) -> _Result:
    """`runner.run(work)`, which an interrupt cancels: asyncio does that only under Python's own handler."""
    handler = signal.getsignal(signal.SIGINT)
    if not isinstance(handler, _Interrupt):
        return runner.run(work)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runner.get_loop().set_exception_handler(_without_interrupts)
    try:
        return runner.run(work)
    finally:
        signal.signal(signal.SIGINT, handler)


def _without_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A second interrupt hits whichever task runs, which nobody waits for any more: it ended the loop, too."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


class Terminated(KeyboardInterrupt):
    """SIGTERM, where nobody waits for a checkpoint."""


class LeaveRequest:
    """Whether SIGTERM has asked to leave. A second one, or where `at_once` the first, leaves as Ctrl-C does."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.asked, self.at_once = False, at_once

    def __call__(self, number: int, frame: FrameType | None) -> None:
        asked, self.asked = self.asked, True
        if not asked and not self.at_once:
            return
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it runs in the background
            raise KeyboardInterrupt
        else:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def leaving_when_asked(*, at_once: bool) -> Iterator[LeaveRequest]:
    """Handle SIGTERM, which within it asks, and ends nothing; or, at once, it raises Terminated where Ctrl-C raises
    KeyboardInterrupt. Only in the main thread."""
    request = LeaveRequest(at_once=at_once)
    before = signal.signal(signal.SIGTERM, request)
    try:
        yield request
    except KeyboardInterrupt:
        if at_once and request.asked:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            return True
        frame = frame.f_back
    return False
