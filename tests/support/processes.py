"""Runs a function in several new processes at once, for tests of what only real processes show."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.support.forking import forking


def run_in_processes(target: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
    """target(*arguments[i]) in process i; the results in order. No process outlives the call.

    Raises RuntimeError with the traceback of a process that failed, TimeoutError after `timeout_s`.
    """
    context = forking()
    until = time.monotonic() + timeout_s
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    processes = [
        context.Process(target=_report, args=(writer, target, args), daemon=True)
        for (_, writer), args in zip(pipes, arguments, strict=True)
    ]
    try:
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()  # the child has its own: when that goes, the reader sees the end
        answers = [_answer(i, reader, until) for i, (reader, _) in enumerate(pipes)]
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        return answers
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        for reader, _ in pipes:
            reader.close()


def _answer(number: int, reader: Connection, until: float) -> Any:
    if not reader.poll(max(0.0, until - time.monotonic())):
        raise TimeoutError(f"process {number} did not answer in time")
    try:
        fine, value = pickle.loads(reader.recv_bytes())
    except EOFError:
        raise RuntimeError(f"process {number} died without a word") from None
    if not fine:
        raise RuntimeError(f"process {number} failed:\n{value}")
    return value


def _report(writer: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, target(*arguments))
    except Exception:
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))  # plain bytes: torch's own way with pipes needs the sender to stay alive
