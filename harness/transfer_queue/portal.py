"""How a thread without an event loop uses a queue that lives in another's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from harness.transfer_queue.queue import Portal, T


@contextmanager
def portal_into(loop: asyncio.AbstractEventLoop | None) -> Iterator[Portal[Any]]:
    """Lend a function that runs coroutines in this loop, or in one of its own while that one does not run."""
    if loop is None or not loop.is_running():  # nobody else uses the queue: any loop will do
        with asyncio.Runner() as runner:
            yield runner.run
    else:
        yield partial(_run_in, loop)


def _run_in(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in another thread's loop; an interrupt here takes it back there."""
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError("this thread runs the queue's event loop and cannot wait for it: use `await` or `async for`")
    answer = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return answer.result()
    finally:
        answer.cancel()
