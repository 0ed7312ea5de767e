"""Runs a function in several new processes at once, for tests of what only real processes show."""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.runtime.fork_server import tell_deaths
from tests.support.forking import forking


def run_in_processes(target: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
    """target(*arguments[i]) in process i; the results in order. No process outlives the call.

    Raises RuntimeError with how each process failed that did, in `timeout_s` at most; of one that died, with what it
    wrote to its standard error, where C++ says why it ends a process, and which thread did with what on its stack.
    """
    context = forking()
    until = time.monotonic() + timeout_s
    with TemporaryDirectory() as folder:
        errors = [Path(folder, str(i)) for i in range(len(arguments))]
        pipes = [context.Pipe(duplex=False) for _ in arguments]
        processes = [
            context.Process(target=_report, args=(writer, target, args, said), daemon=True)
            for (_, writer), args, said in zip(pipes, arguments, errors, strict=True)
        ]
        try:
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()  # the child has its own: when that goes, the reader sees the end
            answers: list[Any] = []
            failures: list[str] = []
            for i, (process, (reader, _)) in enumerate(zip(processes, pipes, strict=True)):
                # Where one failed the others are asked as well: who lost a peer says less than that peer.
                fine, answer = _answer(process, reader, min(until, time.monotonic() + 10) if failures else until)
                said = "" if fine or not errors[i].exists() else errors[i].read_text(errors="replace")
                (answers if fine else failures).append(answer if fine else f"process {i} {answer}\n{said}")
            if failures:
                raise RuntimeError("\n".join(failures))
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


def run_ranks(target: Callable[..., Any], ranks: int, *arguments: Any, timeout_s: float = 200) -> list[Any]:
    """target(store, rank, *arguments) in a process of each of so many ranks, which all meet at the store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
    each = [(target, store.port, ranks, rank, *arguments) for rank in range(ranks)]
    return run_in_processes(_of_rank, each, timeout_s)


def _of_rank(target: Callable[..., Any], port: int, ranks: int, rank: int, *arguments: Any) -> Any:
    from torch.distributed import TCPStore

    return target(TCPStore("127.0.0.1", port, ranks, False, wait_for_workers=False), rank, *arguments)


def _answer(process: BaseProcess, reader: Connection, until: float) -> tuple[bool, Any]:
    """Whether the process did what it was asked, and its answer or how it failed."""
    if not reader.poll(max(0.0, until - time.monotonic())):
        return False, "did not answer in time"
    try:
        fine, value = pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join(10)
        return False, f"died without a word, exit code {process.exitcode}"
    return fine, value if fine else f"failed:\n{value}"


def _report(writer: Connection, target: Callable[..., Any], arguments: tuple[Any, ...], errors: Path) -> None:
    import torch

    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    tell_deaths()
    torch.set_num_threads(1)
    try:
        answer = (True, target(*arguments))
    except Exception:
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))  # plain bytes: torch's own way with pipes needs the sender to stay alive
