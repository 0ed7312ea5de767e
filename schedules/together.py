"""Work side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Begin all of it in this order, and wait for all; the first failure cancels the rest (ExceptionGroup)."""
    async with asyncio.TaskGroup() as tasks:
        for part in work:
            tasks.create_task(part)
