"""A paper experiment as its YAML file says it: source, comparison, settings and where these are from; its context."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from rich.console import Console

from harness.config import STRICT, ConfigError, first_line
from harness.config.compose import EXPERIMENTS, read_settings

if TYPE_CHECKING:
    from harness.campaigns.execution import StartRun  # which loads torch, and `make list` only reads files

PAPERS = EXPERIMENTS / "papers"
ENDING = ".paper.yaml"  # ending of their files: tables to predict have settings of their own beside them
Kind = Literal["fitted_ratio", "scaling", "calibrated", "predicted_table", "measured", "gantt"]

_Text = Annotated[str, Field(min_length=1)]
_Form = TypeVar("_Form")


@dataclass(frozen=True, config=STRICT)
class Setting:
    """A value, and where it is from: a section of the source, a public file of the same authors, or "assumed: why"."""

    value: Any
    source: _Text


@dataclass(frozen=True, config=STRICT)
class PaperExperiment:
    """An experiment of a paper. kind: what runs it (`harness.studies.papers.run.KINDS`); scale: what is computed, and
    how large; job: settings of the job, by the names that `make bench` has; settings: of the kind; data: a CSV file
    beside it, of published figures; missing: what the source does not say, or the simulation lacks."""

    name: _Text
    title: _Text
    kind: Kind
    source: _Text
    compares: _Text
    scale: _Text
    settings: dict[str, Setting]
    job: dict[str, Setting] = field(default_factory=dict)
    data: str | None = None
    missing: list[str] = field(default_factory=list)

    def read(self, form: type[_Form]) -> _Form:
        """The values of the settings, as `form`. Raises ConfigError, naming file and setting."""
        values = {name: setting.value for name, setting in self.settings.items()}
        try:
            return TypeAdapter(form).validate_python(values)
        except ValidationError as error:
            raise ConfigError(f"{self.path}: settings.{first_line(error)}") from error

    def overrides(self) -> list[str]:
        """The settings of the job, as a command line gives them."""
        values = {name: one.value for name, one in self.job.items()}
        return [f"{name}={str(of).lower() if isinstance(of, bool) else of}" for name, of in values.items()]

    @property
    def given(self) -> frozenset[str]:
        """Settings of the job that a source says: what is assumed is drawn."""
        return frozenset(name for name, setting in self.job.items() if not setting.source.startswith("assumed"))

    def published(self, **cells: str) -> list[Mapping[str, str]]:
        """The rows of `data` that have these cells, by column. Raises ConfigError where it has no row at all."""
        if self.data is None:
            raise ConfigError(f"{self.path} names no table; write data: <csv file in {PAPERS.name}/>")
        return [row for row in read_rows(PAPERS / self.data) if all(row[name] == cell for name, cell in cells.items())]

    def check_published(self, labels: Iterable[str], published: Collection[str]) -> None:
        """Raises ConfigError, naming it, for a label that is not among what is published."""
        for label in labels:
            if label not in published:
                raise ConfigError(f"{self.path}: {label!r} is in no row of {self.data}; there are {list(published)}")

    @property
    def path(self) -> Path:
        """The YAML file."""
        return PAPERS / f"{self.name}{ENDING}"


@plain_dataclass(frozen=True)
class Context:
    """The circumstances in which an experiment is run. results: the folder that runs are written to and found in;
    processes: how many simulate side by side; progress: called with what is being done; console: for runs that show
    their own progress; start: starts these."""

    results: Path
    console: Console
    start: StartRun
    processes: int = 1
    progress: Callable[[str], None] = lambda text: None


def names() -> list[str]:
    """Names of all paper experiments."""
    return sorted(path.name.removesuffix(ENDING) for path in PAPERS.glob(f"*{ENDING}"))


def read_experiment(name: str) -> PaperExperiment:
    """Raises ConfigError for a name that none has, listing those there are, and for a file that cannot be read."""
    if name not in names():
        raise ConfigError(f"paper={name} is unknown; choose all, or one of {', '.join(names())}")
    return parse(read_settings(PAPERS / f"{name}{ENDING}") | {"name": name})


def parse(tree: Mapping[str, Any]) -> PaperExperiment:
    """An experiment from nested plain values. Raises ConfigError, naming the first that is off."""
    try:
        return TypeAdapter(PaperExperiment).validate_python(tree)
    except ValidationError as error:
        raise ConfigError(f"{tree.get('name')}{ENDING}: {first_line(error)}") from error


def read_rows(path: Path) -> list[Mapping[str, str]]:
    """Rows of a CSV file; lines that begin with # are remarks. Raises ConfigError where it has none."""
    if not path.is_file():
        raise ConfigError(f"{path} is not there; it holds the published figures")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    rows: list[Mapping[str, str]] = [*csv.DictReader(lines, skipinitialspace=True)]
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows
