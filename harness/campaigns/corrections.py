"""The corrections that a matrix is asked for: a loss, a named bundle of settings, or either at a learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config import ConfigError
from harness.config.compose import EXPERIMENTS, names_of, read_settings
from harness.config.plugins import is_path
from harness.config.registries import CORRECTIONS

BUNDLES = EXPERIMENTS / "corrections.yaml"
_CORRECTION = "algorithm.correction"
_RATE = "algorithm.learning_rate"
_LAYOUT = frozenset({"algorithm.micro_batch_groups"})
"""Settings of a bundle that a correction needs in order to run, but that are not part of what is compared."""
_AT = "@"


@dataclass(frozen=True)
class NamedCorrection:
    """A correction that was asked for. name: as it was asked for, which heads its column; settings: of the job."""

    name: str
    settings: tuple[str, ...]


def named_corrections(listed: str) -> list[NamedCorrection]:
    """Corrections of a list. listed: names with commas, each of a loss, of a bundle in experiments/corrections.yaml, or
    an import path; with `@2e-4` behind it at that learning rate. Raises ConfigError for another one."""
    bundles = read_bundles()
    return [_correction(name, bundles) for name in dict.fromkeys(part.strip() for part in listed.split(","))]


def correction_axes() -> tuple[str, ...]:
    """Every setting that corrections of a matrix may differ in on purpose."""
    bundled = {name for bundle in read_bundles().values() for name in bundle}
    return (_CORRECTION, *sorted({_RATE, *bundled} - {_CORRECTION, *_LAYOUT}))


def refuse_overridden(corrections: Sequence[NamedCorrection], shared: Sequence[str]) -> None:
    """Raise ConfigError where a setting of all cells would take the place of one that a correction stands for."""
    for setting in shared:
        name = setting.partition("=")[0]
        of = [each.name for each in corrections if name in names_of(each.settings) - _LAYOUT]
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


def _correction(asked: str, bundles: dict[str, dict[str, str]]) -> NamedCorrection:
    name, at, rate = asked.partition(_AT)
    if name not in bundles and name not in CORRECTIONS and not is_path(name):
        known = ",".join(dict.fromkeys((*CORRECTIONS, *bundles)))
        raise ConfigError(f"corrections={name} is unknown; choose some of {known}")
    settings = {_CORRECTION: name, **bundles.get(name, {})}
    if at:
        settings[_RATE] = rate
    return NamedCorrection(asked, tuple(f"{setting}={value}" for setting, value in settings.items()))
