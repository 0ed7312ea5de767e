"""The record book: every record, by track, schedule and hardware, as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.comparison.statistics.estimates import Interval
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table, number, percent
from harness.studies.speedrun.record import RECORD, SIGNATURE, Record, digest_of, read_record

FOLDER, PAGE = "records", "records.md"
"""Folder and page of records below the results."""

_HEADS = (
    *("schedule", "hardware", "devices", "seconds (95 %)", "device-seconds", "version", "others' load"),
    *("day", "commit", "record"),
)


def write_book(results: Path) -> Path:
    """records.md, of all records below `results`/records; returns its path."""
    path = results / PAGE
    write_text(path, page({folder: read_record(folder) for folder in record_folders(results)}, results))
    return path


def record_folders(results: Path) -> list[Path]:
    """Folders of all records in the results."""
    return sorted(path.parent for path in (results / FOLDER).glob(f"*/*/{RECORD}"))


def page(records: Mapping[Path, Record], results: Path) -> str:
    """The whole page; records by their folders, below `results`."""
    parts = [
        "# Records",
        "Written by `cadence speedrun` from the records beside it: measured, never simulated. How a record is made, "
        "checked and submitted: [docs/speedrun.md](../docs/speedrun.md).",
    ]
    for track in sorted({record.track for record in records.values()}):
        here = {folder: record for folder, record in records.items() if record.track == track}
        target = next(iter(here.values())).target
        rows = [_row(folder, here[folder], results) for folder in sorted(here, key=lambda f: _order(here[f]))]
        parts += [
            f"## {track}",
            f"Seconds on a run's clock until {target:g} of the samples of held-out problems match exactly, mean of "
            "fresh seeds. *Others' load*: the largest share of the processors that other processes had during a run.",
            markdown_table(_HEADS, rows),
        ]
    return "\n\n".join(parts) + "\n"


def hardware_text(hardware: Mapping[str, Any]) -> str:
    """`8 x NVIDIA H100`, or `2 cores, AMD EPYC`."""
    gpus = hardware["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{hardware['cores']} cores, {hardware['cpu']}"


def _order(record: Record) -> tuple[str, float]:
    return hardware_text(record.hardware), record.seconds.value


def _row(folder: Path, record: Record, results: Path) -> list[str]:
    where, signed = folder.relative_to(results).as_posix(), (folder / SIGNATURE).exists()
    seconds = record.seconds
    devices = Interval(*(record.devices * value for value in (seconds.value, seconds.low, seconds.high)))
    return [
        record.schedule,
        hardware_text(record.hardware),
        f"{record.devices}",
        f"{number(seconds.value)} ({number(seconds.low)} to {number(seconds.high)})",
        number(devices.value),
        _range(run.version for run in record.runs),
        percent(max(run.others for run in record.runs)),
        min(run.started_at for run in record.runs)[:10],
        record.commit[:7],
        f"{where}, {digest_of(record)[:8]}{', signed' if signed else ''}",
    ]


def _range(versions: Iterable[int]) -> str:
    found = sorted(versions)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
