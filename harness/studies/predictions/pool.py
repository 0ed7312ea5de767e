"""A pool of devices that work together, as one device of the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.config import CostConfig, JobConfig


def one_device_each(config: JobConfig, split: Mapping[str, int | str]) -> JobConfig:
    """The job in which every rollout engine, and every other pool, is one device; split: as `schedule.split`.

    How the devices of a worker share its work is in the costs then, not in the layout.
    """
    return replace(
        config,
        schedule=replace(config.schedule, split=dict(split)),
        cluster=replace(config.cluster, devices=sum(count for count in split.values() if isinstance(count, int))),
        engine=replace(config.engine, tensor_parallel=1),
        training=replace(config.training, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1),
    )


def by_token_alone(cost: CostConfig, train_s_per_token: float, log_prob_s_per_token: float) -> CostConfig:
    """Costs whose training and scoring are a time per token and nothing else; what generation costs stays."""
    return replace(
        cost,
        log_prob_s_per_token=log_prob_s_per_token,
        log_prob_s_per_pair=0.0,
        log_prob_call_s=0.0,
        train_s_per_token=train_s_per_token,
        train_s_per_pair=0.0,
        train_call_s=0.0,
        train_step_s=0.0,
        call_s=0.0,
    )
