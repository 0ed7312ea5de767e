"""`make show RUN=results/bench/<cell>/seed=0 WORST=5`: samples of a run, to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.cli.arguments import last_values, own_arguments
from harness.config import ConfigError

_OF_SEVERAL, _OF_ONE = 600, 100_000  # characters of a text
_MOST = 10


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Print the samples that were asked for, or what there is to ask for."""
    from harness.report.samples import RunSamples, ShownSample, shortened, visible

    own, _ = own_arguments(arguments, "run", "sample", "row", "worst", "best", "dropped", "held_out")
    given = last_values(own)
    samples = RunSamples(_run_folder(given.pop("run", None), results))
    console.print(f"{samples.folder}", style="dim", highlight=False, markup=False, soft_wrap=True)
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
        asked = " ".join(f"{name.upper()}={value}" for name, value in given.items())
        raise ConfigError(
            f"{samples.folder} has no such sample: {asked}; cadence show RUN={samples.folder} says what it has"
        )

    def show(one: ShownSample) -> None:
        console.print(f"\n{visible(one.title)}", style="bold", highlight=False, markup=False)
        facts = Table.grid(padding=(0, 2))
        facts.add_column(no_wrap=True)
        facts.add_column(overflow="fold")
        for name, fact in one.facts.items():
            facts.add_row(Text(visible(name), style="dim"), Text(visible(fact)))
        console.print(facts)
        for name, text in one.texts.items():
            console.print(Text(name, style="dim"))
            shown = Text(visible(shortened(text, _OF_SEVERAL if len(found) > 1 else _OF_ONE)), overflow="fold")
            console.print(Padding(shown, (0, 0, 0, 2)))

    for one in found:
        show(one)
    return 0


def _overview(counts: Mapping[str, str], console: Console) -> None:
    for name, count in counts.items():
        console.print(f"{name}: {count}", highlight=False, markup=False)
    console.print(
        "SAMPLE=<id> shows one, WORST=5 those with the lowest rewards, BEST=5 with the highest, DROPPED=5 some that "
        "were not trained, ROW=train.jsonl:17 those of a problem, HELD_OUT=last responses to held-out problems",
        highlight=False,
        markup=False,
    )


def _run_folder(named: str | None, results: Path) -> Path:
    """The folder of a run: of this name, the only one in a folder or experiment of this name, or the last that began.
    Raises ConfigError where there is none, or several."""
    from harness.comparison.experiment import named_folder

    folder = results if named is None else named_folder(named, results)
    if folder is None:
        raise ConfigError(f"RUN={named} is no folder, and no experiment in {results}")
    runs = sorted(
        [folder] if (folder / "config.yaml").is_file() else (one.parent for one in folder.rglob("seed=*/config.yaml"))
    )
    if not runs:
        raise ConfigError(f"{folder} holds no run; make one with `make bench`")
    if named is None:
        return max(runs, key=lambda one: (one / "config.yaml").stat().st_mtime)
    if len(runs) > 1:
        raise ConfigError(f"RUN={named} has {len(runs)} runs; name one, such as RUN={runs[0]}")
    return runs[0]


def _number(name: str, given: Mapping[str, str]) -> int | None:
    """The number that was given, None where none was. Raises ConfigError for what is none."""
    if (value := given.get(name)) is None:
        return None
    if not value.isdecimal() or len(value) > 18 or (name != "sample" and not int(value)):
        raise ConfigError(
            f"{name.upper()}={value} is no number of samples"
            if name != "sample"
            else f"SAMPLE={value} is no id of a sample; it is a number"
        )
    return int(value)


def _version(given: Mapping[str, str], versions: Sequence[int]) -> int | None:
    """The version whose held-out responses were asked for. Raises ConfigError for one that has none."""
    if (value := given.get("held_out")) is None:
        return None
    if not versions:
        raise ConfigError("this run kept no held-out responses; eval.every=20 makes them")
    if value == "last":
        return versions[-1]
    if value not in map(str, versions):
        raise ConfigError(f"HELD_OUT={value} was not evaluated; use last, or one of {', '.join(map(str, versions))}")
    return int(value)
