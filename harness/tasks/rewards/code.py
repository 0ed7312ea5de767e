"""Programs, run against tests in a process that is limited in time, memory, files and processes.

That bounds what a program can use up by accident. It is no sandbox against one that wants to do harm: it reads the
files that this user reads, and has the network.
"""

import ctypes
import json
import os
import re
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.rpc.children import die_with_parent, kill_group
from harness.tasks.rewards.reading import pays_what_ended
from harness.tasks.task import Sample, Score

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MIB = 1 << 20
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 24, 36, 37
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """The limits of one run of a program: seconds, MiB, processes and threads."""

    time_s: float
    memory_mib: int
    file_mib: int
    processes: int


@pays_what_ended
def code(
    sample: Sample,
    *,
    time_s: float = 4.0,
    memory_mib: int = 512,
    file_mib: int = 16,
    processes: int = 16,
    partial: bool = False,
) -> Score:
    """1 where the last Python block of the response passes all tests of the answer; with `partial`, their share.

    The answer is JSON: `{"tests": "assert f(1) == 2"}`, run after the program in the same process, or
    `{"cases": [{"input": "3", "output": "9"}]}`, what a program of its own process reads and prints for each. time_s:
    for all of them together. Raises ValueError for an answer that is neither.
    """
    tests, cases = _tests(sample.answer)
    blocks = _BLOCK.findall(sample.response)
    program = blocks[-1] if blocks else sample.response
    share = time_s / max(1, len(cases))
    limits = Limits(share, memory_mib, file_mib, processes)
    if tests is not None:
        said = secrets.token_hex(16)  # printed after the tests: a program that ends before them has not passed
        passed = [_output(f"{program}\n\n{tests}\nprint('\\n{said}')\n", "", limits).split("\n")[-2:] == [said, ""]]
    else:
        passed = [_words(_output(program, case["input"], limits)) == _words(case["output"]) for case in cases]
    return Score(sum(passed) / len(passed) if partial else float(all(passed)), all(passed))


def _tests(answer: str) -> tuple[str | None, list[dict[str, str]]]:
    try:
        given: Any = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"the answer {answer!r:.60} is not JSON ({error})") from error
    if isinstance(given, dict) and isinstance(given.get("tests"), str):
        return given["tests"], []
    cases = given.get("cases") if isinstance(given, dict) else None
    if isinstance(cases, list) and cases:
        if all(isinstance(c, dict) and all(isinstance(c.get(k), str) for k in ("input", "output")) for c in cases):
            return None, cases
    raise ValueError(f'the answer {answer!r:.60} has no tests; give {{"tests": ...}} or {{"cases": [...]}}')


code.check_answer = _tests  # type: ignore[attr-defined]


def _words(text: str) -> list[list[str]]:
    """The compared part of a program's output: white space inside of lines and at the end aside."""
    return [line.split() for line in text.rstrip().splitlines()]


def _output(program: str, given: str, limits: Limits) -> str:
    """Output of a program; "" where it fails, or needs more than it may have. Leaves no process and no file."""
    temporary = tempfile.TemporaryDirectory(prefix="cadence-code-", ignore_cleanup_errors=True)
    with _adopting_orphans(), temporary as folder:
        path, printed = Path(folder) / "program.py", Path(folder) / "output"
        path.write_text(program, encoding="utf-8", errors="replace")
        before = set(psutil.Process().children(recursive=True))
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
                preexec_fn=lambda: _limit(limits),
            )
            try:
                process.communicate(given.encode(), timeout=limits.time_s)
            except subprocess.TimeoutExpired:
                return ""
            finally:
                _end_all(process, before)
        if process.returncode != 0 or printed.stat().st_size > limits.file_mib * _MIB:
            return ""
        return printed.read_text(encoding="utf-8", errors="replace")


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of the processes that a program leaves behind, so that they can be ended."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _limit(limits: Limits) -> None:
    """Set the limits in the new process, before the program."""
    for kind, most in (
        (resource.RLIMIT_CPU, int(limits.time_s) + 1),
        (resource.RLIMIT_AS, limits.memory_mib * _MIB),
        (resource.RLIMIT_FSIZE, limits.file_mib * _MIB),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, _processes_of_user() + limits.processes),
    ):
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))
    die_with_parent()


def _processes_of_user() -> int:
    """Processes and threads that count against RLIMIT_NPROC already; none of a user made up for this process.

    The limit does not hold for root: it gets a user id of its own, and loses what lifts limits, while its rights to
    files stay those of root.
    """
    if os.getuid() != 0:
        return sum(p.info["num_threads"] or 0 for p in psutil.process_iter(["uids", "num_threads"]) if _is_mine(p))
    for capability in (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setresuid(1_000_000 + os.getpid(), 0, 0)
    return 0


def _is_mine(process: psutil.Process) -> bool:
    uids = process.info["uids"]
    return uids is not None and uids.real == os.getuid()


def _end_all(process: subprocess.Popen[bytes], before: set[psutil.Process]) -> None:
    """The program, and what it started: in its session, or where it has left that."""
    kill_group(process.pid)
    process.wait()
    while left := set(psutil.Process().children(recursive=True)) - before:
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for child in left:
            with suppress(ChildProcessError):  # of another, which is ours once that one has ended
                os.waitpid(child.pid, 0)
