"""What a job's simulated work costs where it is placed, and whether it fits the devices that it is simulated on."""

from __future__ import annotations

from harness.config import ConfigError, CostConfig, JobConfig, RooflineConfig
from harness.config.placement import Placement
from harness.cost_model.memory import (
    GIB,
    Layout,
    activation_bytes_per_token,
    advice,
    kv_tokens,
    scoring_bytes,
    training_bytes,
)
from harness.cost_model.roofline import roofline


def layout_of(config: JobConfig, placement: Placement) -> Layout:
    """How the job's work lies on its devices."""
    training, algorithm = config.training, config.algorithm
    train_devices = training.tensor_parallel * training.pipeline_parallel
    return Layout(
        engine_devices=config.engine.tensor_parallel,
        train_devices=train_devices,
        train_ranks=len(placement.devices["actor"]) // train_devices,
        colocated=len(placement.roles_on(placement.devices["rollout"][0])) > 1,
        pipeline=training.pipeline_parallel,
        expert_ranks=training.expert_parallel,
        samples_per_call=algorithm.micro_batch_groups * algorithm.group_size,
        recompute=training.recompute_activations,
        one_node=placement.total <= config.device.per_node,
    )


def simulated_cost(config: JobConfig, placement: Placement) -> CostConfig:
    """What one worker's work costs: as given, or by the roofline of the job's device. Raises ConfigError where a
    rollout engine's memory cannot hold the weights."""
    if isinstance(config.cost, CostConfig):
        return config.cost
    return roofline(config.model, config.device, config.cost, layout_of(config, placement))


def check_memory(config: JobConfig, placement: Placement) -> None:
    """Raise ConfigError for a job that its devices cannot hold. Costs that are given say nothing of a device."""
    if isinstance(config.cost, CostConfig):
        return
    _check_engine(config, config.cost, layout_of(config, placement))
    for pool, devices in placement.pools.items():
        _check_training(config, config.cost, placement, pool.split("+"), len(devices))


def check_given(config: JobConfig) -> None:
    """Raise ConfigError for given costs, which are of one worker, in a job whose workers have several devices: they
    cannot say what sharing a model does to them."""
    parallel = {
        "engine.tensor_parallel": config.engine.tensor_parallel,
        "training.tensor_parallel": config.training.tensor_parallel,
        "training.pipeline_parallel": config.training.pipeline_parallel,
        "training.expert_parallel": config.training.expert_parallel,
    }
    for setting, number in parallel.items():
        if number > 1 and isinstance(config.cost, CostConfig):
            raise ConfigError(
                f"{setting}={number}: cost={config.cost.name} gives what a worker of one device takes, and cannot be "
                "divided; use COST=roofline"
            )


def _longest(cost: RooflineConfig) -> int:
    """Tokens that a sample may have, its environment's included."""
    turns = 1 if cost.turns is None else cost.turns.cap
    return cost.prompt_tokens + turns * cost.lengths.cap + (turns - 1) * cost.observation_tokens.cap


def _check_engine(config: JobConfig, cost: RooflineConfig, layout: Layout) -> None:
    longest, room = _longest(cost), kv_tokens(config.model, config.device, cost, layout)
    if room < longest:
        raise ConfigError(
            f"model={config.model.name}: beside its weights a rollout engine on device={config.device.name} has room "
            f"for {room:,} tokens, and the longest sample has {longest:,} (cost.prompt_tokens and cost.lengths.cap); "
            f"{advice(layout)}"
        )


def _check_training(
    config: JobConfig, cost: RooflineConfig, placement: Placement, roles: list[str], devices: int
) -> None:
    """Training state, the activations of the longest sample, and copies to score with: a rank computes as many samples
    of a micro-batch at once as fit, one at least."""
    model, device, layout, longest = config.model, config.device, layout_of(config, placement), _longest(cost)
    copies = len([role for role in roles if role not in ("rollout", "actor")])
    need = copies * scoring_bytes(model, devices)
    if "actor" in roles:
        need += training_bytes(model, layout, longest)
    there = device.memory_bytes * cost.kv_share
    if need <= there:
        return
    activations = longest * activation_bytes_per_token(model, layout) if "actor" in roles else 0.0
    fixes = [f"more devices for {'+'.join(roles)}"]
    if activations > need / 2:
        fixes = ["training.tensor_parallel=2" if layout.recompute else "training.recompute_activations=true", *fixes]
    raise ConfigError(
        f"model={model.name} needs {need / GIB:.1f} GiB on each device of {'+'.join(roles)}, {activations / GIB:.1f} "
        f"of them for the activations of the longest sample ({longest:,} tokens), and may use {there / GIB:.1f} GiB of "
        f"device={device.name}; use {', '.join(fixes)}, or a device with more memory, as in DEVICE=h200"
    )
