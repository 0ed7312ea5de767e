"""Does a run stay what it is, however long it lasts, and whatever dies meanwhile? `make bench` with these settings,
watched from outside.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_soak [--every 100] [--faults] [setting=value ...]

Prints each so many iterations what the driver's process holds (resident memory without a model, file descriptors,
threads) and the shared memory of all its processes, and how much that memory grew per 1,000 iterations over the last
three quarters. With backend=virtual, engines and queue are in that process as well.

--faults: then a process is killed, in turn the engine's, the host's, the queue's and the trainer's. The run goes on by
itself, and ends as one to which nothing happened, which is made for it: bit for bit.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from tests.support.forked_drivers import folder_of, strike
from tests.support.real_runs import check_equal, command, environment, lines

JOB = (
    *("seeds=[0]", "iterations=2000", "warmup_iterations=1", "model.warm_start=false", "cluster.oversubscribe=true"),
    *("cluster.devices=2", "algorithm.batch_groups=2", "algorithm.group_size=2", "algorithm.micro_batch_groups=2"),
)
HELD = ("schedule=fully_async", "save_weights=false")
BROKEN = ("schedule=separated_sync", "checkpoint.every=10", "restarts.limit=1000000")
KILLED = ("device[0]", "host", "queue", "device[1]")
"""Of these two devices the first is the engine's."""
_POLL_S = 0.2


def soaked(results: Path, experiment: str, settings: list[str], every: int, kills: bool) -> np.ndarray:
    """float64 [looks, 5]: iterations, MiB, descriptors, threads and MiB of shared memory, until the run has ended."""
    found: list[tuple[float, ...]] = []
    told = command(f"experiment={experiment}", *JOB, *settings)
    process = subprocess.Popen(told, env=environment(results), stdout=subprocess.DEVNULL)
    driver, victims, due = psutil.Process(process.pid), cycle(KILLED), every
    while process.poll() is None:
        if (done := lines(results, experiment)) >= due:
            due += every
            family = [driver, *driver.children(recursive=True)]
            held = driver.memory_info().rss / 2**20, float(driver.num_fds()), float(driver.num_threads())
            found.append((done, *held, _shared(family) / 2**20))
            names = "{:6.0f} iterations  {:7.1f} MiB {:4.0f} descriptors {:3.0f} threads {:7.2f} MiB shared"
            print(names.format(*found[-1]), flush=True)
            if kills:
                strike(process.pid, next(victims), lambda: driver.children(recursive=True))
        time.sleep(_POLL_S)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    return np.array(found)


def _shared(family: list[psutil.Process]) -> int:
    """Bytes of the memory that these processes share by descriptors, each once."""
    return sum({found.st_ino: found.st_blocks * 512 for one in family for found in _memory(one)}.values())


def _memory(process: psutil.Process) -> Iterator[os.stat_result]:
    for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # closed since, or the process has ended
            if os.readlink(descriptor).startswith(("/memfd:", "/dev/shm/")):
                yield os.stat(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100, help="iterations between two looks, or faults")
    parser.add_argument("--faults", action="store_true", help="kill a process each time")
    parser.add_argument("settings", nargs="*", help="more settings of the job, such as iterations=500")
    arguments = parser.parse_args()
    settings = [*(BROKEN if arguments.faults else HELD), *arguments.settings]
    with TemporaryDirectory() as folder:
        results = Path(folder)
        found = soaked(results, "soak", settings, arguments.every, arguments.faults)
        later = found[len(found) // 4 :]
        grown = np.polyfit(later[:, 0], later[:, 1], 1)[0] * 1000
        print(f"{found[0, 1]:.0f} MiB at first, {found[-1, 1]:.0f} at last; {grown:+.1f} MiB per 1,000 iterations")
        if arguments.faults:
            subprocess.run(command("experiment=whole", *JOB, *settings), env=environment(results), check=True)
            check_equal(folder_of(results, "soak"), folder_of(results, "whole"))
            print("bit for bit as a run to which nothing happened")


if __name__ == "__main__":
    main()
