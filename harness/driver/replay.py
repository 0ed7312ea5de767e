"""The recording of a run (harness/metrics/arrivals.py), as each part of a replay needs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.config import ConfigError, JobConfig
from harness.config.placement import Placement
from harness.metrics.arrivals import (
    ARRIVALS,
    FORMAT,
    Arrivals,
    DamagedArrivals,
    Recording,
    RunOf,
    differences,
    read_arrivals,
)
from harness.workers.replaying import RecordedRollout


@dataclass(frozen=True)
class Replay:
    """A recorded run. where: its folder, for messages; engines: of rollout; picklable."""

    recording: Recording
    where: str
    engines: int

    @classmethod
    def read(cls, folder: Path, config: JobConfig, seed: int, placement: Placement) -> Replay:
        """The recording of the run in this folder. Raises ConfigError where it is damaged, or of another run."""
        try:
            recording = read_arrivals(folder / ARRIVALS).with_whole_groups()
        except DamagedArrivals as error:
            raise ConfigError(f"replay: {error}; this run cannot be replayed") from error
        expected = RunOf(FORMAT, seed, config.iterations, config.algorithm.group_size)
        if recording.run != expected:
            raise ConfigError(f"replay: {folder / ARRIVALS} is of {recording.run}, and this run is {expected}")
        engines = len(placement.devices["rollout"]) // config.engine.tensor_parallel
        replay = cls(recording, str(folder), engines)
        if missing := sorted(engine for engine in replay._groups if engine >= engines):
            raise ConfigError(f"replay: engine {missing[0]} of {folder} joined meanwhile, and this run has {engines}")
        return replay

    @property
    def drops(self) -> list[list[list[int]]]:
        """Groups, by iteration and call."""
        return [told.drops for told in self.recording.iterations]

    def rollout(self, engine: int) -> RecordedRollout:
        """Groups that were dropped are dealt out: which engine began them decides nothing."""
        groups = self._groups.get(engine, {})
        dropped = sorted(group for calls in self.drops for drop in calls for group in drop)
        order = sorted(groups, key=lambda group: (groups[group], group))
        return RecordedRollout(order, self._runs.get(engine, {}), dropped[engine :: self.engines])

    @cached_property
    def batches(self) -> list[list[list[int]]]:
        """Micro-batches of all ranks together, by iteration: groups of the first rank, of the second, and so on."""
        n = self.recording.run.group_size
        return [
            [[first // n for share in shares for first in share[::n]] for shares in zip(*told.ranks, strict=True)]
            for told in self.recording.iterations
        ]

    def check(self, found: Arrivals) -> None:
        """Raises ConfigError where an iteration came out otherwise."""
        if what := differences(self.recording.iterations[found.iteration], found):
            raise ConfigError(
                f"replay: iteration {found.iteration} came out otherwise than in {self.where}: {what}; other code, "
                "another machine's arithmetic, or other inputs"
            )

    @cached_property
    def _groups(self) -> dict[int, dict[int, float]]:
        """Groups by engine, and when each was begun."""
        n, found = self.recording.run.group_size, defaultdict[int, dict[int, float]](dict)
        for sampled in self.recording.sampled:
            group = sampled.sample // n
            begun = found[sampled.engine]
            begun[group] = min(begun.get(group, sampled.started_at), sampled.started_at)
        return found

    @cached_property
    def _runs(self) -> dict[int, dict[int, Sequence[tuple[int, int]]]]:
        found = defaultdict[int, dict[int, Sequence[tuple[int, int]]]](dict)
        for sampled in self.recording.sampled:
            found[sampled.engine][sampled.sample] = sampled.runs
        return found
