"""What `throughput/fraction_of_bound` leaves out: where the pools of a run computed nothing.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_bound [--run FOLDER] [settings ...]

Runs `fully_async` on two devices, or reads a finished run (`results/<experiment>/<cell>/seed=<n>`), and prints, of each
pool of devices, the busiest first, after warm-up: the share of time and the milliseconds of an iteration of each kind
of work, whose sum is the busiest one's `fraction_of_bound`, and of the gaps between two pieces of work by what ended
and what began; a mean over its devices.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from harness.config.placement import DEVICE_ROLES
from harness.metrics.run_files import load_timeline
from harness.metrics.timeline import WORK_KINDS, Span, Timeline
from tests.support.real_runs import bench

LINE = "{:<40}{:>9}{:>17}{:>20}"


def shares(timeline: Timeline, devices: set[str]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Seconds of these devices in the steady window, by kind of work and by gap, and how many gaps of each there were.
    They add up to the window's length times the devices."""
    begin, end = timeline.steady_window()
    work, gaps, count = Counter[str](), Counter[str](), Counter[str]()
    for device in devices:
        at, before = begin, "the start"
        for span in of_device(timeline, device):
            if span.end <= at or span.start >= end:
                continue
            if span.start > at:
                gap = f"{before} -> {span.kind}"
                gaps[gap] += span.start - at
                count[gap] += 1
            work[span.kind] += min(span.end, end) - max(span.start, at)
            at, before = min(span.end, end), span.kind
        gaps["the rest"] += end - at
    return work, gaps, count


def of_device(timeline: Timeline, device: str) -> list[Span]:
    """Work on it, by start."""
    on_it = {who for who, place in timeline.placement.items() if device in place.devices}
    return [span for span in timeline.spans if (span.role, span.engine) in on_it and span.kind in WORK_KINDS]


def report(timeline: Timeline) -> None:
    pools: dict[str, set[str]] = {}
    for (role, _), place in timeline.placement.items():
        if role in DEVICE_ROLES:
            pools.setdefault(place.pool, set()).update(place.devices)

    def busy(pool: str) -> float:
        return sum(shares(timeline, pools[pool])[0].values()) / len(pools[pool])

    for pool in sorted(pools, key=busy, reverse=True):
        report_pool(timeline, pool, pools[pool])


def report_pool(timeline: Timeline, pool: str, devices: set[str]) -> None:
    begin, end = timeline.steady_window()
    iterations = sum(begin < at <= end for at in timeline.iteration_ends.values())
    work, gaps, count = shares(timeline, devices)
    whole = (end - begin) * len(devices)
    print(f"pool {pool}: {iterations} iterations of {(end - begin) / iterations * 1e3:.1f} ms")
    print(LINE.format("", "share", "ms an iteration", "times an iteration"))

    def line(name: str, seconds: float, times: str = "") -> None:
        each = seconds / len(devices) / iterations * 1e3
        print(LINE.format(name, f"{seconds / whole:.1%}", f"{each:.2f}", times))

    for kind, seconds in work.most_common():
        line(kind, seconds)
    line("work", sum(work.values()))
    for gap, seconds in gaps.most_common():
        line(gap, seconds, f"{count[gap] / len(devices) / iterations:.2f}" if count[gap] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run, instead of one that is made")
    parser.add_argument("settings", nargs="*", help="of the run that is made, such as iterations=40")
    given = parser.parse_args()
    if given.run is not None:
        return report(load_timeline(given.run))
    with tempfile.TemporaryDirectory() as results:
        report(load_timeline(bench(Path(results), "bound", "schedule=fully_async", *given.settings)))


if __name__ == "__main__":
    main()
