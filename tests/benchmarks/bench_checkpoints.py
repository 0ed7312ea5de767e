"""What do checkpoints cost a run: its iterations with and without them, in turns, and those in which parts of one fall.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_checkpoints [--rounds 3] [--every 10] [setting=value ...]

A checkpoint of version v ends the iteration that made v with a copy of the trainer's state, and the next one with the
queue saved; the disk is written beside both. Prints medians in milliseconds; a checkpoint's exposed time is what the
two last longer than iterations of the same runs in which nothing of one falls.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from harness.metrics.run_files import load_metrics
from tests.support.forked_drivers import forked_drivers
from tests.support.real_runs import SMALL

JOB = (*SMALL.split(), "iterations=62", "warmup_iterations=2", "cluster.devices=1", "schedule=colocate_sync")


def durations(folder: Path) -> np.ndarray:
    """Milliseconds of each iteration after the first two, in which everything is new; 0 for those."""
    found = np.array([line["time/iteration_s"] for line in load_metrics(folder)]) * 1000
    found[:2] = 0.0
    return found


def told(what: str, values: Sequence[float] | np.ndarray) -> None:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    print(f"{what:<44}{median:8.1f} ms  (middle half {low:.1f} to {high:.1f}, of {len(values)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--every", type=int, default=10, help="checkpoint.every")
    parser.add_argument("settings", nargs="*", help="more settings of the job, such as iterations=22")
    arguments = parser.parse_args()
    without, copied, saved, beside = list[float](), list[float](), list[float](), list[float]()
    with TemporaryDirectory() as results, forked_drivers() as drivers:
        for number in range(arguments.rounds):
            for every in (0, arguments.every):
                settings = (*JOB, *arguments.settings, f"checkpoint.every={every}")
                made = drivers.bench(Path(results), f"every_{every}_{number}", *settings)
                for iteration, took in enumerate(durations(made)):
                    made_version = iteration + 1
                    if not took:
                        continue
                    if not every:
                        without.append(took)
                    elif made_version % every == 0:
                        copied.append(took)
                    elif made_version > every and made_version % every == 1 % every:
                        saved.append(took)
                    else:
                        beside.append(took)
    told("without checkpoints", without)
    told(f"with checkpoint.every={arguments.every}", [*copied, *saved, *beside])
    told("  that end with a copy of the trainer's state", copied)
    told("  that end with the queue saved", saved)
    told("  all others", beside)
    exposed = np.median(copied) + np.median(saved) - 2 * np.median(beside)
    print(f"a checkpoint's exposed time: {exposed:+.1f} ms")


if __name__ == "__main__":
    main()
