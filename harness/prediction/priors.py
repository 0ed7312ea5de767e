"""Distributions of what is not said of a system (experiments/priors.yaml), and draws from them."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from scipy.special import expit, logit
from scipy.stats import norm, qmc

from harness.config import STRICT, ConfigError, first_line
from harness.config.compose import EXPERIMENTS, read_settings
from harness.config.fields import Positive
from harness.prediction.evidence import Workload

PRIORS = EXPERIMENTS / "priors.yaml"

Draws = NDArray[np.float64]  # a figure for each draw: float64 [n]


@dataclass(frozen=True, config=STRICT)
class Quantity:
    """A quantity of systems: `typical` of one that nobody has seen, `spread` between systems, and those that were seen.
    factor: log-normal; share: of (0, 1), its log-odds normal. The spread is on that scale. With k systems seen the next
    one lies around the mean of them and `typical`, on that scale, with standard deviation spread sqrt(1 + 1 / (k + 1)):
    the normal model in which `typical` counts as one system (Gelman et al., "Bayesian data analysis", section 2.5)."""

    kind: Literal["factor", "share"]
    typical: Positive
    spread: Positive
    source: str
    systems: dict[str, Positive] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "share" and not all(value < 1 for value in (self.typical, *self.systems.values())):
            raise ValueError(f"typical={self.typical:g} and systems must be below 1 where kind=share")

    def scaled(self, value: float | Draws) -> Draws:
        """Values on the scale on which they are normal."""
        scaled: Draws = logit(value) if self.kind == "share" else np.log(value)
        return scaled

    @property
    def normal(self) -> tuple[float, float]:
        """Mean and standard deviation of the next system on that scale."""
        seen = [float(self.scaled(value)) for value in (self.typical, *self.systems.values())]
        return sum(seen) / len(seen), self.spread * math.sqrt(1 + 1 / len(seen))

    def of(self, standard: Draws, wider: float = 0.0) -> Draws:
        """Values of standard normal numbers; wider: standard deviation that comes to it."""
        mean, deviation = self.normal
        values = mean + math.hypot(deviation, wider) * standard
        made: Draws = expit(values) if self.kind == "share" else np.exp(values)
        return made

    def log_density(self, value: Draws, wider: float = 0.0) -> Draws:
        """Logarithm of the density on the normal scale, but for a constant."""
        mean, deviation = self.normal
        density: Draws = -0.5 * ((self.scaled(value) - mean) / math.hypot(deviation, wider)) ** 2
        return density


@dataclass(frozen=True, config=STRICT)
class Priors:
    """The file. workload: of whoever does not say; defaults: what is documented of a system instead, by its name;
    unsaid: how much wider shares of peaks are then."""

    quantities: dict[str, Quantity]
    unsaid: Positive
    workload: dict[str, int | str]
    defaults: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def without(self, systems: Collection[str]) -> Self:
        """The priors as if these systems had not been seen."""
        left = {
            name: dataclasses.replace(one, systems={its: v for its, v in one.systems.items() if its not in systems})
            for name, one in self.quantities.items()
        }
        return dataclasses.replace(self, quantities=left)

    def assumed(self, system: str) -> Workload:
        """The workload of whoever does not say; system: its name, "" where nobody says that either."""
        return Workload(**{**self.workload, **self.defaults.get(system, {})})  # type: ignore[arg-type]

    def draw(self, count: int, seed: int, known: Mapping[str, float], wider: Mapping[str, float]) -> dict[str, Draws]:
        """Draws of each quantity, spread evenly (a scrambled Sobol sequence); known: those that have one value. Raises
        ConfigError for a known one that is none."""
        for name in known:
            if name not in self.quantities:
                raise ConfigError(
                    f"quantities: {name} is none of {PRIORS.name}; use one of {', '.join(self.quantities)}"
                )
        sobol = qmc.Sobol(len(self.quantities), rng=np.random.default_rng(seed)).random_base2(
            math.ceil(math.log2(count))
        )
        standard = norm.ppf(np.clip(sobol[:count], 1e-9, 1 - 1e-9))
        return {
            name: np.full(count, known[name]) if name in known else one.of(standard[:, i], wider.get(name, 0.0))
            for i, (name, one) in enumerate(self.quantities.items())
        }


def read_priors(path: Path = PRIORS) -> Priors:
    """Read the file. Raises ConfigError, naming the first wrong setting."""
    try:
        return TypeAdapter(Priors).validate_python(read_settings(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
