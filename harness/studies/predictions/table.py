"""A published table of step times as rows, whatever of it is there."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.config import ConfigError
from schedules import SCHEDULES

COLOCATED = "colocate_sync"

PHASES = ("old_log_prob_s", "ref_log_prob_s", "update_actor_s")
"""What a training pool does with a batch; everything else in a step is generation, waiting, or work on the host."""

_COUNTS = ("total_gpus", "rollout_gpus", "train_gpus")
_SECONDS = ("step_s", "gen_s", "wait_prev_gen_s", "generate_sequences_s", *PHASES)


@dataclass(frozen=True)
class Row:
    """One row. Seconds of one training step; None where the cell is empty or the column missing.

    mode: a schedule. colocated: all devices do everything in turn, so both pools are all of them.
    gen_s: of a colocated row the phase of generation, else the trainer's wait for samples, as is `wait_prev_gen_s`.
    generate_sequences_s: generation alone, without what comes before and after it.
    """

    number: int
    """Its line in the file."""
    mode: str
    engine: str
    rollout_gpus: int
    train_gpus: int
    step_s: float | None
    gen_s: float | None
    generate_sequences_s: float | None
    phases: Mapping[str, float] = field(hash=False)
    """Those of PHASES that the row gives."""
    options: Mapping[str, str] = field(hash=False)
    """Options of the schedule that the row sets."""

    @property
    def colocated(self) -> bool:
        return self.mode == COLOCATED

    @property
    def gpus(self) -> int:
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
    schedules that have them may set. Others are not read. Any cell but mode and the counts may be empty. Raises
    ConfigError for the first cell that cannot be read, naming its line.
    """
    if not path.is_file():
        raise ConfigError(
            f"TABLE={path} is not there; name a CSV file such as experiments/papers/verl_one_step_off.csv"
        )
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    numbers = [i for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    reader = csv.DictReader([lines[i - 1] for i in numbers], skipinitialspace=True)
    if reader.fieldnames is None or "mode" not in reader.fieldnames:
        raise ConfigError(f"{path}: there is no column `mode`; its first line names the columns")
    rows = [_row(path, number, cells) for number, cells in zip(numbers[1:], reader, strict=True)]
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def _row(path: Path, number: int, cells: Mapping[str, str | None]) -> Row:
    where = f"{path}:{number}"
    mode = (cells["mode"] or "").strip()
    if mode not in SCHEDULES:
        raise ConfigError(f"{where}: mode={mode} is no schedule; use one of {', '.join(SCHEDULES)}")
    found = {name: _number(where, name, cells.get(name)) for name in (*_COUNTS, *_SECONDS)}
    rollout, train = _pools(where, mode, *(found[name] for name in _COUNTS))
    wait = found["wait_prev_gen_s"]
    return Row(
        number=number,
        mode=mode,
        engine=(cells.get("engine") or "").strip(),
        rollout_gpus=rollout,
        train_gpus=train,
        step_s=found["step_s"],
        gen_s=found["gen_s"] if wait is None else wait,
        generate_sequences_s=found["generate_sequences_s"],
        phases={name: seconds for name in PHASES if (seconds := found[name]) is not None},
        options={name: text for name in _options(mode) if (text := (cells.get(name) or "").strip())},
    )


def _options(mode: str) -> list[str]:
    return [field.name for field in dataclasses.fields(SCHEDULES[mode])]  # type: ignore[arg-type]


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
