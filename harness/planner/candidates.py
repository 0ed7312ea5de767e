"""Ways to use the devices: how many each role gets, how models lie on them, how far ahead rollout may run; and the grid
of those that a search looks at, which grows with the logarithm of the devices (docs/planner.md)."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from harness.checks.job import only_simulated
from harness.config import JobConfig
from harness.config.compose import changed
from harness.metrics.formatting import plural
from schedules import Schedule

PARALLEL = (1, 2, 4, 8)
"""Devices of an engine; ranks that share a layer, parts that the layers are cut into, ranks that share experts."""

MICRO_GROUPS = (1, 2, 4, 8)

STALENESS = (0.5, 1.0, 2.0, 4.0)  # values tried for a schedule that takes `max_staleness`
SCORING = (0.25, 0.5, 1.0)  # devices of a pool for scoring, for each of the actor's
_ENGINE, _PIPELINE, _EXPERTS = "engine.tensor_parallel", "training.pipeline_parallel", "training.expert_parallel"

_STEP = 1.2  # numbers of training ranks closer together than that count as one
_LEAST_USED = 0.5  # of the devices; a split that leaves more of them unused is none


@dataclass(frozen=True, order=True)
class Candidate:
    """Settings that the planner chooses. Devices are counted whole; groups are of a micro-batch of one training rank.
    scoring: devices of a pool that actor_fwd and reference share in turn; 0 where they take turns on the actor's.
    shared: rollout takes turns on the actor's devices too. options: of the schedule."""

    rollout: int
    actor: int
    scoring: int
    shared: bool
    engine_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    recompute: bool
    micro_groups: int
    expert_parallel: int = 1
    options: tuple[tuple[str, float], ...] = ()

    @property
    def engines(self) -> int:
        """Rollout engines."""
        return self.rollout // self.engine_parallel

    @property
    def rank_devices(self) -> int:
        """Devices of one data-parallel training rank."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks(self) -> int:
        """Training ranks."""
        return self.actor // self.rank_devices

    @property
    def devices(self) -> int:
        """Devices that it uses."""
        return self.actor + self.scoring + (0 if self.shared else self.rollout)

    def split(self, roles: tuple[str, ...]) -> dict[str, int | str]:
        """`schedule.split` for these device roles."""
        split: dict[str, int | str] = {"actor": self.actor, "rollout": "actor" if self.shared else self.rollout}
        if "lent" in roles:
            split["lent"] = "actor"
        owner = "actor"
        for role in ("actor_fwd", "reference"):
            if role not in roles:
                split[role] = "actor"
            elif self.scoring and owner == "actor":
                split[role], owner = self.scoring, role
            else:
                split[role] = owner
        return split

    def settings(self, roles: tuple[str, ...]) -> Mapping[str, int | float | str | bool]:
        """Every setting that it stands for, by its path, and no other: a job refuses what it does not read."""
        return {
            **{f"schedule.split.{role}": share for role, share in self.split(roles).items() if role in roles},
            **{f"schedule.{name}": value for name, value in self.options},
            _ENGINE: self.engine_parallel,
            "training.tensor_parallel": self.tensor_parallel,
            _PIPELINE: self.pipeline_parallel,
            _EXPERTS: self.expert_parallel,
            "training.recompute_activations": self.recompute,
            "algorithm.micro_batch_groups": self.micro_groups,
        }

    def apply(self, config: JobConfig, roles: tuple[str, ...]) -> JobConfig:
        """The job with these settings."""
        options = {**config.schedule.options, **dict(self.options)}
        return replace(
            config,
            schedule=replace(config.schedule, split=self.split(roles), options=options),
            engine=replace(config.engine, tensor_parallel=self.engine_parallel),
            training=replace(
                config.training,
                tensor_parallel=self.tensor_parallel,
                pipeline_parallel=self.pipeline_parallel,
                expert_parallel=self.expert_parallel,
                recompute_activations=self.recompute,
            ),
            algorithm=replace(config.algorithm, micro_batch_groups=self.micro_groups),
        )

    def describe(self) -> tuple[str, str]:
        """Split (devices) and layout, as a table says them."""
        parts = [f"{self.actor} shared" if self.shared else f"{self.rollout} + {self.actor}"]
        parts += [f"{self.scoring} scoring"] if self.scoring else []
        train = f"TP{self.tensor_parallel}"
        train += f" PP{self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        train += f" EP{self.expert_parallel}" if self.expert_parallel > 1 else ""
        train += " recompute" if self.recompute else ""
        engines, ranks = plural(self.engines, "engine"), plural(self.ranks, "rank")
        return " + ".join(parts), f"{engines} TP{self.engine_parallel}, {ranks} {train}"


def grid(config: JobConfig, schedule: Schedule, scored: bool, fixed: Collection[str] = ()) -> list[Candidate]:
    """Every candidate for this job on `cluster.devices` devices, whether it fits memory or not. scored: it has
    actor_fwd or reference. fixed: settings that keep the value they have in `config`. `max_staleness` is searched
    elsewhere: a candidate has the schedule's own options."""
    shared = schedule.colocated
    found = [
        Candidate(rollout, actor, scoring, shared, engine, tensor, pipeline, recompute, micro, experts)
        for (tensor, pipeline, recompute), micro in product(_layouts(config, fixed), _micro_groups(config, fixed))
        for actor in _actors(config, tensor * pipeline, micro)
        for experts in _experts(config, actor // (tensor * pipeline), tensor, fixed)
        for scoring in _scoring(actor, tensor * pipeline, scored and not shared)
        for engine in _engines(config, fixed)
        for rollout in _rollout(config, actor, scoring, engine, shared)
    ]
    whole = {candidate for candidate in found if not schedule.lends or candidate.actor % candidate.engine_parallel == 0}
    return sorted(candidate for candidate in whole if candidate.engines >= schedule.least_engines)


def _layouts(config: JobConfig, fixed: Collection[str]) -> Iterator[tuple[int, int, bool]]:
    """Tensor and pipeline parallel sizes that divide the model, with and without activations that are computed again;
    tensor parallel stays inside of a node."""
    training, model = config.training, config.model
    tensors = (training.tensor_parallel,) if "training.tensor_parallel" in fixed else PARALLEL
    pipelines = _sizes(config, _PIPELINE, training.pipeline_parallel, fixed)
    again = (training.recompute_activations,) if "training.recompute_activations" in fixed else (False, True)
    for tensor, pipeline, recompute in product(tensors, pipelines, again):
        shared = (model.heads, model.kv_heads, model.experts or model.ff, model.vocabulary)
        whole = all(size % tensor == 0 for size in shared) and model.layers % pipeline == 0
        if whole and tensor <= config.device.per_node:
            yield tensor, pipeline, recompute


def _sizes(config: JobConfig, setting: str, now: int, fixed: Collection[str]) -> tuple[int, ...]:
    """Numbers of devices of an engine, a pipeline, or ranks that share experts, that could run for real."""
    if setting in fixed:
        return (now,)
    if config.backend != "real":
        return PARALLEL
    alone = changed(config, {_ENGINE: 1, _PIPELINE: 1, _EXPERTS: 1})  # what another setting is refused for is no matter
    told = {size: only_simulated(changed(alone, {setting: size})) for size in PARALLEL}
    return tuple(size for size in PARALLEL if told[size] == told[1])


def _micro_groups(config: JobConfig, fixed: Collection[str]) -> tuple[int, ...]:
    return (config.algorithm.micro_batch_groups,) if "algorithm.micro_batch_groups" in fixed else MICRO_GROUPS


def _actors(config: JobConfig, rank_devices: int, micro: int) -> Iterator[int]:
    """Devices for training: as many ranks as a mini-batch divides into, of those numbers the ones a step apart."""
    batch, last = config.algorithm.mini_batch_groups, 0
    for ranks in range(1, config.cluster.devices // rank_devices + 1):
        if batch % (ranks * micro) == 0 and ranks >= last * _STEP:
            last = ranks
            yield ranks * rank_devices


def _experts(config: JobConfig, ranks: int, tensor: int, fixed: Collection[str]) -> Iterator[int]:
    """Ranks over which experts are spread: dividing both, where as many devices as `tensor` share a layer."""
    training, model = config.training, config.model
    spread = _sizes(config, _EXPERTS, training.expert_parallel, fixed)
    whole = (size for size in spread if model.experts and model.experts % (size * tensor) == ranks % size == 0)
    yield from whole if model.experts else (1,)


def _scoring(actor: int, rank_devices: int, scored: bool) -> set[int]:
    """Devices of a pool for scoring, which holds whole copies of the model as training ranks do."""
    sizes = {rank_devices * max(1, math.floor(actor * share / rank_devices)) for share in SCORING}
    return {0} | (sizes if scored else set())


def _engines(config: JobConfig, fixed: Collection[str]) -> Iterator[int]:
    """Devices of an engine: inside of a node, and dividing the attention heads."""
    if _ENGINE in fixed:
        yield config.engine.tensor_parallel
        return
    sizes = _sizes(config, _ENGINE, config.engine.tensor_parallel, fixed)
    yield from (size for size in sizes if size <= config.device.per_node and config.model.heads % size == 0)


def _rollout(config: JobConfig, actor: int, scoring: int, engine: int, shared: bool) -> Iterator[int]:
    """Devices for rollout: all that are left, in whole engines."""
    devices = config.cluster.devices
    rollout = actor if shared else (devices - actor - scoring) // engine * engine
    used = actor + scoring + (0 if shared else rollout)
    if rollout >= engine and rollout % engine == 0 and used >= _LEAST_USED * devices:
        yield rollout
