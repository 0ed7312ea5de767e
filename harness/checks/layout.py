"""Whether devices divide into engines and ranks, and layers over devices. Raises ConfigError: the value and the fix."""

from __future__ import annotations

import math

from harness.config import ConfigError, JobConfig
from harness.config.fields import MOST_DEVICES
from harness.config.placement import DEVICE_ROLES, Placement, devices_of
from schedules import Schedule


def device_roles(config: JobConfig) -> tuple[str, ...]:
    """The device roles of this job: reference, actor_fwd and critic only where something reads them."""
    absent = set()
    if not config.algorithm.has_reference:
        absent.add("reference")
    if not config.algorithm.recompute_log_probs:
        absent.add("actor_fwd")
    if not config.algorithm.has_critic:
        absent.add("critic")
    return tuple(role for role in DEVICE_ROLES if role not in absent)


def training_ranks(config: JobConfig, placement: Placement, role: str = "actor") -> int:
    """Data-parallel ranks of a role that trains: each does on its own part of a batch."""
    return len(placement.devices[role]) // _rank_devices(config)


def check_layout(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    """Devices divide into engines and ranks, and layers over devices."""
    _check_engines(config, schedule, placement)
    _check_ranks(config, placement)
    _check_expert_ranks(config, placement)


def _check_engines(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    together, devices = config.engine.tensor_parallel, len(placement.devices["rollout"])
    model = config.model
    shared = {"rollout devices": devices, "model.heads": model.heads, "model.ff": model.ff}
    _check_divides("engine.tensor_parallel", together, shared)
    if model.kv_heads % together and together % model.kv_heads:
        raise ConfigError(
            f"engine.tensor_parallel={together} and model.kv_heads={model.kv_heads}: neither divides the other; "
            f"set engine.tensor_parallel={model.kv_heads}"
        )
    if devices // together < schedule.least_engines:
        raise ConfigError(_too_few(config, schedule, devices // together, tuple(placement.devices)))


def _too_few(config: JobConfig, schedule: Schedule, engines: int, roles: tuple[str, ...]) -> str:
    split, there = config.schedule.split, config.cluster.devices
    least, needed = schedule.least_engines, schedule.least_engines * config.engine.tensor_parallel
    more = range(there + 1, min(64 * needed + there, MOST_DEVICES + 1))
    enough = next((n for n in more if devices_of("rollout", split, n, roles) >= needed), None)
    fix = f"set schedule.split.rollout={needed}" if enough is None else f"set DEVICES={enough}"
    return (
        f"schedule={config.schedule.name} needs {least} rollout engines, its split gives {engines} of "
        f"{there} device{'' if there == 1 else 's'}; {fix}"
    )


def _check_ranks(config: JobConfig, placement: Placement) -> None:
    tensor, pipeline, model = config.training.tensor_parallel, config.training.pipeline_parallel, config.model
    shared = {
        "training ranks": len(placement.devices["actor"]),
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.ff": model.ff,
        "model.vocabulary": model.vocabulary,
    }
    _check_divides("training.tensor_parallel", tensor, shared)
    _check_divides("training.pipeline_parallel", pipeline, {"model.layers": model.layers})
    together = tensor * pipeline
    for role, devices in placement.devices.items():
        if role != "rollout" and len(devices) % together:
            raise ConfigError(
                f"training.tensor_parallel={tensor} times training.pipeline_parallel={pipeline} does not divide the "
                f"{len(devices)} device{'' if len(devices) == 1 else 's'} of {role}; set schedule.split.{role} to a "
                f"multiple of {together}"
            )


def _check_expert_ranks(config: JobConfig, placement: Placement) -> None:
    spread, model = config.training.expert_parallel, config.model
    if spread == 1:
        return
    if not model.experts:
        raise ConfigError(f"training.expert_parallel={spread}: model={model.name} has no experts; set it to 1")
    shared = {"data-parallel ranks": training_ranks(config, placement), "model.experts": model.experts}
    _check_divides("training.expert_parallel", spread, shared)


def _check_divides(setting: str, together: int, shared: dict[str, int]) -> None:
    for what, number in shared.items():
        if number % together:
            most = math.gcd(*shared.values())
            fits = sorted(
                {n for small in range(1, math.isqrt(most) + 1) if most % small == 0 for n in (small, most // small)}
            )
            raise ConfigError(
                f"{setting}={together} does not divide the {number} {what}; set it to {' or '.join(map(str, fits))}"
            )


def _rank_devices(config: JobConfig) -> int:
    return config.training.tensor_parallel * config.training.pipeline_parallel
