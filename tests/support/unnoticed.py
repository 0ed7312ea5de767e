"""Errors of tasks that nobody waited for."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def none_unnoticed() -> Iterator[None]:
    """Of what was begun meanwhile, and is forgotten at the end, no error would be a traceback in a log."""
    told: list[Any] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda loop, context: told.append((context["message"], context.get("exception"))))
    try:
        yield
        gc.collect()
    finally:
        loop.set_exception_handler(before)
    assert told == []
