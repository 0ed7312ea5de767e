"""A published table of step times: its rows, whatever of them is there, and what is known of its runs besides."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError, JobConfig, RooflineConfig, first_line
from harness.config.compose import EXPERIMENTS, compose_job, read_settings
from harness.config.fields import Count, NotNegative, Positive
from harness.config.files import MIB, read_text
from harness.config.registries import SCHEDULES, find

COLOCATED = "colocate_sync"

PHASES = ("old_log_prob_s", "ref_log_prob_s", "update_actor_s")
"""Work of a training pool on a batch; everything else in a step is generation, waiting, or work on the host."""

DEFAULTS = EXPERIMENTS / "papers" / "defaults.yaml"

ROUNDED = 0.02
"""Share of a step by which its phases may exceed it: figures are means, and rounded."""

_COUNTS = ("total_gpus", "rollout_gpus", "train_gpus")

_SECONDS = ("step_s", "gen_s", "wait_prev_gen_s", "generate_sequences_s", *PHASES)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table. Seconds of one training step; None where the cell is empty or the column missing.

    mode: a schedule. colocated: all devices do everything in turn, so both pools are all of them.
    gen_s: of a colocated row the phase of generation, else the trainer's wait for samples, as is `wait_prev_gen_s`.
    generate_sequences_s: generation alone, without what comes before and after it.
    """

    number: int
    """Line in the file."""
    mode: str
    engine: str
    rollout_gpus: int
    train_gpus: int
    step_s: float | None
    gen_s: float | None
    generate_sequences_s: float | None
    phases: Mapping[str, float] = field(hash=False)
    """Seconds of those PHASES that the row gives."""
    options: Mapping[str, str] = field(hash=False)
    """Options of the schedule that the row sets."""

    @property
    def colocated(self) -> bool:
        """Whether rollout and training share their devices."""
        return self.mode == COLOCATED

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.rollout_gpus if self.colocated else self.rollout_gpus + self.train_gpus

    @property
    def wait_s(self) -> float | None:
        """The trainer's wait for samples; None in a colocated row, which never waits."""
        return None if self.colocated else self.gen_s

    def __str__(self) -> str:
        pools = f"{self.gpus}" if self.colocated else f"{self.rollout_gpus}+{self.train_gpus}"
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return " ".join(part for part in (self.mode, options, self.engine, f"on {pools}") if part)


def nearest(rows: Iterable[Row], devices: int, count: Callable[[Row], int]) -> Row:
    """The row whose number of devices, as `count` counts them, is nearest to `devices`: by their ratio."""
    return min(rows, key=lambda row: max(count(row) / devices, devices / count(row)))


def read_table(path: Path) -> list[Row]:
    """The rows of a CSV file; lines that begin with # are remarks.

    Columns: mode (a schedule), engine (any text; rows are compared with those of the same), total_gpus, rollout_gpus,
    train_gpus, and seconds per step: step_s, gen_s, wait_prev_gen_s, generate_sequences_s, old_log_prob_s,
    ref_log_prob_s, update_actor_s; and options of schedules by their names, such as max_staleness, which rows of
    schedules that have them may set. Others are refused, unless the table's settings list them as `unread`. Any cell
    but mode and the counts may be empty. Raises ConfigError for the first cell that cannot be read, naming its line.
    """
    if not path.is_file():
        raise ConfigError(
            f"TABLE={path} is not there; name a CSV file such as experiments/papers/verl_one_step_off.csv"
        )
    try:
        lines = read_text(path, MIB).removeprefix("\ufeff").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error
    numbers = [i for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    reader = csv.DictReader([lines[i - 1] for i in numbers], skipinitialspace=True)
    if reader.fieldnames is None or "mode" not in reader.fieldnames:
        raise ConfigError(f"{path}: there is no column `mode`; its first line names the columns")
    _check_columns(path, reader.fieldnames)
    rows = [_row(path, number, cells) for number, cells in zip(numbers[1:], reader, strict=True)]
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def _check_columns(path: Path, names: Sequence[str]) -> None:
    options = {option.name for name in SCHEDULES for option in dataclasses.fields(find("schedule", name))}
    known = ["mode", "engine", *_COUNTS, *_SECONDS, *sorted(options)]
    for name in [name for name in names if name not in (*known, *read_table_settings(path).unread)]:
        near = get_close_matches(name.rpartition("/")[2], known, 1, 0.0)[0]
        raise ConfigError(
            f"{path}: column `{name}` is unknown; the nearest is `{near}`: name it so if it is that, or list it under "
            f"`unread:` in {path.with_suffix('.yaml')} if nothing of a step is in it"
        )


def _check_sum(where: str, row: Row) -> Row:
    """Raise ConfigError where phases that follow each other take longer than the step."""
    parts = {"gen_s": row.gen_s or 0.0, **row.phases}
    if row.step_s is not None and row.colocated and sum(parts.values()) > (1 + ROUNDED) * row.step_s:
        listed = " + ".join(f"{name} {seconds:g}" for name, seconds in parts.items())
        raise ConfigError(
            f"{where}: {listed} exceed step_s={row.step_s:g}, and follow each other; leave out what another one "
            "contains, or correct the step"
        )
    return row


def _row(path: Path, number: int, cells: Mapping[str, str | None]) -> Row:
    where = f"{path}:{number}"
    mode = (cells["mode"] or "").strip()
    if mode not in SCHEDULES:
        raise ConfigError(f"{where}: mode={mode} is no schedule; use one of {', '.join(SCHEDULES)}")
    found = {name: _number(where, name, cells.get(name)) for name in (*_COUNTS, *_SECONDS)}
    rollout, train = _pools(where, mode, *(found[name] for name in _COUNTS))
    wait = found["wait_prev_gen_s"]
    options = [option.name for option in dataclasses.fields(find("schedule", mode))]
    row = Row(
        number=number,
        mode=mode,
        engine=(cells.get("engine") or "").strip(),
        rollout_gpus=rollout,
        train_gpus=train,
        step_s=found["step_s"],
        gen_s=found["gen_s"] if wait is None else wait,
        generate_sequences_s=found["generate_sequences_s"],
        phases={name: seconds for name in PHASES if (seconds := found[name]) is not None},
        options={name: text for name in options if (text := (cells.get(name) or "").strip())},
    )
    return _check_sum(where, row)


def _number(where: str, name: str, cell: str | None) -> float | None:
    text = (cell or "").strip()
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
    """Devices that generate and that train. Two of the three columns say it; a colocated row needs one."""
    if mode == COLOCATED:
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
    return whole[0], whole[1]


@dataclass(frozen=True, config=STRICT)
class TableSettings:
    """Settings of a table, as experiments/papers/defaults.yaml explains them. None of them is of a single row."""

    chunks: Count
    optimizer_steps: Count
    optimizer_step_s: NotNegative
    dedicated: Positive
    batches: Count
    scoring_fixed_s_per_sample: NotNegative
    fetch_s_per_sample: dict[str, NotNegative]
    settings: list[str] = field(default_factory=list)
    engines: dict[str, list[str]] = field(default_factory=dict)
    modes: dict[str, list[str]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def job(self, row: Row, arguments: Sequence[str]) -> JobConfig:
        """The job of a row, its devices and costs aside. Raises ConfigError, naming the setting."""
        options = [f"schedule.{name}={value}" for name, value in row.options.items()]
        return compose_job(
            [
                f"schedule={row.mode}",
                "backend=virtual",
                *self.settings,
                *self.engines.get(row.engine, []),
                *self.modes.get(row.mode, []),
                *arguments,
                *options,
            ]
        )


def read_table_settings(table: Path) -> TableSettings:
    """The file of the table's name beside it, over the defaults: lists are added to, single values replaced."""
    own = table.with_suffix(".yaml")
    tree = read_settings(DEFAULTS)
    for name, value in (read_settings(own) if own.is_file() else {}).items():
        tree[name] = _over(tree.get(name), value)
    try:
        return TypeAdapter(TableSettings).validate_python(tree)
    except ValidationError as error:
        raise ConfigError(f"{own if own.is_file() else DEFAULTS}: {first_line(error)}") from error


def _over(below: Any, value: Any) -> Any:
    if isinstance(below, list) and isinstance(value, list):
        return [*below, *value]
    if isinstance(below, dict) and isinstance(value, dict):
        return below | {name: _over(below.get(name), item) for name, item in value.items()}
    return value


def factors_of(config: JobConfig) -> RooflineConfig:
    """The roofline's factors. Raises ConfigError where costs are given: a table is calibrated from a roofline."""
    if not isinstance(config.cost, RooflineConfig):
        raise ConfigError(f"cost={config.cost.name} is given; a table is calibrated over cost=roofline")
    return config.cost
