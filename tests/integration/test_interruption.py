"""A run that ends early ends whole: no process, no half-written file, an error with a name, and a rerun that works."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from harness.metrics.run_files import load_ledger, load_metrics
from tests.support.forked_drivers import Drivers, folder_of
from tests.support.project import ROOT
from tests.support.real_runs import BARE, command, environment, lines

pytestmark = pytest.mark.slow

SETTINGS = (
    *("iterations=120", "schedule=fully_async", "model.warm_start=false", "smoke=true", "loggers=[]", *BARE.split()),
    *("algorithm.batch_groups=4", "algorithm.group_size=4", "algorithm.micro_batch_groups=2"),
)
STARTED_WITHIN_S, ENDED_WITHIN_S = 300, 120


def heed_interrupts() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(results: Path, experiment: str, *settings: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A long run in a session of its own, once its first iterations are written."""
    arguments = command(f"experiment={experiment}", *SETTINGS, *settings)
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment(results),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        wait_until(lambda: lines(results, experiment) > 2, process)
        yield process, folder_of(results, experiment)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not condition():
        assert process.poll() is None and process.stdout is not None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, f"no iteration within {STARTED_WITHIN_S} s"
        time.sleep(0.2)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those that still run once they had some seconds to end."""
    _, left = psutil.wait_procs(processes, timeout=60)
    return [" ".join(process.cmdline()) for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_ctrl_c_ends_in_seconds_and_a_rerun_finishes(results: Path, drivers: Drivers) -> None:
    with started(results, "interrupted") as (process, folder):
        relatives = family(process)
        assert len(relatives) >= 5  # the server that forks, the queue, two devices, the host
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 130, output
    assert "interrupted" in output and "Traceback" not in output
    assert not alive(relatives)
    assert not (folder / "DONE").exists()
    assert not list(folder.glob(".*.tmp"))
    assert len(load_metrics(folder)) > 2  # what was measured until then can be read
    again = drivers.bench(results, "interrupted", *SETTINGS)
    assert (again / "DONE").exists()
    assert load_ledger(again)["in_flight"] == 0


@pytest.mark.parametrize(
    ("name", "signals", "code", "told"),
    [
        ("twice", (signal.SIGINT, signal.SIGINT), 130, "interrupted; "),
        ("both", (signal.SIGTERM, signal.SIGINT), 143, "ended by SIGTERM; "),
    ],
)
def test_signals_end_a_run_whole_however_many_there_are(
    results: Path, drivers: Drivers, name: str, signals: tuple[signal.Signals, ...], code: int, told: str
) -> None:
    endless = "iterations=10000"  # so that it works while another command begins, however long that takes
    with started(results, f"signals_{name}", endless) as (process, folder):
        if name == "both":
            refused, said = drivers.run_killed(results, f"signals_{name}", (*SETTINGS, endless), [])
            assert refused == 1 and "is being run by another process" in said and "Traceback" not in said, said
            before = len(load_metrics(folder))
            wait_until(lambda: len(load_metrics(folder)) > before, process)
        relatives = family(process)
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(0.1)
        output, _ = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == code, output
    assert told in output and "Traceback" not in output, output
    assert not alive(relatives)
    assert not (folder / "DONE").exists() and not list(folder.glob(".*.tmp"))


def test_an_engine_that_stops_without_dying_is_noticed_and_started_again(results: Path, drivers: Drivers) -> None:
    settings = (*SETTINGS, "iterations=20", "cluster.heartbeat_timeout_s=10")
    code, output = drivers.run_killed(results, "stopped_0", settings, [("device[0]", 3)], signal.SIGSTOP)
    assert code == 0, output
    assert "device[0] did not answer for 10 s (cluster.heartbeat_timeout_s)" in " ".join(output.split()), output
    assert "started again" in output and "Traceback" not in output, output
    folder = folder_of(results, "stopped_0")
    assert (folder / "DONE").exists() and load_ledger(folder)["in_flight"] == 0


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("device[1]", signal.SIGSTOP, "device[1] did not answer for 10 s (cluster.heartbeat_timeout_s)"),
        ("queue", signal.SIGKILL, "transfer queue"),
    ],
)
def test_what_stops_or_dies_and_may_not_be_started_again_ends_the_run_and_is_named(
    name: str, how: signal.Signals, said: str, results: Path, drivers: Drivers
) -> None:
    """What else dies is in test_restarts and test_lost_engines_of_runs."""
    settings, experiment = (*SETTINGS, "cluster.heartbeat_timeout_s=10", "restarts.limit=0"), f"victim_{name[:5]}"
    code, output = drivers.run_killed(results, experiment, settings, [(name, 3)], how)
    assert code == 1 and said in output and "Traceback" not in output, output
    assert not (folder_of(results, experiment) / "DONE").exists()


def test_the_server_that_forks_a_runs_processes_is_named_where_it_dies(results: Path) -> None:
    with started(results, "victim_server", "restarts.limit=0") as (process, folder):
        relatives = family(process)
        servers = [one for one in relatives if "harness.runtime.fork_server" in " ".join(one.cmdline())]
        servers[0].kill()  # of its processes the oldest is the server
        output, _ = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 1, output
    for name in ("rollout[0]", "actor[0]", "the server that forks it has ended"):
        assert name in output, output
    assert "Traceback" not in output, output
    assert not alive(relatives)
    assert not (folder / "DONE").exists()
