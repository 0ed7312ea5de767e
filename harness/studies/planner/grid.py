"""The candidates of a search: coarse, and growing with the logarithm of the devices. docs/planner.md has the grid."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import product

from harness.config import JobConfig
from harness.studies.planner.candidate import Candidate
from schedules import Schedule

PARALLEL = (1, 2, 4, 8)
"""Devices of an engine; ranks that share a layer, parts that the layers are cut into, ranks that share experts."""

MICRO_GROUPS = (1, 2, 4, 8)
STALENESS = (0.5, 1.0, 2.0, 4.0)
"""Of a schedule that takes `max_staleness`."""

SCORING = (0.25, 0.5, 1.0)
"""Devices of a pool for scoring, for each of the actor's."""

_STEP = 1.2  # numbers of training ranks closer together than that are not told apart
_LEAST_USED = 0.5  # of the devices; a split that leaves more of them to nobody is none


def grid(config: JobConfig, schedule: Schedule, scored: bool, fixed: Collection[str] = ()) -> list[Candidate]:
    """Every candidate for this job on `cluster.devices` devices, whether it fits memory or not.

    scored: it has actor_fwd or reference. fixed: settings that keep the value they have in `config`. `max_staleness`
    is searched elsewhere: a candidate has the schedule's own options.
    """
    shared = schedule.colocated
    found = [
        Candidate(rollout, actor, scoring, shared, engine, tensor, pipeline, recompute, micro, experts)
        for (tensor, pipeline, recompute), micro in product(_layouts(config, fixed), _micro_groups(config, fixed))
        for actor in _actors(config, tensor * pipeline, micro)
        for experts in _experts(config, actor // (tensor * pipeline), fixed)
        for scoring in _scoring(actor, tensor * pipeline, scored and not shared)
        for engine in _engines(config, fixed)
        for rollout in _rollout(config, actor, scoring, engine, shared)
    ]
    return sorted(candidate for candidate in set(found) if candidate.engines >= schedule.least_engines)


def _layouts(config: JobConfig, fixed: Collection[str]) -> Iterator[tuple[int, int, bool]]:
    """Tensor and pipeline parallel sizes that divide the model, with and without activations that are computed again;
    tensor parallel stays inside of a node."""
    training, model = config.training, config.model
    tensors = (training.tensor_parallel,) if "training.tensor_parallel" in fixed else PARALLEL
    pipelines = (training.pipeline_parallel,) if "training.pipeline_parallel" in fixed else PARALLEL
    again = (training.recompute_activations,) if "training.recompute_activations" in fixed else (False, True)
    for tensor, pipeline, recompute in product(tensors, pipelines, again):
        shared = (model.heads, model.kv_heads, model.ff, model.vocabulary)
        whole = all(size % tensor == 0 for size in shared) and model.layers % pipeline == 0
        if whole and tensor <= config.device.per_node:
            yield tensor, pipeline, recompute


def _micro_groups(config: JobConfig, fixed: Collection[str]) -> tuple[int, ...]:
    return (config.algorithm.micro_batch_groups,) if "algorithm.micro_batch_groups" in fixed else MICRO_GROUPS


def _actors(config: JobConfig, rank_devices: int, micro: int) -> Iterator[int]:
    """Devices for training: as many ranks as the batch divides into, of those numbers the ones a step apart."""
    batch, last = config.algorithm.batch_groups, 0
    for ranks in range(1, config.cluster.devices // rank_devices + 1):
        if batch % (ranks * micro) == 0 and ranks >= last * _STEP:
            last = ranks
            yield ranks * rank_devices


def _experts(config: JobConfig, ranks: int, fixed: Collection[str]) -> Iterator[int]:
    """Ranks over which experts are spread: dividing both."""
    training, model = config.training, config.model
    spread = (training.expert_parallel,) if "training.expert_parallel" in fixed else PARALLEL
    yield from (size for size in spread if size == 1 or (model.experts and model.experts % size == ranks % size == 0))


def _scoring(actor: int, rank_devices: int, scored: bool) -> set[int]:
    """Devices of a pool for scoring, which holds whole copies of the model as training ranks do."""
    sizes = {rank_devices * max(1, math.floor(actor * share / rank_devices)) for share in SCORING}
    return {0} | (sizes if scored else set())


def _engines(config: JobConfig, fixed: Collection[str]) -> Iterator[int]:
    """Devices of an engine: inside of a node, and dividing the attention heads."""
    if "engine.tensor_parallel" in fixed:
        yield config.engine.tensor_parallel
        return
    yield from (size for size in PARALLEL if size <= config.device.per_node and config.model.heads % size == 0)


def _rollout(config: JobConfig, actor: int, scoring: int, engine: int, shared: bool) -> Iterator[int]:
    """Devices for rollout: all that are left, in whole engines."""
    devices = config.cluster.devices
    rollout = actor if shared else (devices - actor - scoring) // engine * engine
    used = actor + scoring + (0 if shared else rollout)
    if rollout >= engine and rollout % engine == 0 and used >= _LEAST_USED * devices:
        yield rollout
