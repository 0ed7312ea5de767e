"""The table at the end of a run, or of several, read from their folders."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from harness.metrics.definitions import CUSTOM
from harness.metrics.done import is_done
from harness.metrics.formatting import number, percent, say
from harness.metrics.ledger import ENGINE_EVENTS
from harness.metrics.manifest import BUSY, identity_of, others_load
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


class RunSummary:
    """The files of one run, finished or not: one that was cut short has no trace and no ledger yet. Raises ValueError
    where no iteration has finished."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics = path, load_metrics(path)
        if not self.metrics:
            raise ValueError(f"{path}: no iteration has finished, there is nothing to sum up")
        manifest = load_manifest(path)
        self.identity, self.others_load, self.done = identity_of(manifest), others_load(manifest), is_done(path)
        self.summary, self.evaluations = load_summary(path), load_evaluations(path)
        self.timeline = load_timeline(path) if (path / "trace.json").exists() else None
        self.ledger = load_ledger(path) if (path / "ledger.json").exists() else None

    def mean(self, name: str, part: slice = slice(None)) -> float | None:
        """Mean of a metric over those iterations, or a part of all, that have it, weighing them equally; None where
        none has."""
        values = [m[name] for m in self.metrics[part] if name in m]
        return sum(values) / len(values) if values else None

    def first_and_last(self, name: str) -> tuple[str, str]:
        """The same over the first and over the last tenth (at least one) of the iterations, in words."""
        tenth = math.ceil(len(self.metrics) / 10)
        return _optional(self.mean(name, slice(tenth))), _optional(self.mean(name, slice(-tenth, None)))

    @property
    def lag_worst(self) -> float:
        """The largest lag of a token, in iterations."""
        return max(m["staleness/max"] for m in self.metrics)


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
            [(_name(run), *_held_out(run.evaluations[at])) for run in runs if run.evaluations for at in (0, -1)],
        ),
        Table(
            "Custom metrics",
            ("run", "mean over samples", "first 10 %", "last 10 %"),
            [(_name(run), name, *run.first_and_last(name)) for run in runs for name in _custom(run)],
        ),
    ]
    return [table for table in tables if table.rows]


def print_summary(run_dirs: Iterable[Path], console: Console) -> None:
    """Print the tables of these runs and the paths of what they wrote."""
    runs = [*map(RunSummary, run_dirs)]
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
    rates = (run.summary.get(f"throughput/{name}_per_s") for name in ("samples", "tokens"))
    return (
        f"{len(run.metrics):,}\n{run.metrics[-1]['samples']:,}",
        number(sum(m["time/iteration_s"] for m in run.metrics)),
        "\n".join(map(_optional, rates)),
        "-" if run.others_load is None else percent(run.others_load),
        "\n".join(run.first_and_last("reward/exact_match")),
        f"{run.lag_worst:.0f}\n{_optional(run.mean('staleness/mean'))}",
        _optional(run.timeline.fraction_of_bound() if run.timeline else None),
    )


def _custom(run: RunSummary) -> list[str]:
    return sorted({name for m in run.metrics for name in m if name.startswith(CUSTOM)})


def _held_out(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of one evaluated version."""
    shares = (_optional(found[name]) for name in ("greedy", "sampled", "pass_at_k"))
    return str(found["version"]), f"{found['problems']:,}", *shares


def _optional(value: float | None) -> str:
    return "-" if value is None else number(value)


def _devices(run: RunSummary) -> str:
    timeline = run.timeline
    lines = [f"{role} {percent(timeline.idle(role))}" for role in timeline.roles] if timeline else []
    if (imbalance := run.mean("train/rank_imbalance")) is not None:
        lines.append(f"fullest rank +{percent(imbalance - 1)} tokens")
    return "\n".join(lines) or "-"


def _ledger(ledger: dict[str, Any] | None) -> str:
    if ledger is None:
        return "-"
    parts = [f"{ledger[fate]:,} {fate.replace('_', ' ')}" for fate in FATES if fate == "trained" or ledger.get(fate)]
    return f"{ledger['admitted']:,} admitted\n= " + "\n+ ".join(parts)
