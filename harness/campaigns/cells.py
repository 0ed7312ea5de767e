"""The cells of a comparison: settings as given, the devices they share, and the complete job that each stands for."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from harness.checks.defaults import FITTED
from harness.checks.job import JobPlan, plan_job
from harness.checks.settle import settle_cell
from harness.config import ConfigError, JobConfig
from harness.config.compose import (
    EXPERIMENTS,
    cell_name,
    compose_job,
    make_schedule,
    names_of,
    plain,
    read_settings,
    refuse_endless,
    unread_of,
    without_effect,
)
from harness.config.job import flatten
from harness.config.machine import Machine
from harness.config.plugins import is_path
from harness.config.readers import Where
from harness.config.registries import CORRECTIONS, SCHEDULES, check_name
from harness.metrics.run_files import run_directory
from harness.planner.automatic import plan_split
from harness.planner.plan import as_argument
from schedules import Schedule

_NO_AXIS = {
    "seeds": "which seeds to run is seeds=5, or seeds=[3,4]",
    "experiment": "all cells go into one experiment",
    "force": "set it for all cells",
    "smoke": "a smoke run is no result",
    "backend": "measured and simulated times cannot be compared",
}
_MOST_DEVICES = 8  # no schedule needs more to run at all
_MICRO_BATCH = "algorithm.micro_batch_groups"
_BUDGET = ("cluster.devices", _MICRO_BATCH, "schedule.split")


@dataclass(frozen=True)
class CellRequest:
    """Settings that ask for one cell. label: what tells it from the others."""

    label: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class ResolvedCell:
    """A cell that can run. settings: complete: runs need neither planner nor machine. planned: just now."""

    label: str
    settings: tuple[str, ...]
    config: JobConfig
    plan: JobPlan
    planned: bool = False

    @property
    def name(self) -> str:
        """Name of the cell's folder."""
        return cell_name(self.config)

    def folder(self, seed: int, results: Path) -> Path:
        """Folder of one run of the cell."""
        return run_directory(self.config, seed, results).path

    @property
    def pools(self) -> str:
        """Devices of each pool, by what it is there for: `rollout 12 (TP4), training 4`, or `shared 2`."""
        engines, ranks = self.config.engine.tensor_parallel, self.config.training
        training = {"TP": ranks.tensor_parallel, "PP": ranks.pipeline_parallel}
        parallel = {
            "rollout": {"TP": engines},
            "training": training,
            "scoring": {"TP": ranks.tensor_parallel},
            "shared": {"engines TP": engines, **training},
        }
        pools = []
        for roles, devices in self.plan.placement.pools.items():
            purpose = _purpose(roles)
            layout = " ".join(f"{how}{many}" for how, many in parallel[purpose].items() if many > 1)
            if ranks.recompute_activations and purpose in ("training", "shared"):
                layout = f"{layout} recompute".lstrip()
            pools.append(f"{purpose} {len(devices)}" + (f" ({layout})" if layout else ""))
        return ", ".join(pools)


def _purpose(roles: str) -> str:
    """Purpose of a pool, by the names of its roles with + between them."""
    named = roles.split("+")
    if "actor" in named:
        return "shared" if "rollout" in named else "training"
    return "rollout" if "rollout" in named else "scoring"


def schedule_cells(schedules: str, settings: Sequence[str]) -> list[CellRequest]:
    """A cell per schedule. schedules: `all`, or names with commas; with `@4` behind one at that `max_staleness`."""
    asked = list(SCHEDULES) if schedules == "all" else [name.strip() for name in schedules.split(",")]
    cells = []
    for name, at, staleness in (each.partition(_AT) for each in asked):
        check_name("schedule", name, "schedules")
        chosen = (f"schedule={name}", *([f"schedule.max_staleness={staleness}"] if at else []))
        cells.append(CellRequest(f"{name} {staleness}".rstrip(), (*chosen, *settings)))
    if len(set(asked)) < len(asked):
        raise ConfigError(f"schedules={schedules} names one of them twice; name each once")
    return cells


def swept_cells(settings: Sequence[str]) -> tuple[tuple[str, ...], list[CellRequest]]:
    """The settings with several values, and a cell for each combination of these. `a=1,2` has two values; `a=[1,2]` has
    one, a list; `a=[1,2],[3]` has two lists; `a="1,2"` in quotes has one, a text."""
    fixed, swept = [], {}
    for setting in settings:
        values = _values(setting)
        name = setting.partition("=")[0].lstrip("+~")
        if len(values) == 1:
            fixed.append(setting)
        elif name in _NO_AXIS:
            raise ConfigError(f"{setting}: {name} is nothing to sweep; {_NO_AXIS[name]}")
        elif len(set(values)) < len(values):
            raise ConfigError(f"{setting} has one value twice; give each once")
        else:
            swept[name] = [f"{setting.partition('=')[0]}={value}" for value in values]
    cells = [CellRequest(_label(chosen), (*fixed, *chosen)) for chosen in product(*swept.values())]
    return tuple(swept), cells


def _values(setting: str) -> list[str]:
    refuse_endless(setting)
    try:
        (override,) = OverridesParser.create().parse_overrides([setting])
    except OverrideParseException as error:
        raise ConfigError(f"{setting} cannot be read; write setting=value, or setting=value,value to sweep") from error
    if not override.is_sweep_override():
        return [setting.partition("=")[2]]
    return [str(value) for value in override.sweep_string_iterator()]


def _label(chosen: Sequence[str]) -> str:
    """`max_staleness=2, correction=tis`: the last part of each name says enough, where no two are the same."""
    names = [setting.partition("=")[0].lstrip("+~") for setting in chosen]
    short = [name.rpartition(".")[2] for name in names]
    shown = short if len(set(short)) == len(short) else names
    return ", ".join(f"{name}={setting.partition('=')[2]}" for name, setting in zip(shown, chosen, strict=True))


def distinct_cells(cells: Sequence[CellRequest], axes: Sequence[str]) -> tuple[list[CellRequest], list[str]]:
    """The cells, each with the settings that it reads, and once where only what it does not read tells it from others;
    and a line for each that stands for several. Raises ConfigError for a setting that none of them reads."""
    jobs = {}
    for cell in cells:
        with suppress(ConfigError):  # what cannot be composed is left out later, and why
            jobs[cell] = compose_job(cell.settings)
    unread = {cell: unread_of(cell.settings, job) for cell, job in jobs.items()}
    _refuse_unread(unread)
    found, lines = dict[str, CellRequest](), []
    for cell in cells:
        if cell not in jobs:
            found[cell.label] = cell
            continue
        kept = tuple(setting for setting in cell.settings if not names_of([setting]) & unread[cell].keys())
        chosen = [setting for setting in cell.settings if names_of([setting]) & set(axes)]
        inert = [name for name in axes if name in unread[cell]]
        label = _label([one for one in chosen if one in kept]) if inert and _label(chosen) == cell.label else cell.label
        if inert and label not in found:
            where = unread[cell][inert[0]][1].words
            lines.append(f"{label} is one cell for all values of {' and '.join(inert)}, read only where {where}")
        found.setdefault(label, CellRequest(label, kept))
    return list(found.values()), lines


def _refuse_unread(unread: Mapping[CellRequest, Mapping[str, tuple[str, Where]]]) -> None:
    """Raises ConfigError for a setting that is read by no cell which gives it."""
    for name in dict.fromkeys(name for of_cell in unread.values() for name in of_cell):
        giving = [cell for cell in unread if names_of(cell.settings) & {name, name.partition(".")[0]}]
        if all(name in unread[cell] for cell in giving):
            values = ",".join(dict.fromkeys(unread[cell][name][0] for cell in giving))
            raise ConfigError(without_effect(name, values, unread[giving[0]][name][1]))


def resolve_cell(request: CellRequest, machine: Machine) -> ResolvedCell:
    """The job that a cell stands for on this machine. Raises ConfigError where it cannot run. Its settings name what
    `make bench` would find out for itself: the backend, and the plan of a simulated job."""
    job, named = settle_cell(request.settings, machine, plan_split), names_of(request.settings)
    before, after = flatten(plain(job.asked)), flatten(plain(job.config))
    found = {
        name: f"{name}={as_argument(value)}"
        for name, value in after.items()
        if name not in before or before[name] != value or (name in FITTED and name not in named)
    }
    unread = unread_of(tuple(found.values()), job.config)
    found = {name: setting for name, setting in found.items() if name not in unread}
    return ResolvedCell(request.label, (*request.settings, *found.values()), job.config, job.plan, job.planned)


def resolve_cells(
    requests: Sequence[CellRequest], known: Mapping[str, Sequence[str]], machine: Machine
) -> tuple[list[ResolvedCell], dict[str, str]]:
    """Every cell that can run, and why, by label, others cannot. known: complete settings by label, where an earlier
    call found them: then nothing is planned anew. Raises ConfigError where no cell can run, where two would be the
    same, or where some would be simulated, others measured."""
    cells: list[ResolvedCell] = []
    skipped: dict[str, str] = {}
    errors: list[ConfigError] = []
    for request in requests:
        settings = known.get(request.label, request.settings)
        try:
            cells.append(resolve_cell(CellRequest(request.label, tuple(settings)), machine))
        except ConfigError as error:
            errors.append(error)
            skipped[request.label] = str(error)
    if not cells:
        raise errors[0]
    _refuse_same(cells)
    _refuse_mixed(cells)
    return cells, skipped


def _refuse_same(cells: Sequence[ResolvedCell]) -> None:
    by_name: dict[str, str] = {}
    for cell in cells:
        if cell.name in by_name:
            raise ConfigError(f"{by_name[cell.name]} and {cell.label} are the same job; leave one of them out")
        by_name[cell.name] = cell.label


def _refuse_mixed(cells: Sequence[ResolvedCell]) -> None:
    backends = {cell.plan.backend: cell for cell in reversed(cells)}
    if len(backends) > 1:
        one, other = list(backends.values())[:2]
        raise ConfigError(
            f"{one.label} would be {one.plan.backend} and {other.label} {other.plan.backend}: measured and simulated "
            "times cannot be compared; set backend=virtual, or backend=real to leave out what cannot run here"
        )


def device_budget(requests: Sequence[CellRequest], machine: Machine) -> list[str]:
    """Settings of devices and of micro-batches under which most cells run for real: the fewest devices, then the
    largest micro-batches. Empty where the settings as they are do, where the user chose, or nothing runs for real.
    Micro-batches matter because each rank trains on whole ones, and a schedule that shares all devices has more
    ranks."""
    names = {setting.partition("=")[0] for request in requests for setting in request.settings}
    if any(name.startswith(_BUDGET) or name == "cluster" for name in names):
        return []
    jobs = []
    for request in requests:
        with suppress(ConfigError):  # what cannot be composed is refused elsewhere
            job = compose_job(request.settings)
            jobs.append((job, make_schedule(job)))
    if not jobs:
        return []
    first, _ = jobs[0]
    here = machine.gpus or machine.cores // first.cluster.threads_per_device
    most = max(first.cluster.devices, _MOST_DEVICES if first.cluster.oversubscribe else min(_MOST_DEVICES, here))
    budgets = [
        (devices, groups)
        for devices in range(first.cluster.devices, most + 1)
        for groups in range(first.algorithm.micro_batch_groups, 0, -1)
        if first.algorithm.batch_groups % groups == 0
    ]
    able = {budget: sum(_runs_for_real(*job, *budget, machine) for job in jobs) for budget in budgets}
    devices, groups = max(budgets, key=lambda budget: able[budget])  # the first of those that are as good
    found = {"cluster.devices": devices, _MICRO_BATCH: groups}
    asked = {"cluster.devices": first.cluster.devices, _MICRO_BATCH: first.algorithm.micro_batch_groups}
    return [f"{name}={value}" for name, value in found.items() if value != asked[name]]


def _runs_for_real(job: JobConfig, schedule: Schedule, devices: int, groups: int, machine: Machine) -> bool:
    cluster, algorithm = replace(job.cluster, devices=devices), replace(job.algorithm, micro_batch_groups=groups)
    job = replace(job, cluster=cluster, algorithm=algorithm)
    try:
        return plan_job(job, schedule, machine).backend == "real"
    except ConfigError:
        return False


BUNDLES = EXPERIMENTS / "corrections.yaml"
_CORRECTION = "algorithm.correction"
_RATE = "algorithm.learning_rate"
_LAYOUT = frozenset({"algorithm.micro_batch_groups"})
"""Settings of a bundle that a correction needs in order to run, but that are not part of what is compared."""
_AT = "@"


def named_corrections(listed: str) -> list[CellRequest]:
    """Corrections of a list. listed: names with commas, each of a loss, of a bundle in experiments/corrections.yaml, or
    an import path; with `@2e-4` behind it at that learning rate. Raises ConfigError for another one."""
    bundles = read_bundles()
    return [_correction(name, bundles) for name in dict.fromkeys(part.strip() for part in listed.split(","))]


def correction_axes() -> tuple[str, ...]:
    """Every setting that corrections of a matrix may differ in on purpose."""
    bundled = {name for bundle in read_bundles().values() for name in bundle}
    return (_CORRECTION, *sorted({_RATE, *bundled} - {_CORRECTION, *_LAYOUT}))


def refuse_overridden(corrections: Sequence[CellRequest], shared: Sequence[str]) -> None:
    """Raise ConfigError where a setting of all cells would take the place of one that a correction stands for."""
    for setting in shared:
        name = setting.partition("=")[0]
        of = [each.label for each in corrections if name in names_of(each.settings) - _LAYOUT]
        if of:
            raise ConfigError(f"{setting} is for all cells, but corrections={of[0]} sets {name}, too; leave out one")


def read_bundles(path: Path = BUNDLES) -> dict[str, dict[str, str]]:
    """Settings by the name of their bundle. Raises ConfigError for a bundle that names no correction."""
    bundles = read_settings(path)
    for name, bundle in bundles.items():
        if not isinstance(bundle, dict) or "correction" not in bundle:
            raise ConfigError(f"{path}: {name} names no correction; give it `correction: clip` or another loss")
    return {
        name: {f"algorithm.{setting}": str(value) for setting, value in bundle.items()}
        for name, bundle in bundles.items()
    }


def _correction(asked: str, bundles: dict[str, dict[str, str]]) -> CellRequest:
    name, at, rate = asked.partition(_AT)
    if name not in bundles and name not in CORRECTIONS and not is_path(name):
        known = ",".join(dict.fromkeys((*CORRECTIONS, *bundles)))
        raise ConfigError(f"corrections={name} is unknown; choose some of {known}")
    settings = {_CORRECTION: name, **bundles.get(name, {})}
    if at:
        settings[_RATE] = rate
    return CellRequest(asked, tuple(f"{setting}={value}" for setting, value in settings.items()))
