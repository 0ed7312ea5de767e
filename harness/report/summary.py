"""The table at the end of a run, or of several, read from their folders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from harness.metrics.definitions import CUSTOM
from harness.metrics.done import is_done
from harness.metrics.formatting import number, percent, say
from harness.metrics.ledger import ENGINE_EVENTS
from harness.metrics.manifest import BUSY, RunIdentity, identity_of, others_load
from harness.metrics.run_files import (
    load_evaluations,
    load_faults,
    load_ledger,
    load_manifest,
    load_metrics,
    load_summary,
    load_timeline,
)
from harness.metrics.samples import FATES
from harness.metrics.schemas import Restart
from harness.metrics.tables import Table

_FILES = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "samples.parquet",
    "responses.parquet",
    "dropped_responses.parquet",
    "problems.parquet",
    "eval_responses.parquet",
    "trace.json",
    "ledger.json",
    "summary.json",
)


@dataclass(frozen=True)
class RunSummary:
    """One run in figures. Means over iterations weigh them equally; what a run did not write yet is None or empty."""

    path: Path
    identity: RunIdentity
    done: bool
    iterations: int
    samples: int
    seconds: float
    samples_per_s: float | None
    tokens_per_s: float | None
    others_load: float | None
    exact_match_first: float | None
    exact_match_last: float | None
    lag_worst: float
    lag_mean: float
    idle: dict[str, float]
    fraction_of_bound: float | None
    rank_imbalance: float | None
    ledger: dict[str, Any] | None
    custom: dict[str, tuple[float | None, float | None]]
    evaluated: tuple[dict[str, Any], dict[str, Any]] | None


def summarize(run_dir: Path) -> RunSummary:
    """Read one run's folder, finished or not; a run that was cut short has no trace and no ledger yet.

    exact_match_first, _last: mean over the first and last 10 % of iterations (at least one), None where nothing was
    rewarded; rank_imbalance: mean of `train/rank_imbalance`; custom: the same two means of each `custom/...`;
    evaluated: the first and the last line of eval.jsonl. seconds: from the start of the first iteration to the end of
    the last. samples_per_s, tokens_per_s: of summary.json, without warm-up. others_load: the share of the cores that
    other processes kept busy meanwhile, None where times are simulated.

    Raises ValueError if no iteration has finished."""
    metrics = load_metrics(run_dir)
    if not metrics:
        raise ValueError(f"{run_dir}: no iteration has finished, there is nothing to sum up")
    tenth = math.ceil(len(metrics) / 10)
    timeline = load_timeline(run_dir) if (run_dir / "trace.json").exists() else None
    summary, manifest = load_summary(run_dir), load_manifest(run_dir)
    return RunSummary(
        path=run_dir,
        identity=identity_of(manifest),
        done=is_done(run_dir),
        iterations=len(metrics),
        samples=metrics[-1]["samples"],
        seconds=sum(m["time/iteration_s"] for m in metrics),
        samples_per_s=summary.get("throughput/samples_per_s"),
        tokens_per_s=summary.get("throughput/tokens_per_s"),
        others_load=others_load(manifest),
        exact_match_first=_mean_of("reward/exact_match", metrics[:tenth]),
        exact_match_last=_mean_of("reward/exact_match", metrics[-tenth:]),
        lag_worst=max(m["staleness/max"] for m in metrics),
        lag_mean=_mean(m["staleness/mean"] for m in metrics),
        idle={role: timeline.idle(role) for role in timeline.roles} if timeline else {},
        fraction_of_bound=timeline.fraction_of_bound() if timeline else None,
        rank_imbalance=_mean_of("train/rank_imbalance", metrics),
        ledger=load_ledger(run_dir) if (run_dir / "ledger.json").exists() else None,
        custom={
            name: (_mean_of(name, metrics[:tenth]), _mean_of(name, metrics[-tenth:]))
            for name in sorted({name for m in metrics for name in m if name.startswith(CUSTOM)})
        },
        evaluated=(found[0], found[-1]) if (found := load_evaluations(run_dir)) else None,
    )


def summary_tables(runs: Sequence[RunSummary]) -> list[Table]:
    """Two tables with a row per run, which says if it is simulated; of held-out accuracy and custom metrics, if any."""
    rates = ("wall s", "samples/s\ntokens/s", "others' load")
    figures = ("iterations\nsamples", *rates, "exact match, first 10 %\nlast 10 %")
    tables = [
        Table(
            "Runs, rates after warm-up",
            ("run", *figures, "worst lag\nmean lag", "of ideal"),
            [(_name(run), *_figures(run)) for run in runs],
        ),
        Table(
            "Devices and samples",
            ("run", "idle after warm-up", "ledger (samples)"),
            [(_name(run), _devices(run), _ledger(run.ledger)) for run in runs],
        ),
        Table(
            "Held-out accuracy, first and last version",
            ("run", "version", "problems", "greedy", "sampled", "pass@k"),
            [(_name(run), *_held_out(found)) for run in runs for found in run.evaluated or ()],
        ),
        Table(
            "Custom metrics",
            ("run", "mean over samples", "first 10 %", "last 10 %"),
            [(_name(run), name, *map(_optional, both)) for run in runs for name, both in run.custom.items()],
        ),
    ]
    return [table for table in tables if table.rows]


def print_summary(run_dirs: Iterable[Path], console: Console) -> None:
    """Print the tables of these runs and the paths of what they wrote."""
    runs = [summarize(run_dir) for run_dir in run_dirs]
    for table in summary_tables(runs):
        console.print(table)
    for run in runs:
        if (load := run.others_load or 0.0) > BUSY:
            text = f"warning: other processes used {percent(load)} of the machine meanwhile; its times are too long"
            console.print(text, style="yellow", highlight=False)
        for fault in load_faults(run.path):
            console.print(f"warning: {fault.text}", style="yellow", highlight=False, markup=False)
        for event in (run.ledger or {}).get("engines", []):
            why = f": {event['why']}" if event["why"] else ""
            text = f"{event['at_s']:.1f} s: {event['engine']} {ENGINE_EVENTS[event['what']]}{why}"
            say(console, text)
        for restart in (run.ledger or {}).get("restarts", []):
            text = f"{restart['at_s']:.1f} s: {msgspec.convert(restart, Restart).line}"
            say(console, text)
        pictures = sorted(path.name for path in run.path.glob("*.png"))
        written = [name for name in _FILES if (run.path / name).exists()] + pictures
        say(console, f"{run.path}/", "bold")
        console.print("  " + " ".join(written), highlight=False)


def _name(run: RunSummary) -> str:
    identity = run.identity
    lines = [identity.schedule, f"{identity.model}, seed {identity.seed}", identity.how_timed]
    if identity.smoke:
        lines.append("smoke run")
    if not run.done:
        lines.append("unfinished")
    return "\n".join(lines)


def _figures(run: RunSummary) -> tuple[str, ...]:
    return (
        f"{run.iterations:,}\n{run.samples:,}",
        number(run.seconds),
        f"{_optional(run.samples_per_s)}\n{_optional(run.tokens_per_s)}",
        "-" if run.others_load is None else percent(run.others_load),
        f"{_optional(run.exact_match_first)}\n{_optional(run.exact_match_last)}",
        f"{run.lag_worst:.0f}\n{number(run.lag_mean)}",
        _optional(run.fraction_of_bound),
    )


def _held_out(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of one evaluated version."""
    shares = (_optional(found[name]) for name in ("greedy", "sampled", "pass_at_k"))
    return str(found["version"]), f"{found['problems']:,}", *shares


def _optional(value: float | None) -> str:
    return "-" if value is None else number(value)


def _mean_of(name: str, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean over those iterations that have it; None where none has."""
    values = [m[name] for m in metrics if name in m]
    return _mean(values) if values else None


def _devices(run: RunSummary) -> str:
    lines = [f"{role} {percent(share)}" for role, share in run.idle.items()]
    if run.rank_imbalance is not None:
        lines.append(f"fullest rank +{percent(run.rank_imbalance - 1)} tokens")
    return "\n".join(lines) or "-"


def _ledger(ledger: dict[str, Any] | None) -> str:
    if ledger is None:
        return "-"
    parts = [f"{ledger[fate]:,} {fate.replace('_', ' ')}" for fate in FATES if fate == "trained" or ledger.get(fate)]
    return f"{ledger['admitted']:,} admitted\n= " + "\n+ ".join(parts)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
