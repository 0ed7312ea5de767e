"""How well does a cost model, fitted to `colocate_sync` on one device, predict real runs of every other schedule?

    python -m tests.benchmarks.bench_prediction [--rounds 2] [--iterations 30] [--schedules NAMES] [settings ...]

Fits costs to real `colocate_sync` runs of the tiny model on one device as `make calibrate` does (two batch sizes, so
that fixed and growing parts come apart), prints them, then runs every schedule for real, and on the virtual clock with
these costs. Prints the median time of an iteration of both. Target: 20 %.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.calibration.fitting import explained
from harness.calibration.runs import WARMUP, base_job, calibrate_runs
from harness.config import CostConfig
from harness.config.compose import compose_job
from harness.config.registries import SCHEDULES
from harness.driver.session import simulate
from harness.metrics.run_files import load_timeline
from harness.metrics.timeline import Timeline
from tests.support.forked_drivers import forked_drivers

CALIBRATION = (("algorithm.batch_groups=16",), ("algorithm.batch_groups=4", "algorithm.micro_batch_groups=2"))
SPLITS = {"colocate_sync": ("cluster.devices=1",), "half_step": ("cluster.devices=3", "schedule.split.rollout=2")}
APART = ("cluster.devices=2",)  # one samples, one trains
COLUMNS = "{:<22}{:>9}{:>14}{:>15}{:>10}"


def iteration_s(timeline: Timeline) -> float:
    """Median seconds of an iteration: of pairs of them, since some schedules do two at a time."""
    ends = [timeline.iteration_ends[i] for i in range(WARMUP - 1, len(timeline.iteration_ends))]
    return statistics.median((after - before) / 2 for before, after in zip(ends, ends[2:], strict=False))


def predicted_s(cost: CostConfig, settings: Sequence[str]) -> float:
    return iteration_s(simulate(replace(compose_job(["backend=virtual", *settings]), cost=cost), 0).timeline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("settings", nargs="*", help="more settings of all jobs, such as task=expand")
    given = parser.parse_args()
    common = [f"iterations={given.iterations}", "save_weights=false", *given.settings]
    with tempfile.TemporaryDirectory() as folder, forked_drivers() as drivers:

        def measured(name: str, job: Sequence[str]) -> Path:
            return drivers.bench(Path(folder), name, "backend=real", "force=true", *job)

        alone = [*common, "schedule=colocate_sync", "cluster.devices=1"]
        runs = [measured(f"fit{n}", [*alone, *batch]) for n, batch in enumerate(CALIBRATION)]
        fitted = calibrate_runs(runs, base_job([]))
        print("\n".join(explained(fitted)), flush=True)
        print(COLUMNS.format("schedule", "devices", "measured, ms", "simulated, ms", "error"), flush=True)
        for name in given.schedules.split(","):
            job = [*common, f"schedule={name}", *SPLITS.get(name, APART), "cluster.oversubscribe=true"]
            devices = compose_job(job).cluster.devices
            times = [iteration_s(load_timeline(measured(name, job))) for _ in range(given.rounds)]
            real, simulated = statistics.median(times), predicted_s(fitted.cost, job)
            error = f"{simulated / real - 1:+.0%}"
            print(COLUMNS.format(name, devices, f"{real * 1e3:.0f}", f"{simulated * 1e3:.0f}", error), flush=True)


if __name__ == "__main__":
    main()
