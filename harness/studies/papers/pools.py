"""Pools of devices that work together, each as one device of the simulation, at the pool's costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.config import ConfigError, CostConfig, JobConfig
from harness.cost_model.layout import Layout
from harness.cost_model.roofline import roofline
from harness.studies.predictions.pool import one_device_each
from harness.studies.predictions.settings import factors_of

SCORING = ("actor_fwd", "reference")


def pooled(config: JobConfig, devices: Mapping[str, int]) -> JobConfig:
    """The job on these devices by role: engines stay one by one, every other pool becomes one device of the simulation,
    as fast as its data-parallel ranks together.

    So a trainer of several ranks takes whatever is ready, as systems do that deal micro-batches out from one queue;
    here a world of several ranks reads in order of admission. Roles that score must have equally many devices, since
    they share one setting. Raises ConfigError where they do not, or devices make no whole workers.
    """
    engines = _workers(devices, "rollout", config.engine.tensor_parallel)
    rank = config.training.tensor_parallel * config.training.pipeline_parallel
    ranks = _workers(devices, "actor", rank)
    scoring = {role: devices[role] for role in SCORING if role in devices}
    if len(set(scoring.values())) > 1:
        raise ConfigError(f"devices: {scoring} score with different numbers; give them equally many")
    scorers = _workers(devices, next(iter(scoring)), rank) if scoring else 1
    split: dict[str, int | str] = {"rollout": engines, "actor": 1}
    split |= {role: 1 if role in scoring else "actor" for role in SCORING}
    return replace(one_device_each(config, split), cost=_cost(config, devices, ranks, scorers))


def _cost(config: JobConfig, devices: Mapping[str, int], ranks: int, scorers: int) -> CostConfig:
    training, algorithm = config.training, config.algorithm
    layout = Layout(
        engine_devices=config.engine.tensor_parallel,
        train_devices=training.tensor_parallel * training.pipeline_parallel,
        train_ranks=ranks,
        pipeline=training.pipeline_parallel,
        samples_per_call=algorithm.micro_batch_groups * algorithm.group_size,
        recompute=training.recompute_activations,
        one_node=sum(devices.values()) <= config.device.per_node,
    )
    cost = roofline(config.model, config.device, factors_of(config), layout)
    return replace(
        cost,
        train_s_per_token=cost.train_s_per_token / ranks,
        train_s_per_pair=cost.train_s_per_pair / ranks,
        log_prob_s_per_token=cost.log_prob_s_per_token / scorers,
        log_prob_s_per_pair=cost.log_prob_s_per_pair / scorers,
    )


def _workers(devices: Mapping[str, int], role: str, each: int) -> int:
    if role not in devices or devices[role] % each:
        raise ConfigError(f"devices: {role}={devices.get(role, 0)} makes no whole workers of {each} devices")
    return devices[role] // each
