"""What `make compare` and `make sweep` are asked for: cells, what they share, and the folder they go to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from harness.cli.arguments import own_arguments
from harness.comparison.fairness import fairness_key
from harness.comparison.running.cells import WantedCell, schedule_cells, swept_cells
from harness.comparison.running.ground import common_ground
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.config.machine import Machine

SEEDS = "seeds=3"
"""Where nobody says: the fewest that give an interval worth printing."""


@dataclass(frozen=True)
class Order:
    """axes: settings that differ on purpose. shared: what the user set for all cells. Neither has seeds among them.

    force: run again what is done. dry: only to be shown.
    """

    axes: tuple[str, ...]
    wanted: tuple[WantedCell, ...]
    shared: tuple[str, ...]
    experiment: str
    seeds: tuple[int, ...]
    force: bool
    dry: bool


def compare_order(arguments: Sequence[str], machine: Machine) -> Order:
    """A cell per schedule; `schedules=all` by default. Raises ConfigError for what cannot be read."""
    own, settings = own_and_settings(arguments, "schedules", "dry")
    if _value(settings, "schedule"):
        raise ConfigError("`make compare` runs several schedules: SCHEDULES=all, or SCHEDULES=fully_async,half_step")
    wanted = schedule_cells(own.get("schedules", "all"), settings)
    return order_of("compare", ("schedule",), wanted, settings, own, machine)


def sweep_order(arguments: Sequence[str], machine: Machine) -> Order:
    """A cell per combination of values. Raises ConfigError for what cannot be read, and where no setting has two."""
    own, settings = own_and_settings(arguments, "dry")
    if any(argument.startswith("schedules=") for argument in settings):
        raise ConfigError('SCHEDULES is for `make compare`; sweep them as ARGS="schedule=colocate_sync,fully_async"')
    axes, wanted = swept_cells(settings)
    if not axes:
        raise ConfigError('nothing to sweep; give a setting several values: ARGS="schedule.max_staleness=0,1,2,4,8"')
    shared = [setting for setting in settings if setting.partition("=")[0].lstrip("+~") not in axes]
    return order_of("sweep", axes, wanted, shared, own, machine)


def order_of(
    command: str,
    axes: tuple[str, ...],
    wanted: Sequence[WantedCell],
    shared: Sequence[str],
    own: dict[str, str],
    machine: Machine,
) -> Order:
    """The cells `wanted`, on devices that most can run on, in an experiment of their own where nobody names one.

    shared: what the user set for all cells; own: for the command, as `own_and_settings` tells them apart.
    """
    asked = compose_job([setting for setting in shared if _is_of_runs(setting)])
    ground = common_ground(wanted, machine)
    wanted = [WantedCell(cell.label, (*_of_cells(cell.settings), *ground)) for cell in wanted]
    experiment = _value(shared, "experiment") or _name(command, axes, wanted)
    return Order(
        axes=axes,
        wanted=tuple(WantedCell(cell.label, (*cell.settings, f"experiment={experiment}")) for cell in wanted),
        shared=(*_of_cells(shared), *ground),
        experiment=experiment,
        seeds=asked.seed_list,
        force=asked.force,
        dry=own.get("dry") == "true",
    )


def _is_of_runs(setting: str) -> bool:
    """Whether it says which runs of a cell are to be made, not what a cell is."""
    return setting.partition("=")[0] in ("seeds", "force")


def _of_cells(settings: Sequence[str]) -> list[str]:
    return [setting for setting in settings if not _is_of_runs(setting)]


def own_and_settings(arguments: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Arguments that are the command's own, and settings of the job, with a number of seeds."""
    given, settings = own_arguments(arguments, *names)
    own = {name: values[-1] for name, values in given.items() if values and values[-1]}
    return own, settings if _value(settings, "seeds") else [SEEDS, *settings]


def _value(arguments: Sequence[str], name: str) -> str:
    """Of the last argument of that name; empty where there is none."""
    return next((its.partition("=")[2] for its in reversed(arguments) if its.partition("=")[0] == name), "")


def _name(command: str, axes: Sequence[str], wanted: Sequence[WantedCell]) -> str:
    """`compare-tiny-reverse-3fa2c1`: equal only where cells may be compared, so that no two comparisons mix."""
    errors = []
    for cell in wanted:
        try:
            job = compose_job(cell.settings)
        except ConfigError as error:
            errors.append(error)
            continue
        key = [*axes, fairness_key(plain(job), (), axes)]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:6]
        along = [] if command == "compare" else [axis.rpartition(".")[2] for axis in axes]
        return "-".join([command, *along, job.model.name, job.task.name, digest])
    raise errors[0]
