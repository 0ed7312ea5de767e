"""Functions in processes of their own: CUDA does not survive a fork, and a device is one process's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Found = TypeVar("Found")


def in_processes(work: Callable[..., Found], of: Sequence[tuple[Any, ...]], limit_s: float) -> list[Found]:
    """Results of `work` for each of these arguments, all computed at the same time. Raises what one of them raised
    first, or TimeoutError after `limit_s`; the gate's runner ends what is left."""
    with ProcessPoolExecutor(len(of), multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(work, *arguments) for arguments in of]
        return [future.result(limit_s) for future in waiting]
