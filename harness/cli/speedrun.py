"""`make speedrun`: how soon a schedule gets a frozen job to its target."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.campaigns.cells import CellRequest, resolve_cell
from harness.campaigns.execution import Runs, print_failures, run_cells
from harness.cli.arguments import is_asked_for, own_arguments
from harness.cli.forked_runs import ForkedRuns
from harness.comparison.runs import read_run
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.metrics.formatting import number, say
from harness.metrics.manifest import git_state
from harness.runtime.runtime import machine_of_runs
from harness.studies.speedrun import (
    DEFAULT,
    FOLDER,
    Record,
    check_record,
    digest_of,
    read_record,
    read_track,
    record_of,
    refuse_key,
    refuse_unnamed_code,
    sign,
    signer,
    write_book,
    write_record,
)

_TRACKS_OWN = ("seeds", "experiment")


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Run a track's job with fresh seeds, and write the record that it makes, and the book of all; `key=` signs it,
    `dry=true` says what would run. `verify=<folder>` checks a record instead. Returns the exit code."""
    given, settings = own_arguments(arguments, "track", "key", "verify", "dry")
    if "verify" in given:
        if settings or len(given) > 1:
            raise ConfigError("verify= checks a record that is there, and takes nothing besides")
        return _verify(Path(given["verify"]), console)
    return _race(given, settings, results.resolve(), console)


def _verify(folder: Path, console: Console) -> int:
    record = check_record(folder, read_track(read_record(folder).track))
    by = signer(folder)
    for line in (
        f"{folder}: {record.schedule} on track={record.track}, {_seconds(record)}",
        f"its files, seeds and settings are what the record says; digest {digest_of(record)}",
        "not signed: whoever has the folder could have written it"
        if by is None
        else f"signed with {by}: compare it with a key that you know",
        f"made again by: git checkout {record.commit}",
        f"  cadence speedrun track={record.track} {' '.join(record.settings)}",
    ):
        say(console, line)
    return 0


def _race(given: dict[str, str], settings: list[str], results: Path, console: Console) -> int:
    track, dry = read_track(given.get("track", DEFAULT)), is_asked_for("dry", given)
    for setting in settings:
        if setting.partition("=")[0] in _TRACKS_OWN:
            raise ConfigError(f"{setting} is not to be chosen: `cadence speedrun` does, by the track")
    key = Path(given["key"]).expanduser() if "key" in given else None
    if key is not None:
        refuse_key(key)
    fixed = (*track.settings, *settings, f"experiment=speedrun-{track.name}")
    track.refuse_changed(plain(compose_job(fixed)))  # before anything is planned for it
    cell = resolve_cell(CellRequest(track.name, fixed), machine_of_runs())
    git = git_state()
    refuse_unnamed_code(git)
    assert git is not None
    runs = Runs((cell,), track.seeds_of(plain(cell.config), git["commit"]), results, force=True)
    say(
        console,
        f"track={track.name}: {cell.config.schedule.name} on {cell.pools}, seeds {', '.join(map(str, runs.seeds))}, "
        f"until held-out exact match is {track.target:g}",
    )
    if dry:
        return 0
    with ForkedRuns() as forked:
        outcomes = run_cells(runs, console, forked.start)
    if outcomes.failed:
        print_failures(outcomes.failed, console)
        return 1
    finished = [read_run(cell.folder(seed, results)) for seed in runs.seeds]
    record = record_of(track, finished, settings)
    folder = results / FOLDER / track.name / record.name
    write_record(record, finished, folder)
    if key is not None:
        sign(folder, key)
    say(console, f"{record.schedule}: {_seconds(record)}", "bold")
    for path in (folder, write_book(results)):
        say(console, path)
    return 0


def _seconds(record: Record) -> str:
    seconds = record.seconds
    return (
        f"{number(seconds.value)} s ({number(seconds.low)} to {number(seconds.high)}, {len(record.runs)} seeds) to "
        f"{record.target:g}, {number(record.devices * seconds.value)} device-seconds"
    )
