"""What the harness costs: `colocate_sync` on one device against a bare loop that does the same work.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_overhead [--rounds 3] [--iterations 30]

Runs the two in turn, each in processes of its own with one thread, and compares iterations after `WARMUP`. Both sample
the same tokens and make the same updates; the final weights must be equal bit by bit. Prints samples/s of both, their
ratio, and where the time of a harness iteration goes: seconds of each phase beside those of the bare loop, and the gaps
in which the device does nothing (calls between processes, the queue, the driver). Target: 0.92.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.numpy import load_file

from harness.config.compose import compose_job
from harness.metrics.run_files import load_timeline
from harness.metrics.timeline import SYNC_KINDS, Timeline
from tests.benchmarks import bare_loop
from tests.support.real_runs import bench

WARMUP = 3  # iterations left out
PHASES = ("generate", "reference", "old_log_prob", "update_actor", "weight sync", "gaps")
COLUMNS = "{:<16}{:>12}{:>12}{:>12}"


@dataclass
class Side:
    """All rounds of one contestant: samples/s of each round, ms an iteration of each phase, digests of weights."""

    rates: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    weights: set[str] = field(default_factory=set)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def phase(self, name: str) -> float:
        return statistics.median(self.phases[name]) if name in self.phases else 0.0


def measure_bare(settings: Sequence[str], samples: int, side: Side) -> None:
    """One run of the bare loop."""
    done = subprocess.run([sys.executable, "-m", bare_loop.__name__, *settings], stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout)
    seconds = {phase: statistics.median(values[WARMUP:]) for phase, values in told["seconds"].items()}
    whole = seconds.pop("iteration")
    side.rates.append(samples / whole)
    side.weights.add(told["weights"])
    for phase, value in seconds.items():
        if phase in PHASES:
            side.phases[phase].append(value * 1e3)
    rest = sum(value for phase, value in seconds.items() if phase not in PHASES)
    side.phases["gaps"].append(rest * 1e3)  # prompts and rewards, which the harness makes beside the device


def measure_harness(settings: Sequence[str], samples: int, side: Side, results: Path) -> None:
    """One run of `python -m harness bench`, MLflow and all."""
    run = bench(results, "overhead", "force=true", *settings)
    iterations = [by_phase(load_timeline(run), i) for i in range(WARMUP, compose_job(settings).iterations)]
    side.rates.append(samples / statistics.median(sum(phases.values()) for phases in iterations))
    for phase in PHASES:
        side.phases[phase].append(statistics.median(phases[phase] for phases in iterations) * 1e3)
    side.weights.add(_digest(run / "model/model.safetensors"))


def by_phase(timeline: Timeline, iteration: int) -> dict[str, float]:
    """Seconds of one iteration of a single device by what it did, an exact partition of the iteration."""
    start, end = timeline.window(iteration)
    phases = dict.fromkeys(PHASES, 0.0)
    at = start
    for span in timeline.spans:
        if span.end <= start or span.start >= end or span.kind not in {*PHASES, *SYNC_KINDS}:
            continue
        phase = "weight sync" if span.kind in SYNC_KINDS else span.kind
        begin, done = max(at, span.start), min(span.end, end)  # what two roles do at once counts for the first
        phases["gaps"] += max(0.0, begin - at)
        phases[phase] += max(0.0, done - begin)
        at = max(at, done)
    phases["gaps"] += end - at
    return phases


def report(harness: Side, bare: Side) -> None:
    """Print the comparison. Raises RuntimeError where the two ended with different weights."""
    print(COLUMNS.format("", "harness", "bare loop", "difference"))
    print(COLUMNS.format("samples/s", f"{harness.rate:,.0f}", f"{bare.rate:,.0f}", ""))
    for phase in PHASES:
        ours, theirs = harness.phase(phase), bare.phase(phase)
        print(COLUMNS.format(f"{phase}, ms", f"{ours:.1f}", f"{theirs:.1f}", f"{ours - theirs:+.1f}"))
    rounds = [ours / theirs for ours, theirs in zip(harness.rates, bare.rates, strict=True)]
    print(f"ratio {harness.rate / bare.rate:.2f} (rounds {min(rounds):.2f} to {max(rounds):.2f}; target 0.92)")
    if harness.weights != bare.weights or len(bare.weights) != 1:
        raise RuntimeError("the final weights of harness and bare loop are not bitwise equal")


def _digest(path: Path) -> str:
    """As `BareLoop.weights_digest`, of a file of weights."""
    digest = hashlib.sha256()
    for _, values in sorted(load_file(path).items()):
        digest.update(values.tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("settings", nargs="*", help="more settings of the job, such as algorithm.reference=false")
    given = parser.parse_args()
    settings = (
        f"schedule=colocate_sync cluster.devices=1 iterations={given.iterations} algorithm.reference=true".split()
    )
    settings += given.settings
    algorithm = compose_job(settings).algorithm
    samples = algorithm.batch_groups * algorithm.group_size
    harness, bare = Side(), Side()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CADENCE_RESULTS"] = folder
        measure_bare(settings, samples, Side())  # makes the warm start and loads what the disk cache lacks
        for _ in range(given.rounds):
            measure_harness(settings, samples, harness, Path(folder))
            measure_bare(settings, samples, bare)
    report(harness, bare)


if __name__ == "__main__":
    main()
