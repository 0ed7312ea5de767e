"""`make report`, `show`, `diff`, `ui`, `mlflow-sync`: what came out of runs."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from harness.cli.arguments import every_value, own_arguments, share_of
from harness.config import ConfigError
from harness.config.fields import checked_name, whole_number
from harness.config.files import FAR, found_below
from harness.metrics.formatting import redacted, say, visible
from harness.metrics.tables import Table

if TYPE_CHECKING:
    from harness.comparison.changes import Changes
    from harness.comparison.runs import Cell


def report(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Write one page of what the runs of an experiment say of each other, and the same in Markdown; of a folder without
    runs its pictures, again, from the tables beside them."""
    from harness.comparison.experiment import comparison_in, folder_of
    from harness.metrics.done import is_done
    from harness.metrics.run_files import finished_runs
    from harness.report.page.document import print_written, write_report

    own, _ = own_arguments(arguments, "experiment", "margin")
    folder, margin = folder_of(own.get("experiment"), results), share_of("margin", own)
    drawn = [] if is_done(folder) or finished_runs(folder) else drawn_again(folder)
    print_written(drawn or write_report(comparison_in(folder, margin), folder), console)
    return 0


def drawn_again(folder: Path) -> list[Path]:
    """Every picture that is drawn from the table beside it, by the columns of that table."""
    from harness.report.drawing import draw_again
    from harness.report.page.pictures import DRAWINGS
    from harness.studies.papers.report import draw_bars
    from harness.studies.scaling import draw_scaling
    from harness.studies.staleness import draw_formulas

    of_studies = {
        draw_bars: frozenset({"quantity", "published", "measured_on_tiny"}),
        draw_scaling: frozenset({"model", "schedule", "devices", "of_ideal"}),
        draw_formulas: frozenset({"sigma", "fifo", "fifo_formula"}),
    }
    return draw_again(folder, DRAWINGS | of_studies)


_OF_SEVERAL, _OF_ONE = 600, 100_000  # characters of a text
_MOST = 10


def show(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Print the samples that were asked for, or what there is to ask for."""
    from harness.report.samples import RunSamples, ShownSample, shortened

    given, _ = own_arguments(arguments, "run", "sample", "row", "worst", "best", "dropped", "held_out")
    samples = RunSamples(_run_folder(given.pop("run", None), results))
    say(console, samples.folder, "dim")
    if not given:
        _overview(samples.counts, console)
        return 0
    number, most, best = _number("sample", given), _MOST, None
    if several := [name for name in ("worst", "best", "dropped") if name in given]:
        most = _number(several[0], given) or 0
        best = None if several[0] == "dropped" else several[0] == "best"
    held_out = _version(given, samples.versions)
    if len(several) > 1 or (held_out is not None and {"sample", "dropped"} & given.keys()):
        raise ConfigError(f"{' and '.join(given)} do not go together; ask for one of them")
    found = samples.chosen(
        most, sample=number, row=given.get("row"), dropped="dropped" in given, best=best, held_out=held_out
    )
    if not found:
        asked = " ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"{samples.folder} has no such sample: {asked}; cadence show run={samples.folder} says what it has"
        )

    def print_sample(one: ShownSample) -> None:
        console.print(f"\n{visible(one.title)}", style="bold", highlight=False, markup=False)
        longest = max(map(len, one.facts))
        for name, fact in one.facts.items():
            console.print(Text.assemble((f"{visible(name):<{longest}}  ", "dim"), visible(fact)))
        for name, text in one.texts.items():
            console.print(Text(name, style="dim"))
            shown = Text(visible(shortened(text, _OF_SEVERAL if len(found) > 1 else _OF_ONE)), overflow="fold")
            console.print(Padding(shown, (0, 0, 0, 2), expand=False))

    for one in found:
        print_sample(one)
    return 0


def _overview(counts: Mapping[str, str], console: Console) -> None:
    for name, count in counts.items():
        console.print(f"{name}: {count}", highlight=False, markup=False)
    console.print(
        "sample=<id> shows one, worst=5 those with the lowest rewards, best=5 with the highest, dropped=5 some that "
        "were not trained, row=train.jsonl:17 those of a problem, held_out=last responses to held-out problems",
        highlight=False,
        markup=False,
    )


def _run_folder(named: str | None, results: Path) -> Path:
    """The folder of a run: of this name, the only one in a folder or experiment of this name, or the last that began.
    Raises ConfigError where there is none, or several."""
    from harness.comparison.experiment import named_folder

    folder = results if named is None else named_folder(named, results)
    if folder is None:
        raise ConfigError(f"run={named} is no folder, and no experiment in {results}")
    runs = sorted(
        [folder]
        if (folder / "config.yaml").is_file()
        else (one.parent for one in found_below(folder, "seed=*/config.yaml"))
    )
    if not runs:
        raise ConfigError(f"{folder} holds no run, {FAR}; make one with `cadence bench`")
    if named is None:
        return max(runs, key=lambda one: (one / "config.yaml").stat().st_mtime)
    if len(runs) > 1:
        raise ConfigError(f"run={named} has {len(runs)} runs; name one, such as run={runs[0]}")
    return runs[0]


def _number(name: str, given: Mapping[str, str]) -> int | None:
    """The number that was given, None where none was. Raises ConfigError for what is none."""
    if (value := given.get(name)) is None:
        return None
    number = whole_number(value)
    if number is None or (name != "sample" and not number):
        raise ConfigError(
            f"{name}={value} is no number of samples"
            if name != "sample"
            else f"sample={value} is no id of a sample; it is a number"
        )
    return number


def _version(given: Mapping[str, str], versions: Sequence[int]) -> int | None:
    """The version whose held-out responses were asked for. Raises ConfigError for one that has none."""
    if (value := given.get("held_out")) is None:
        return None
    if not versions:
        raise ConfigError("this run kept no held-out responses; eval.every=20 makes them")
    if value == "last":
        return versions[-1]
    if value not in map(str, versions):
        raise ConfigError(f"held_out={value} was not evaluated; use last, or one of {', '.join(map(str, versions))}")
    return int(value)


_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def diff(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Each an experiment in the results, a folder of runs, or the beginning of a commit, whose runs may be in any
    experiment, smoke runs aside, as a gate's are. Returns 1 where a result got worse, or a ledger does not close, 3
    where what came after is beyond a threshold, `fail_if`."""
    from harness.comparison.changes import changes_between
    from harness.comparison.statistics import MARGIN
    from harness.comparison.thresholds import CROSSED, crossed, read_thresholds

    tests, rest = every_value("fail_if", arguments)
    given, rest = own_arguments(rest, "margin")
    own, others = own_arguments(rest, "before", "after")
    thresholds, margin = read_thresholds(",".join(tests)), share_of("margin", given) or MARGIN
    both = [*own.values(), *others]
    if len(both) != 2:
        raise ConfigError("diff takes two: cadence diff <before> <after>, experiments, folders, or commits")
    before, after = (_cells(named, results) for named in both)
    changes = changes_between(before, after, margin)
    _print_changes(changes, console)
    lines = crossed(thresholds, [(cell.label, cell.measures, 1) for cell in changes.cells])
    for line in lines:
        say(console, line, "bold red")
    if changes.worse or not changes.conservation.passed:
        return 1
    return CROSSED if lines else 0


def _print_changes(changes: Changes, console: Console) -> None:
    """Print what is not the same, then of every cell its results, and of the rest what is called a difference."""
    from harness.comparison.changes import RESULTS
    from harness.comparison.measure_text import against, scale_of

    for line in changes.unlike or ("the same settings, code, packages and machine",):
        say(console, line)
    rows = []
    for cell in changes.cells:
        for measure in cell.measures:
            text, scale = against(measure, 1), scale_of(measure)
            called = text is not None and text.called
            if called or measure.key in RESULTS:
                title = f"{measure.title} (%)" if scale.unit == "%" else measure.title
                change = "-" if text is None else f"{text.value.split()[0]} {text.bounds} {text.sign}".rstrip()
                rows.append((cell.label, title, *(scale.value(each.value) for each in measure.cells), change))
    console.print(Table("", ("cell", "measure", "before", "after", "change, 95 %"), rows))
    margin = changes.cells[0].measures[0].margin_text
    note = f"* significant difference, after Holm's correction for several cells; = equal within {margin}; ? not judged"
    say(console, note, "dim")
    for line in changes.unmatched:
        say(console, line, "yellow")
    kept = changes.conservation
    for line in (kept.summary(), *kept.problems):
        say(console, line, "" if kept.passed else "bold red")
    for line in changes.worse:
        say(console, f"worse: {line}", "bold red")
    if changes.open:
        why = "fewer than three seeds, or other processes kept the machine busy"
        say(console, f"not judged ({why}): {', '.join(changes.open)}", "yellow")
    elif not changes.worse:
        say(console, "no result is called worse", "bold")


def _cells(named: str, results: Path) -> list[Cell]:
    from harness.comparison.experiment import cells_in, labelled, named_folder
    from harness.comparison.runs import runs_in

    if (folder := named_folder(named, results)) is not None:
        return cells_in(folder)
    if _COMMIT.fullmatch(named):
        whole = [run for run in runs_in(results) if not run.identity.smoke]
        if of_commit := [run for run in whole if (run.manifest["git"] or {}).get("commit", "").startswith(named)]:
            return labelled(of_commit)
    raise ConfigError(f"{named} is no experiment in {results}, no folder, and no commit of a whole run there")


def mlflow_sync(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Bring MLflow up to date with the finished runs, of all experiments or of `experiment=name`, and say what was
    lacking. Raises ConfigError where it cannot."""
    from harness.metrics.mlflow_mirror import MlflowException, SyncedRun, first_line, sync, tracking_uri

    own, _ = own_arguments(arguments, "experiment")
    named = [checked_name("experiment", name) for name in own.values()]
    uri, folder = redacted(tracking_uri(results)), results.joinpath(*named)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there; run `cadence bench` first")
    runs: list[SyncedRun] = []
    try:
        for filled in sync(results, folder):
            runs.append(filled)
            if filled.changed:
                what = f"{'made' if filled.created else 'filled'}: {filled.metrics:,} metrics, {filled.files} files"
                say(console, f"{filled.path} {what}")
    except MlflowException as failure:
        raise ConfigError(f"{uri}: {first_line(failure)}; start the server, or set MLFLOW_TRACKING_URI") from failure
    changed = sum(filled.changed for filled in runs)
    say(console, f"{len(runs)} finished runs, {changed} brought up to date in {uri}")
    return 0


_LINKS = 5  # experiments that are printed
_PAGE = "compareRunsMode=CHART&workflowType=machine_learning"  # MLflow's own opens on traces, of which there are none


def ui(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Serve MLflow on what was written, on loopback, until interrupted."""
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if server.startswith("http"):
        mirrored = f"runs are mirrored to {redacted(server)} (MLFLOW_TRACKING_URI): it is its own page"
        say(console, mirrored)
        return 0
    database = (results / "mlflow.db").resolve()
    if not database.exists():
        raise ConfigError(f"{database} is not there yet; run `cadence bench` first")
    port = arguments[0].removeprefix("port=") if arguments else "5000"
    if not 0 < (whole_number(port) or 0) < 65536:
        raise ConfigError(f"port={port} is no port; use a number such as port=5001")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise ConfigError(
                f"port={port} cannot be had ({error.strerror}); use another, such as port=5001"
            ) from error
    from harness.metrics.mlflow_mirror import VIEW, MlflowException, MlflowStore, first_line

    try:
        experiments = MlflowStore(results).newest_experiments()
    except MlflowException as failure:
        raise ConfigError(f"{database}: {first_line(failure)}") from failure
    console.print(f"MLflow on http://127.0.0.1:{port} (Ctrl-C ends it); runs and charts, newest first:")
    for name, number in list(experiments.items())[:_LINKS]:
        link = f"http://127.0.0.1:{port}/#/experiments/{number}/runs?{_PAGE}&viewStateShareKey={VIEW}"
        say(console, f"  {name}: {link}")
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # eight processes that no page here asks of
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", port]
    os.execv(sys.executable, [*command, "--backend-store-uri", f"sqlite:///{database}"])
