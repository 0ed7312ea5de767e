"""Do the engines learn alike: the same job on each rollout engine, three seeds each.

    make bench ENGINE=torch SEEDS=3 EXPERIMENT=engines     # and ENGINE=vllm, ENGINE=sglang
    python -m tests.benchmarks.bench_engines [--experiment engines]

Reads the finished runs of the experiment from the results folder and prints Markdown: for every engine the exact match
of the samples trained in the last ten iterations, per seed, and how far it is from the embedded engine's, with 95 %.

A seed decides prompts, warm start and order on every engine alike, but each engine draws tokens in its own way: so runs
of one seed are equal in distribution only, and a difference is to be compared with the spread between seeds.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from harness.cli.main import RESULTS
from harness.comparison.statistics import paired_difference
from harness.metrics.done import is_done
from harness.metrics.run_files import load_config
from harness.report.summary import RunSummary

EMBEDDED = "torch"
LAST = 10
"""Iterations at the end over which a run's exact match is averaged."""
HEAD = f"| engine | exact match, last {LAST} iterations | by seed | less {EMBEDDED} | mean lag | samples/s by seed |"


def finished_runs(folder: Path) -> dict[str, dict[int, RunSummary]]:
    """Of an experiment, by engine and seed. Raises ValueError where they cannot be compared: there is no other engine's
    beside the embedded one's, or their settings or seeds differ."""
    runs: dict[str, dict[int, RunSummary]] = defaultdict(dict)
    for path in sorted(filter(is_done, folder.glob("*/seed=*"))):
        run = RunSummary(path)
        runs[run.identity.engine][run.identity.seed] = run
    if EMBEDDED not in runs or len(runs) < 2:
        raise ValueError(f"{folder}: finished runs of {list(runs)}; run {EMBEDDED} and another engine first")
    if any(own.keys() != runs[EMBEDDED].keys() for own in runs.values()):
        raise ValueError(f"{folder}: not the same seeds everywhere")
    first, *others = (load_config(run.path) for own in runs.values() for run in own.values())
    if differing := {name for job in others for name in job if job[name] != first[name]} - {"engine", "seeds"}:
        raise ValueError(f"{folder}: not the same job everywhere: {', '.join(sorted(differing))} differ")
    return runs


def exact_match(run: RunSummary) -> float:
    return float(np.mean([metrics["reward/exact_match"] for metrics in run.metrics[-LAST:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="engines")
    runs = finished_runs(RESULTS / parser.parse_args().experiment)
    exact = {engine: {seed: exact_match(run) for seed, run in own.items()} for engine, own in runs.items()}
    print(HEAD, "|---|---:|---|---|---:|---|", sep="\n")
    for engine in sorted(runs, key=lambda engine: (engine != EMBEDDED, engine)):
        found = paired_difference(exact[engine], exact[EMBEDDED]).interval
        less = "" if engine == EMBEDDED else f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
        lag = np.mean([run.mean("staleness/mean") for run in runs[engine].values()])
        seeds = " ".join(f"{value:.3f}" for value in exact[engine].values())
        rates = " ".join(f"{run.summary.get('throughput/samples_per_s', np.nan):.0f}" for run in runs[engine].values())
        print(f"| `{engine}` | {np.mean([*exact[engine].values()]):.3f} | {seeds} | {less} | {lag:.2f} | {rates} |")


if __name__ == "__main__":
    main()
