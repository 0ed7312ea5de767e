"""An experiment's folder: which comparison was asked for in it, which runs are finished, and how they compare."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from harness.comparison.comparison import Comparison, compare
from harness.comparison.equivalence import GATE_RUNS, read_gate
from harness.comparison.fairness import first_difference, run_key
from harness.comparison.runs import Cell, Run, read_run, runs_in
from harness.comparison.statistics import MARGIN
from harness.config import ConfigError
from harness.config.files import FAR, MIB, read_json
from harness.config.plugins import is_path
from harness.metrics.atomic_files import write_text
from harness.metrics.done import is_done
from harness.metrics.formatting import listed
from harness.metrics.run_files import check_folder_name
from harness.metrics.schemas import reading

CAMPAIGN = "campaign.json"
_AXES = ("schedule",)  # settings that differ on purpose where nobody asked for a comparison


@dataclass(frozen=True)
class ListedCell:
    """A cell by the name of its folder. given: the user's settings; settings: all that its runs are given."""

    label: str
    name: str
    given: tuple[str, ...]
    settings: tuple[str, ...]
    pools: str  # devices by the roles that share them


@dataclass(frozen=True)
class Campaign:
    """campaign.json: what `make compare` or `make sweep` was asked for. axes: settings that differ on purpose. key:
    what has to be equal in all cells (`fairness_key` without seeds). left_out: why, by label, of cells that cannot run.
    warnings: about the machine. margin: difference that does not matter, as a share."""

    axes: tuple[str, ...]
    key: Mapping[str, Any]
    seeds: tuple[int, ...]
    cells: tuple[ListedCell, ...]
    left_out: Mapping[str, str]
    warnings: tuple[str, ...]
    margin: float = MARGIN

    def settings_of(self, given: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Complete settings by label, of cells that were given just these. Not where they name code besides: a file
        says what was planned, and only who gives a command says what is run."""
        return {
            cell.label: cell.settings
            for cell in self.cells
            if tuple(given.get(cell.label, ())) == cell.given == cell.settings[: len(cell.given)]
            and not any(is_path(setting) for setting in cell.settings[len(cell.given) :])
        }


def write_campaign(folder: Path, campaign: Campaign) -> None:
    """Write campaign.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CAMPAIGN, json.dumps(asdict(campaign), indent=1) + "\n")


def read_campaign(folder: Path) -> Campaign | None:
    """None where the folder holds no comparison."""
    path = folder / CAMPAIGN
    if not path.exists():
        return None
    with reading(path, "take it away, and ask for the comparison again"):
        campaign: Campaign = msgspec.convert(read_json(path, 16 * MIB), Campaign)
        for cell in campaign.cells:
            check_folder_name("a cell", cell.name)
            if not cell.label.isprintable():
                raise ValueError(f"the label of cell {cell.name} is no line of text")
    return campaign


def common_seeds(folder: Path, campaign: Campaign) -> list[int]:
    """Seeds that are finished in every cell that has any."""
    done = [seeds for seeds in _done(folder, campaign).values() if seeds]
    return [seed for seed in campaign.seeds if done and all(seed in seeds for seeds in done)]


def _done(folder: Path, campaign: Campaign) -> dict[str, list[int]]:
    return {
        cell.label: [seed for seed in campaign.seeds if is_done(folder / cell.name / f"seed={seed}")]
        for cell in campaign.cells
    }


def finished_cells(folder: Path, campaign: Campaign) -> tuple[list[Cell], list[str]]:
    """The cells with their finished runs, of seeds that all of them have; and what is not there. A cell of which no run
    is finished is left out. Raises ConfigError where nothing is left to compare."""
    done = _done(folder, campaign)
    some = [cell for cell in campaign.cells if done[cell.label]]
    common = common_seeds(folder, campaign)
    if not common:
        raise ConfigError(f"{folder}: no seed is finished in every cell; run the same command again to go on")
    missing = [f"{cell.label} is left out: none of its runs is finished" for cell in campaign.cells if cell not in some]
    if len(common) < len(campaign.seeds):
        left = ", ".join(str(seed) for seed in campaign.seeds if seed not in common)
        missing.append(f"seeds {left} are left out: not every cell has finished them")
    cells = [
        Cell(cell.name, cell.label, tuple(read_run(folder / cell.name / f"seed={seed}") for seed in common))
        for cell in some
    ]
    return cells, missing


def comparison_of(folder: Path, campaign: Campaign) -> Comparison:
    """Compare what is finished in this folder, with what the gate found and the check of every ledger. Raises
    ConfigError where nothing is, or where cells may not be compared."""
    cells, missing = finished_cells(folder, campaign)
    comparison = compare(cells, campaign.axes, margin=campaign.margin)
    return replace(
        comparison,
        warnings=(*campaign.warnings, *comparison.warnings),
        gate=read_gate(folder),
        missing=tuple(missing),
        left_out=campaign.left_out,
    )


def named_folder(named: str, results: Path) -> Path | None:
    """The folder of an experiment in `results`, or a path; None where there is none."""
    return next((folder.resolve() for folder in (results / named, Path(named)) if folder.is_dir()), None)


def folder_of(named: str | None, results: Path) -> Path:
    """The folder of an experiment in `results`, or a path; None: the experiment of which a run finished last. Raises
    ConfigError if there is no such folder."""
    folders = [folder for folder in sorted(results.glob("*")) if not folder.name.endswith(GATE_RUNS)]
    finished = {folder: list(folder.glob("*/seed=*/DONE")) for folder in folders}
    last = {folder: max(path.stat().st_mtime for path in done) for folder, done in finished.items() if done}
    if named is None and last:
        return max(last, key=lambda folder: last[folder]).resolve()
    if named is not None and (folder := named_folder(named, results)) is not None:
        return folder
    found = f"{results} has {', '.join(folder.name for folder in last) if last else 'no finished run yet'}"
    if named is None:
        raise ConfigError(f"{found}; make one with `cadence compare`")
    raise ConfigError(f"experiment={named} is neither an experiment with results nor a folder; {found}")


def comparison_in(folder: Path, margin: float | None = None) -> Comparison:
    """The comparison in the folder of an experiment: what `make compare` or `make sweep` was asked for; else of the
    most that may be compared, a cell per folder of runs. margin: difference that does not matter, as a share; None: as
    was asked for. Raises ConfigError where no run is finished, and for smoke runs."""
    campaign = read_campaign(folder)
    if campaign is not None:
        return comparison_of(folder, replace(campaign, margin=margin or campaign.margin))
    return comparison_over(cells_in(folder), margin or MARGIN)


def comparison_over(found: Sequence[Cell], margin: float = MARGIN) -> Comparison:
    """The comparison of the most of these cells that may be compared. Raises ConfigError for smoke runs."""
    cells, left_out = comparable(found)
    comparison = compare(cells, margin=margin)
    return replace(comparison, left_out=left_out, warnings=(*_seeds_left_out(found, cells), *comparison.warnings))


def comparable(cells: Sequence[Cell]) -> tuple[list[Cell], dict[str, str]]:
    """The most that may be held against each other, over the seeds that they share; of equally many, those with the
    run that finished last. And why others are left out, by label."""
    groups: list[list[Cell]] = []
    for cell in cells:
        like = (group for group in groups if all(_unlike(cell, one) is None for one in group))
        if (group := next(like, None)) is None:
            groups.append(group := [])
        group.append(cell)
    kept = max(groups, key=lambda group: (len(group), max(map(_finished_at, group))))
    seeds, shared, left_out = set(kept[0].seeds), list[Cell](), dict[str, str]()
    for cell in cells:
        if cell not in kept:
            other, unlike = next((one, found) for one in kept if (found := _unlike(cell, one)) is not None)
            left_out[cell.label] = "it has {}={}, not {} as {}".format(*unlike, other.label)
        elif seeds & set(cell.seeds):
            seeds &= set(cell.seeds)
            shared.append(cell)
        else:
            left_out[cell.label] = f"it has none of the seeds {', '.join(map(str, sorted(seeds)))}"
    return [cell.of_seeds(seeds) for cell in shared], left_out


def _seeds_left_out(found: Sequence[Cell], kept: Sequence[Cell]) -> list[str]:
    """A line for every cell that has more than are compared."""
    shared = set(kept[0].seeds)
    lines = []
    for cell in found:
        more = sorted(set(cell.seeds) - shared)
        if more and cell.label in [one.label for one in kept]:
            lines.append(f"{cell.label} is without {listed('seed', more)}, which not every cell has")
    return lines


def _unlike(one: Cell, other: Cell) -> tuple[str, str, str] | None:
    """A setting that forbids to compare them, and its values; seeds aside."""
    return first_difference(*(run_key(cell.runs[0], (), _AXES) for cell in (one, other)))


def _finished_at(cell: Cell) -> float:
    return max((run.path / "DONE").stat().st_mtime for run in cell.runs)


def cells_in(folder: Path) -> list[Cell]:
    """The cells of a comparison, or one per folder of runs. Raises ConfigError where no run is finished."""
    campaign = read_campaign(folder)
    if campaign is not None:
        return finished_cells(folder, campaign)[0]
    if not (runs := runs_in(folder)):
        raise ConfigError(f"{folder} has no finished run, {FAR}: a run that is done has a file DONE")
    return labelled(runs)


def labelled(runs: Sequence[Run]) -> list[Cell]:
    """A cell per folder: by its schedule; by the name of the folder where two have the same."""
    by_cell: dict[Path, list[Run]] = {}
    for run in runs:
        by_cell.setdefault(run.path.parent, []).append(run)
    schedules = [runs[0].identity.schedule for runs in by_cell.values()]
    return [
        Cell(
            path.name,
            schedule if schedules.count(schedule) == 1 else path.name,
            tuple(sorted(runs, key=lambda run: run.identity.seed)),
        )
        for (path, runs), schedule in zip(by_cell.items(), schedules, strict=True)
    ]
