"""Does the driver's memory stay what it is, however long a run lasts? `make bench` with these settings, watched from
outside.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_memory [--every 100] [setting=value ...]

Prints the resident memory of the driver's process, which holds no model, each so many iterations, and how much it grew
per 1,000 of them over the last three quarters. With backend=virtual, engines and queue are in that process as well.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from tests.support.real_runs import command, environment, lines

JOB = (
    *("experiment=memory", "seeds=[0]", "iterations=2000", "warmup_iterations=1", "save_weights=false"),
    *("model.warm_start=false", "cluster.oversubscribe=true", "cluster.devices=2", "schedule=fully_async"),
    *("algorithm.batch_groups=2", "algorithm.group_size=2", "algorithm.micro_batch_groups=2"),
)
_POLL_S = 0.05


def watched(results: Path, settings: list[str], every: int) -> list[tuple[int, float]]:
    """(iterations, MiB), until the run has ended."""
    found: list[tuple[int, float]] = []
    process = subprocess.Popen(command(*JOB, *settings), env=environment(results), stdout=subprocess.DEVNULL)
    driver = psutil.Process(process.pid)
    while process.poll() is None:
        done = lines(results, "memory")
        if done >= (len(found) + 1) * every:
            found.append((done, driver.memory_info().rss / 2**20))
            print(f"{done:6} iterations  {found[-1][1]:7.1f} MiB", flush=True)
        time.sleep(_POLL_S)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100, help="iterations between two looks")
    parser.add_argument("settings", nargs="*", help="more settings of the job, such as iterations=500")
    arguments = parser.parse_args()
    with TemporaryDirectory() as results:
        found = np.array(watched(Path(results), arguments.settings, arguments.every))
    later = found[len(found) // 4 :]
    grown = np.polyfit(later[:, 0], later[:, 1], 1)[0] * 1000
    print(f"{found[0, 1]:.0f} MiB at first, {found[-1, 1]:.0f} at last; {grown:+.1f} MiB per 1,000 iterations")


if __name__ == "__main__":
    main()
