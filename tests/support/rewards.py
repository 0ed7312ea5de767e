"""Rewards for tests of the processes that score: in a module that those can import."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib

from harness.tasks import Sample, Score


def long(sample: Sample) -> Score:
    """The more tokens the better; says which process scored. The first samples take longest."""
    time.sleep(0.002 * (24 - min(24, sample.tokens)))
    return Score(sample.tokens / 100, sample.response == sample.answer, {"process": os.getpid()})


long.extra_metrics = ("process",)  # type: ignore[attr-defined]


def letters(sample: Sample) -> float:
    """The share of letters: what random weights earn differs from sample to sample."""
    return sum(character.isalpha() for character in sample.response) / max(1, len(sample.response))


def graded(sample: Sample) -> Score:
    """The same, and parts to compare by themselves."""
    return Score(letters(sample), False, {"letters": letters(sample), "short": -float(sample.tokens)})


graded.extra_metrics = ("letters", "short")  # type: ignore[attr-defined]


def letters_or_none(sample: Sample) -> float:
    """The same, and of a fifth of all responses no number."""
    return float("nan") if zlib.crc32(sample.response.encode()) % 5 == 0 else letters(sample)


def right_or_none(sample: Sample) -> float:
    """Whether it is the answer; fails on one response of fifty."""
    if zlib.crc32(sample.response.encode()) % 50 == 0:
        raise ConnectionError("the judge is away")
    return float(sample.response == sample.answer)


def commanded(sample: Sample) -> float:
    """Does what the response says; 1 where that is nothing in particular."""
    hostile = HOSTILE.get(sample.response)
    if hostile is not None:
        hostile()
    return 1.0


async def judged(sample: Sample) -> float:
    """As one that asks a judge elsewhere."""
    if sample.response == "forever":
        await asyncio.Event().wait()
    if sample.response == "raise":
        raise ConnectionError("the judge is away")
    await asyncio.sleep(0)
    return 0.5


def particular(sample: Sample, *, least: int) -> float:
    """Reads numbers from `least` on only."""
    return float(sample.response == sample.answer)


def _particular(answer: str, *, least: int) -> None:
    if json.loads(answer) in range(least):
        raise ValueError(f"{answer} is less than {least}")


particular.check_answer = _particular  # type: ignore[attr-defined]


def endless() -> None:
    while True:
        pass


def catastrophic() -> None:
    re.fullmatch(r"(a+)+b", "a" * 64)


def fill_memory() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


def recurse() -> None:
    recurse()


def leave_a_child() -> None:
    """One that never ends."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    endless()


def start_threads() -> None:
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    raise RuntimeError("threads are left")


def unusual() -> None:
    class Unusual(BaseException):
        def __str__(self) -> str:
            raise ValueError("no text")

    raise Unusual


HOSTILE = {
    "endless": endless, "sleep": lambda: time.sleep(3600), "catastrophic": catastrophic, "memory": fill_memory,
    "at once": lambda: bytearray(1 << 40), "recursion": recurse, "raise": lambda: 1 / 0, "unusual": unusual,
    "exit": lambda: sys.exit(3), "os exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM), "abort": os.abort,
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt), "child": leave_a_child, "threads": start_threads,
    "close": lambda: os.closerange(3, 1 << 20),
}  # fmt: skip
