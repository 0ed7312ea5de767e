"""Do the engines learn alike: the same job on each rollout engine, three seeds each.

    make bench ENGINE=torch SEEDS=3 EXPERIMENT=engines     # and ENGINE=vllm, ENGINE=sglang
    python -m tests.benchmarks.bench_engines [--experiment engines]

Reads the finished runs of the experiment from the results folder and prints Markdown: for every engine the exact match
of the samples trained in the last ten iterations, per seed, and how far each mean is from the embedded engine's.

A seed decides prompts, warm start and order on every engine alike, but each engine draws tokens in its own way: so runs
of one seed are equal in distribution only, and a difference is to be compared with the spread between seeds.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from harness.cli.main import RESULTS
from harness.metrics.done import is_done
from harness.metrics.run_files import load_metrics
from harness.report.summary import RunSummary

EMBEDDED = "torch"
LAST = 10
"""Iterations at the end over which a run's exact match is averaged."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """An engine's mean less the embedded one's, with the half width of its interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half_width:.3f}"


@dataclass(frozen=True)
class Run:
    """job: its settings, but for the engine's and the seeds."""

    summary: RunSummary
    exact_match: float
    job: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Run":
        last = [metrics["reward/exact_match"] for metrics in load_metrics(path)[-LAST:]]
        settings = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        job = {name: value for name, value in settings.items() if name not in ("engine", "seeds")}
        return cls(RunSummary(path), float(np.mean(last)), job)


def finished_runs(folder: Path) -> dict[str, list[Run]]:
    """Every finished run of an experiment by its engine, in the order of seeds.

    Raises ValueError where runs cannot be compared: none, other settings, or other seeds than the embedded engine's.
    """
    runs: dict[str, list[Run]] = defaultdict(list)
    for path in sorted(folder.glob("*/seed=*")):
        if is_done(path):
            run = Run.read(path)
            runs[run.summary.identity.engine].append(run)
    for own in runs.values():
        own.sort(key=lambda run: run.summary.identity.seed)
    _require_comparable(runs, folder)
    return dict(runs)


def _require_comparable(runs: Mapping[str, Sequence[Run]], folder: Path) -> None:
    seeds = {engine: [run.summary.identity.seed for run in own] for engine, own in runs.items()}
    jobs = [run.job for own in runs.values() for run in own]
    if EMBEDDED not in runs or len(runs) < 2:
        raise ValueError(
            f"{folder}: finished runs of {list(runs) or 'no engine'}; run {EMBEDDED} and another one first"
        )
    if any(own != seeds[EMBEDDED] for own in seeds.values()):
        raise ValueError(f"{folder}: not the same seeds everywhere: {seeds}")
    if differing := {name for job in jobs for name in job if job[name] != jobs[0].get(name)}:
        raise ValueError(f"{folder}: not the same job everywhere: {', '.join(sorted(differing))} differ")


def paired(values: Sequence[float], embedded: Sequence[float]) -> Difference:
    """Seed by seed: what seeds share (problems, warm start) cancels. Student's t over the differences."""
    differences = np.subtract(values, embedded)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return Difference(float(differences.mean()), _quantile(len(differences) - 1) * float(error))


def pooled(values: Sequence[float], embedded: Sequence[float], everything: Sequence[Sequence[float]]) -> Difference:
    """One spread for all engines, from all their seeds; `values` and `embedded` are two of `everything`."""
    freedom = sum(len(own) - 1 for own in everything)
    variance = sum(float(np.var(own)) * len(own) for own in everything) / freedom
    error = np.sqrt(variance * (1 / len(values) + 1 / len(embedded)))
    return Difference(float(np.mean(values) - np.mean(embedded)), _quantile(freedom) * float(error))


def _quantile(freedom: int) -> float:
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))


def markdown(runs: Mapping[str, Sequence[Run]]) -> str:
    """A row per engine, the embedded one first."""
    values = {engine: [run.exact_match for run in own] for engine, own in runs.items()}
    embedded, everything = values[EMBEDDED], list(values.values())
    lines = [
        f"| engine | exact match, last {LAST} iterations | by seed | less {EMBEDDED}, seed by seed | "
        f"less {EMBEDDED}, spread of all | mean lag | samples/s by seed |",
        "|---|---:|---|---|---|---:|---|",
    ]
    for engine in sorted(runs, key=lambda engine: (engine != EMBEDDED, engine)):
        own = values[engine]
        differences = ["", ""]
        if engine != EMBEDDED:
            differences = [str(paired(own, embedded)), str(pooled(own, embedded, everything))]
        lag = float(np.mean([run.summary.mean("staleness/mean") or 0.0 for run in runs[engine]]))
        seeds = " ".join(f"{value:.3f}" for value in own)
        rates = " ".join(f"{run.summary.summary.get('throughput/samples_per_s', math.nan):.0f}" for run in runs[engine])
        lines.append(f"| `{engine}` | {np.mean(own):.3f} | {seeds} | {' | '.join(differences)} | {lag:.2f} | {rates} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="engines")
    runs = finished_runs(RESULTS / parser.parse_args().experiment)
    print(markdown(runs))
    first = runs[EMBEDDED][0].summary
    print(f"\n{len(runs[EMBEDDED])} seeds, {first.iterations} iterations each; intervals of {CONFIDENCE:.0%}.")


if __name__ == "__main__":
    main()
