"""Ctrl-C while modules are loaded, and while a loop runs; each in a process of its own, which takes the signals."""

import subprocess
import sys
from pathlib import Path

import pytest

SLOW_MODULE = """
import os, signal, time
for _ in range({times}):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
print("loaded", flush=True)
"""
IMPORTS = """
import time
from harness.runtime.interrupts import keep_interrupts
keep_interrupts()
try:
    import slow_module
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
FINALIZER = """
import asyncio, os, signal, time
from harness.runtime.interrupts import keep_interrupts, run_in
keep_interrupts()
class Held:
    def __del__(self):
        for _ in range({times}):
            os.kill(os.getpid(), signal.SIGINT)
async def work():
    held = Held()
    del held
    await asyncio.sleep(30)
try:
    if {loop}:
        with asyncio.Runner() as runner:
            run_in(runner, work())
    else:
        held = Held()
        del held
        time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
LOOP = """
import asyncio, os, signal
from harness.runtime.interrupts import run_in, keep_interrupts
keep_interrupts()
async def work():
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
try:
    with asyncio.Runner() as runner:
        run_in(runner, work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGALRM), "it is put back"
"""
IGNORED = """
import asyncio, os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from harness.runtime.interrupts import run_in, keep_interrupts
keep_interrupts()
async def work():
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on", flush=True)
with asyncio.Runner() as runner:
    run_in(runner, work())
"""


LEAVE = """
import asyncio, os, signal
from harness.runtime.interrupts import leaving_when_asked, run_in, keep_interrupts
{before}
keep_interrupts()
async def work(request):
    for _ in range({times}):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        print("asked" if request.asked else "not asked", flush=True)
    if {times} > 1:
        await asyncio.sleep(30)
try:
    with leaving_when_asked(at_once=False) as request, asyncio.Runner() as runner:
        run_in(runner, work(request))
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it is put back"
"""


def said(script: str, folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(("times", "expected"), [(1, ["loaded", "interrupted"]), (2, ["interrupted"])])
def test_an_interrupt_waits_for_an_import_but_no_second_one(times: int, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE.format(times=times))
    assert said(IMPORTS, tmp_path) == expected


@pytest.mark.parametrize(("times", "loop"), [(1, False), (2, True)])
def test_an_interrupt_of_a_finalizer_is_not_lost(times: int, loop: bool, tmp_path: Path) -> None:
    assert said(FINALIZER.format(times=times, loop=loop), tmp_path) == ["interrupted"]


def test_what_a_loop_runs_is_cancelled_unless_interrupts_are_ignored(tmp_path: Path) -> None:
    assert said(LOOP, tmp_path) == ["cancelled", "interrupted"]
    assert said(IGNORED, tmp_path) == ["goes on"]


@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_sigterm_asks_to_leave_and_a_second_one_ends_what_runs_at_once(before: str, tmp_path: Path) -> None:
    assert said(LEAVE.format(times=1, before=before), tmp_path) == ["asked"]
    assert said(LEAVE.format(times=2, before=before), tmp_path)[-1] == "interrupted"
