"""What is known of a table's runs besides its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.config import STRICT, ConfigError, JobConfig, RooflineConfig, first_line
from harness.config.compose import EXPERIMENTS, compose_job, read_settings
from harness.studies.predictions.table import Row

DEFAULTS = EXPERIMENTS / "papers" / "defaults.yaml"

_Count = Annotated[int, Strict(), Field(ge=1)]
_NotNegative = Annotated[float, Strict(), Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class TableSettings:
    """As experiments/papers/defaults.yaml explains them. None of them is of a single row."""

    chunks: _Count
    optimizer_steps: _Count
    optimizer_step_s: _NotNegative
    dedicated: Annotated[float, Strict(), Field(gt=0)]
    batches: _Count
    scoring_fixed_s_per_sample: _NotNegative
    fetch_s_per_sample: dict[str, _NotNegative]
    settings: list[str] = field(default_factory=list)
    engines: dict[str, list[str]] = field(default_factory=dict)
    modes: dict[str, list[str]] = field(default_factory=dict)

    def job(self, row: Row, arguments: Sequence[str]) -> JobConfig:
        """The job of a row, its devices and costs aside. Raises ConfigError, naming the setting."""
        options = [f"schedule.{name}={value}" for name, value in row.options.items()]
        return compose_job(
            [
                f"schedule={row.mode}",
                "backend=virtual",
                "algorithm.reference=false",
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
        return below | {name: _over(below.get(name), its) for name, its in value.items()}
    return value


def factors_of(config: JobConfig) -> RooflineConfig:
    """The roofline's factors. Raises ConfigError where costs are given: a table is calibrated from a roofline."""
    if not isinstance(config.cost, RooflineConfig):
        raise ConfigError(f"cost={config.cost.name} is given; a table is calibrated over cost=roofline")
    return config.cost
