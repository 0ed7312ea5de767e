"""A track: the job that is frozen, the reward to reach, and which seeds a run of it has."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.comparison.fairness import first_difference
from harness.config import STRICT, ConfigError, first_line
from harness.config.compose import EXPERIMENTS, read_settings
from harness.config.job import flatten, in_words_of_now

TRACKS = EXPERIMENTS / "speedrun"
DEFAULT = "tiny_reverse_v1"

_OF_A_RUN = ("experiment", "seeds", "force", "save_weights", "restarts", "texts", "cost", "device")
"""Settings that decide nothing of what is measured."""

_SEED_LIMIT = 10**6


@dataclass(frozen=True, config=STRICT)
class _File:
    """The file of a track. settings: that ask for the job; free: settings, or groups of them, that a run may choose;
    job: all others of its config.yaml."""

    target: Annotated[float, Field(gt=0, le=1)]
    seeds: Annotated[int, Field(ge=3)]
    settings: list[str]
    free: list[str]
    job: dict[str, Any]


@plain_dataclass(frozen=True)
class Track:
    """A track. target: exact match of samples of the held-out problems, drawn as in training. digest: SHA-256 of its
    file."""

    name: str
    digest: str
    target: float
    seeds: int
    settings: tuple[str, ...]
    free: tuple[str, ...]
    job: Mapping[str, Any]

    def refuse_changed(self, config: Mapping[str, Any]) -> None:
        """Refuse a run whose settings differ from the track's. config: config.yaml, or `plain(config)`. Raises
        ConfigError, naming the setting, where a record may not have it so."""
        if config["cluster"]["oversubscribe"]:
            raise ConfigError("cluster.oversubscribe=true: devices that share cores have no seconds to count")
        job, mine = self.frozen_of(self.job), self.frozen_of(in_words_of_now(config))
        found = first_difference(dict.fromkeys(mine) | job, dict.fromkeys(job) | mine)
        if found is not None:
            name, frozen, here = found
            raise ConfigError(
                f"{name}={here}, and track={self.name} has {frozen}; a record may choose {', '.join(self.free)}"
            )

    def frozen_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Settings, by their paths, that a record may not choose."""
        free = (*self.free, *_OF_A_RUN)
        return {
            name: value
            for name, value in flatten(config).items()
            if not any(name == one or name.startswith(f"{one}.") for one in free)
        }

    def seeds_of(self, config: Mapping[str, Any], commit: str) -> tuple[int, ...]:
        """The seeds of a run of these settings with the code of this commit: nobody chooses them, and whoever has the
        record can draw them again."""
        chosen = {name: value for name, value in flatten(config).items() if name.partition(".")[0] not in _OF_A_RUN}
        told = json.dumps([self.digest, commit, chosen], sort_keys=True)
        return tuple(random.Random(told).sample(range(_SEED_LIMIT), self.seeds))


def track_names() -> list[str]:
    """Names of all tracks."""
    return sorted(path.stem for path in TRACKS.glob("*.yaml"))


def read_track(name: str) -> Track:
    """Raises ConfigError for a name that none has, listing those there are, and for a file that cannot be read."""
    path = TRACKS / f"{name}.yaml"
    if name not in track_names():
        raise ConfigError(f"track={name} is unknown; choose one of {', '.join(track_names())}")
    return track_of(path)


def track_of(path: Path) -> Track:
    """The track of a file. Raises ConfigError, naming it and the setting, for one that cannot be read."""
    try:
        read = TypeAdapter(_File).validate_python(read_settings(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
    if not flatten(read.job).get("eval.k"):
        raise ConfigError(f"{path}: eval.k must be at least 1: the target is of samples")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Track(
        path.stem, digest, read.target, read.seeds, tuple(read.settings), tuple(read.free), in_words_of_now(read.job)
    )
