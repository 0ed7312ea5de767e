"""Tables of step times, as evidence: every column is read or refused, and phases add up to their step."""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError, first_line
from harness.config.compose import read_settings
from harness.config.fields import Positive
from harness.config.files import MIB, read_text
from harness.config.registries import SCHEDULES, find
from harness.prediction.evidence import SETTINGS, SHARED, Evidence, StepRow, Workload

_COUNTS = ("total_gpus", "rollout_gpus", "train_gpus")

COLUMNS = {
    "step_s": "step_s",
    "gen_s": "rollout_s",
    "wait_prev_gen_s": "wait_s",
    "wait_s": "wait_s",
    "generate_sequences_s": "generate_s",
    "old_log_prob_s": "old_log_prob_s",
    "ref_log_prob_s": "ref_log_prob_s",
    "log_probs_s": "log_probs_s",
    "update_actor_s": "update_s",
    "reward_s": "reward_s",
    "sync_s": "sync_s",
    "serial_s": "serial_s",
    "overlappable_s": "overlappable_s",
    "sharing_only_s": "sharing_only_s",
    "steps": "steps",
    # verl's own names
    "timing_s/step": "step_s",
    "timing_s/gen": "rollout_s",
    "timing_s/generate_sequences": "generate_s",
    "timing_s/old_log_prob": "old_log_prob_s",
    "timing_s/ref": "ref_log_prob_s",
    "timing_s/update_actor": "update_s",
    "timing_s/reward": "reward_s",
    "timing_s/adv": "serial_s",
}
"""Fields of a row that columns hold, by their names. In asynchronous rows `gen_s` is the trainer's wait."""

ABOUT_JOB = {one.name: one.name for one in dataclasses.fields(Workload)} | {
    "response_length/mean": "response_mean",
    "response_length/max": "response_max",
    "response_length/clip_ratio": "clipped_share",
    "prompt_length/mean": "prompt_mean",
}
"""Fields of a workload that columns hold, by their names."""

ROUNDED = 0.02  # share of a step by which its phases may exceed it: figures are means, and rounded


@dataclass(frozen=True, config=STRICT)
class TableFile:
    """The YAML file of a table's name beside it. settings: of the job, which ARGS= come after; engines, modes: more,
    for rows of this engine or schedule; workload: as its columns; quantities: of experiments/priors.yaml, known here;
    unread: columns that say nothing a prediction needs; system: whose runs they are, as that file names systems."""

    settings: list[str] = field(default_factory=list)
    engines: dict[str, list[str]] = field(default_factory=dict)
    modes: dict[str, list[str]] = field(default_factory=dict)
    workload: dict[str, bool | int | float | str] = field(default_factory=dict)
    quantities: dict[str, Positive] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    system: str = ""


def read_evidence(path: Path, arguments: Sequence[str] = ()) -> Evidence:
    """The rows of a CSV file, lines that begin with # aside, and its YAML file; arguments: settings over both. Columns:
    `mode`, a schedule, after which a remark in brackets may stand; `engine`; the counts of devices; COLUMNS; ABOUT_JOB;
    and options of schedules. Any cell but mode and counts may be empty: it is not said. Synchronous rows are given, all
    others asked. Raises ConfigError for the first thing that cannot be read, with its line and the fix."""
    if not path.is_file():
        raise ConfigError(
            f"table={path} is not there; name a CSV file such as experiments/papers/verl_one_step_off.csv"
        )
    own = _read_file(path.with_suffix(".yaml"))
    try:
        lines = read_text(path, MIB).removeprefix("\ufeff").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error
    numbers = [i for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    reader = csv.DictReader([lines[i - 1] for i in numbers], skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    if "mode" not in names:
        raise ConfigError(f"{path}: there is no column `mode`; its first line names the columns")
    _check_columns(path, names, own.unread)
    rows = [_row(path, number, cells) for number, cells in zip(numbers[1:], reader, strict=True)]
    if not rows:
        raise ConfigError(f"{path} has no rows")
    said, left = _said([*own.settings, *arguments])
    workload = said.over(_workload(f"{path.with_suffix('.yaml')}: workload", own.workload))
    return _evidence(path, workload, rows, own, left)


def _evidence(path: Path, workload: Workload, rows: Sequence[StepRow], own: TableFile, left: Sequence[str]) -> Evidence:
    told = [_over(row, own.engines.get(row.engine, ()), own.modes.get(row.schedule, ())) for row in rows]
    shared = [row for row in told if row.shared]
    given = shared or [row for row in told if row.synchronous]
    if not given:
        raise ConfigError(
            f"{path} has no synchronous row to calibrate on; add one of mode colocate_sync, or separated_sync with a "
            "column `streaming` that says false"
        )
    asked = [row for row in told if row not in given]
    if not asked:
        raise ConfigError(
            f"{path} has no row to predict: all of them are synchronous; add the one that you ask for, with its mode "
            "and devices, such as one_step_off with rollout_gpus and train_gpus"
        )
    for row in told:
        check_sum(row)
    rest = {name: tuple(_said(its)[1]) for name, its in {**own.engines, **own.modes}.items()}
    return Evidence(
        source=str(path),
        workload=workload,
        rows=tuple(given),
        asked=tuple(asked),
        settings=tuple(left),
        of_engine={name: rest[name] for name in own.engines},
        of_schedule={name: rest[name] for name in own.modes},
        quantities=own.quantities,
        system=own.system,
    )


def _over(row: StepRow, *settings: Sequence[str]) -> StepRow:
    """The row, which says what settings of its engine and schedule say of its workload unless its cells do."""
    says = row.says
    for its in settings:
        says = says.over(_said(its)[0])
    return dataclasses.replace(row, says=says)


def check_sum(row: StepRow) -> None:
    """Raise ConfigError where phases that follow each other take longer than the step."""
    if row.step_s is None:
        return
    names = ["update_s", "sync_s", "serial_s"]
    if row.synchronous:
        scoring = ["log_probs_s"] if row.log_probs_s is not None else ["old_log_prob_s", "ref_log_prob_s"]
        first = "generate_s" if row.rollout_s is None else "rollout_s"
        names += [first, *scoring, "reward_s", "overlappable_s", "sharing_only_s"]
    else:
        names += ["wait_s"]
    parts = {name: seconds for name in names if (seconds := getattr(row, name)) is not None}
    if sum(parts.values()) > (1 + ROUNDED) * row.step_s:
        listed = " + ".join(f"{name.removesuffix('_s')} {seconds:g}" for name, seconds in parts.items())
        raise ConfigError(
            f"{row.label}: {listed} = {sum(parts.values()):g} s exceed step_s={row.step_s:g}; phases follow each "
            "other: leave out what another one contains, or correct the step"
        )
    if row.synchronous and (row.generate_s or 0) > (1 + ROUNDED) * (row.rollout_s or row.step_s):
        raise ConfigError(
            f"{row.label}: generate_sequences_s={row.generate_s:g} exceeds the phase that it is part of; correct it"
        )


def _check_columns(path: Path, names: Sequence[str], unread: Sequence[str]) -> None:
    options = {option.name for name in SCHEDULES for option in dataclasses.fields(find("schedule", name))}
    known = ["mode", "engine", *_COUNTS, *COLUMNS, *ABOUT_JOB, *options]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: column `{name}` is there {names.count(name)} times; leave one")
        if name not in known and name not in unread:
            near = get_close_matches(name.rpartition("/")[2], known, 1, 0.3) or ["step_s"]
            raise ConfigError(
                f"{path}: column `{name}` is unknown; the nearest is `{near[0]}`: name it so if it is that, or list it "
                f"under `unread:` in {path.with_suffix('.yaml')}"
            )
    missing = [name for name in unread if name not in names]
    if missing:
        raise ConfigError(f"{path.with_suffix('.yaml')}: unread: {missing[0]} is no column of {path}; take it out")
    for of in (COLUMNS, ABOUT_JOB):
        twice = [(a, b) for a in names for b in names if a < b and of.get(a, a) == of.get(b, b)]
        if twice and set(twice[0]) != {"gen_s", "wait_prev_gen_s"}:
            raise ConfigError(f"{path}: columns `{twice[0][0]}` and `{twice[0][1]}` are the same figure; leave one")


def _row(path: Path, number: int, cells: Mapping[str, str | None]) -> StepRow:
    where = f"{path}:{number}"
    if None in cells:
        raise ConfigError(f"{where}: there are more cells than columns; put text with commas in quotes")
    text = {name: (cell or "").strip() for name, cell in cells.items()}
    mode = text["mode"].partition(" (")[0]
    if mode not in SCHEDULES:
        raise ConfigError(f"{where}: mode={mode} is no schedule; use one of {', '.join(SCHEDULES)}")
    rollout, train = _pools(where, mode, *(_number(where, name, text.get(name, "")) for name in _COUNTS))
    own = [option.name for option in dataclasses.fields(find("schedule", mode))]
    found: dict[str, Any] = {
        COLUMNS[name]: _number(where, name, cell) for name, cell in text.items() if name in COLUMNS and cell
    }
    row = StepRow(
        label=where,
        schedule=mode,
        rollout_devices=rollout,
        train_devices=train,
        options={name: cell for name in own if (cell := text.get(name, ""))},
        engine=text.get("engine", ""),
        says=_workload(where, {ABOUT_JOB[name]: cell for name, cell in text.items() if name in ABOUT_JOB and cell}),
    )
    if not row.synchronous:
        wait = found.pop("rollout_s", None)
        found["wait_s"] = found.get("wait_s", wait)
    if "steps" in found:
        found["steps"] = int(found["steps"])
    return dataclasses.replace(row, **found)


def _workload(where: str, cells: Mapping[str, Any]) -> Workload:
    """A workload of cells or settings. Raises ConfigError, naming the first that is no such thing."""
    kinds = {one.name: str(one.type) for one in dataclasses.fields(Workload)}
    made: dict[str, Any] = {}
    for name, cell in cells.items():
        if name not in kinds:
            near = (get_close_matches(name, kinds, 1, 0.0) or ["model"])[0]
            raise ConfigError(f"{where}: {name} is nothing that a workload has; the nearest is {near}")
        text = str(cell).strip()
        if "str" in kinds[name]:
            made[name] = text
        elif "bool" in kinds[name]:
            if text.lower() not in ("true", "false"):
                raise ConfigError(f"{where}: {name}={text} is neither true nor false")
            made[name] = text.lower() == "true"
        else:
            value = _number(where, name, text)
            share, whole = name == "clipped_share", "int" in kinds[name]
            if value is None or (value <= 0 and not share) or (share and value >= 1) or (whole and value != int(value)):
                expected = "a share from 0 to below 1" if share else "a whole number" if whole else "a number above 0"
                raise ConfigError(f"{where}: {name}={text} must be {expected}; leave it out where it is not known")
            made[name] = int(value) if whole else value
    return Workload(**made)


def _said(settings: Sequence[str]) -> tuple[Workload, list[str]]:
    """The workload that settings of a job say, and those that say something else."""
    found, left = {}, []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if equals and name in SETTINGS:
            found[SETTINGS[name]] = value
        else:
            left.append(setting)
    return _workload("settings", found), left


def _number(where: str, name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {name}={text} is no number; leave the cell empty where nothing is known"
        ) from error
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: {name}={text} is no amount; leave the cell empty where nothing is known")
    return value


def _pools(where: str, mode: str, total: float | None, rollout: float | None, train: float | None) -> tuple[int, int]:
    """Devices that generate and that train. Two of the three columns say it; a shared row needs one."""
    if mode == SHARED:
        counts: Sequence[float | None] = [next((n for n in (total, rollout, train) if n is not None), None)] * 2
    elif rollout is None and None not in (total, train):
        counts = [total - train, train]  # type: ignore[operator]
    elif train is None and None not in (total, rollout):
        counts = [rollout, total - rollout]  # type: ignore[operator]
    else:
        counts = [rollout, train]
    whole = [int(n) for n in counts if n is not None and n == int(n) >= 1]
    if len(whole) < 2:
        raise ConfigError(
            f"{where}: the row does not say how many devices generate and train; fill in {', '.join(_COUNTS)}"
        )
    if mode != SHARED and total is not None and total != sum(whole):
        raise ConfigError(
            f"{where}: {whole[0]} + {whole[1]} devices are not total_gpus={total:g}; correct one of the three"
        )
    return whole[0], whole[1]


def _read_file(path: Path) -> TableFile:
    if not path.is_file():
        return TableFile()
    try:
        return TypeAdapter(TableFile).validate_python(read_settings(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
