"""An experiment's folder: what was to be compared in it, and what of that is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.comparison.equivalence import read_gate
from harness.comparison.parts import Cell
from harness.comparison.result import Comparison, compare
from harness.comparison.runs import read_run
from harness.config import ConfigError
from harness.metrics.atomic_files import write_text
from harness.metrics.run_files import is_done

CAMPAIGN = "campaign.json"


@dataclass(frozen=True)
class ListedCell:
    """A cell by the name of its folder. given: the user's settings; settings: all that its runs were told."""

    label: str
    name: str
    given: tuple[str, ...]
    settings: tuple[str, ...]
    pools: str  # devices by the roles that share them


@dataclass(frozen=True)
class Campaign:
    """campaign.json: what `make compare` or `make sweep` was asked for.

    axes: settings that differ on purpose. key: what has to be equal in all cells (`fairness_key` without seeds).
    left_out: why, by label, of cells that cannot run. warnings: about the machine.
    """

    axes: tuple[str, ...]
    key: Mapping[str, Any]
    seeds: tuple[int, ...]
    cells: tuple[ListedCell, ...]
    left_out: Mapping[str, str]
    warnings: tuple[str, ...]

    def settings_of(self, given: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Complete settings by label, of cells that were given just these."""
        return {cell.label: cell.settings for cell in self.cells if tuple(given.get(cell.label, ())) == cell.given}


def write_campaign(folder: Path, campaign: Campaign) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CAMPAIGN, json.dumps(asdict(campaign), indent=1) + "\n")


def read_campaign(folder: Path) -> Campaign | None:
    """None where the folder holds no comparison."""
    path = folder / CAMPAIGN
    if not path.exists():
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))
    return TypeAdapter(Campaign).validate_python(tree)


def common_seeds(folder: Path, campaign: Campaign) -> list[int]:
    """Seeds that are finished in every cell that has any."""
    done = [seeds for seeds in _done(folder, campaign).values() if seeds]
    return [seed for seed in campaign.seeds if done and all(seed in its for its in done)]


def _done(folder: Path, campaign: Campaign) -> dict[str, list[int]]:
    return {
        cell.label: [seed for seed in campaign.seeds if is_done(folder / cell.name / f"seed={seed}")]
        for cell in campaign.cells
    }


def finished_cells(folder: Path, campaign: Campaign) -> tuple[list[Cell], list[str]]:
    """The cells with their finished runs, of seeds that all of them have; and what is not there.

    A cell of which no run is finished is left out. Raises ConfigError where nothing is left to compare.
    """
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
    """Compare what is finished in this folder, with what the gate found and the check of every ledger.

    Raises ConfigError where nothing is, or where cells may not be compared.
    """
    cells, missing = finished_cells(folder, campaign)
    left_out = [f"{label} is left out: {why}" for label, why in campaign.left_out.items()]
    comparison = compare(cells, campaign.axes)
    return replace(
        comparison,
        warnings=(*campaign.warnings, *left_out, *missing, *comparison.warnings),
        gate=read_gate(folder),
    )
