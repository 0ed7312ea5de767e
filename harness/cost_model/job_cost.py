"""Costs of a job's simulated work where it is placed, and whether it fits the devices that it is simulated on."""

from dataclasses import replace

from harness.config import ConfigError, CostConfig, JobConfig, RooflineConfig
from harness.config.cost import RecurringCost
from harness.config.placement import Placement
from harness.cost_model.memory import JobLayout, advice, is_fp8, kv_tokens
from harness.cost_model.memory_plan import GIB, Lengths, MemoryPlan, PlanSetting, PoolMemory, plan_memory
from harness.cost_model.roofline import roofline
from harness.cost_model.shape import adapter_parameters, sent_bytes, weight_bytes


def layout_of(config: JobConfig, placement: Placement, role: str = "actor") -> JobLayout:
    """How the job's work lies on its devices; role: that trains on them, or lent, as the engines on those see it."""
    training, algorithm = config.training, config.algorithm
    train_devices = training.ranks_together
    return JobLayout(
        engine_devices=config.engine.tensor_parallel,
        train_devices=train_devices,
        train_ranks=len(placement.devices[role]) // train_devices,
        colocated=len(placement.roles_on(placement.devices["lent" if role == "lent" else "rollout"][0])) > 1,
        pipeline=training.pipeline_parallel,
        expert_ranks=training.expert_parallel,
        samples_per_call=algorithm.micro_batch_groups * algorithm.group_size,
        recompute=training.recompute_activations,
        one_node=placement.total <= config.device.per_node,
        fp8=is_fp8(config.engine),
        adapters=adapter_parameters(config.model, training),
    )


def simulated_cost(config: JobConfig, placement: Placement, role: str = "actor") -> CostConfig:
    """Costs of one worker's work: as given, or by the roofline of the job's device. role: as of `layout_of`; a critic
    is priced as a policy of the same shape. Raises ConfigError where a rollout engine's memory cannot hold
    the weights."""
    if isinstance(config.cost, CostConfig):
        cost = config.cost
    else:
        cost = roofline(config.model, config.device, config.cost, layout_of(config, placement, role))
    if role == "lent":
        cost = replace(cost, evaluation=RecurringCost())  # the others do that
    elif "lent" in placement.devices:
        moved = simulated_cost(config, placement, "lent")  # with the trainer's state
        cost = replace(cost, offload_s=moved.offload_s, reload_s=moved.reload_s)
    if config.training.lora_rank:
        cost = _of_adapters(cost, config)
    travels = not placement.share("rollout", "actor")
    return _of_deltas(cost) if config.cluster.delta_weights and travels else cost


def _of_adapters(cost: CostConfig, config: JobConfig) -> CostConfig:
    """The same where adapters travel. An engine still moves all of its weights when it sleeps; one with processes of
    its own reads them from its host for every version, too (engines/merging.py). Transfers that were timed were of all
    weights."""
    share = sent_bytes(config.model, config.training) / weight_bytes(config.model)
    rest_s = (1 - share) * cost.weight_bytes / cost.host_bytes_per_s
    return replace(
        cost,
        weight_bytes=share * cost.weight_bytes,
        offload_s=cost.offload_s + rest_s,
        reload_s=cost.reload_s + rest_s,
        sync_s=cost.sync_s + rest_s * (config.engine.name != "torch"),
        transfers=(),
    )


def _of_deltas(cost: CostConfig) -> CostConfig:
    """The same where only changed words, and a bit for each (harness/weight_sync/difference.py), cross the network,
    which a bucket does when it has been compared. Transfers that were timed were of all weights."""
    sent = min(1.0, cost.changed_share + 1 / 32)
    seconds_per_byte = sent / cost.network_bytes_per_s + 1 / cost.delta_bytes_per_s
    return replace(cost, network_bytes_per_s=1 / seconds_per_byte, transfers=())


def check_memory(config: JobConfig, placement: Placement, transport: str) -> None:
    """Raise ConfigError for a job that its devices cannot hold; transport: of its weights. Costs that are given say
    nothing of a device."""
    if isinstance(config.cost, CostConfig):
        return
    for role in ("actor", "lent") if "lent" in placement.devices else ("actor",):
        _check_engine(config, config.cost, layout_of(config, placement, role))
    setting = described(config, config.cost, transport)
    plan = plan_memory(config, placement, setting)
    for pool in plan.pools:
        if pool.peak > plan.there and pool.roles != ("rollout",):
            raise ConfigError(f"{too_much(config, plan, pool)} of device={config.device.name}; {_use(pool)}")


def described(config: JobConfig, cost: RooflineConfig, transport: str) -> PlanSetting:
    """The devices that a job is simulated on."""
    return PlanSetting(
        Lengths(cost.prompt_tokens, longest_sample(cost) - cost.prompt_tokens),
        config.device.memory_bytes,
        transport,
        simulated=True,
        usable=cost.kv_share,
    )


def too_much(config: JobConfig, plan: MemoryPlan, pool: PoolMemory) -> str:
    """The beginning of a sentence: what a pool needs, where, and how much of it is what."""
    largest = max((item for item in pool.items if pool.peak_phase in item.phases), key=lambda item: item.bytes)
    return (
        f"model={config.model.name} needs {pool.peak / GIB:.1f} GiB on each device of {pool.name} "
        f"({pool.peak_phase}, {largest.bytes / GIB:.1f} of them for {largest.what}), and may use "
        f"{plan.there / GIB:.1f} GiB"
    )


def _use(pool: PoolMemory) -> str:
    recomputed = any(item.what == "a layer, computed again" and item.bytes for item in pool.items)
    activations = sum(item.bytes for item in pool.items if item.what == "activations")
    fixes = [f"more devices for {pool.name}"]
    if activations > pool.peak / 2:
        fixes = ["training.tensor_parallel=2" if recomputed else "training.recompute_activations=true", *fixes]
    return f"use {', '.join(fixes)}, or a device with more memory, as in device=h200"


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
                "divided; use cost=roofline"
            )


def longest_sample(cost: RooflineConfig) -> int:
    """Tokens that a sample may have, its environment's included."""
    turns = 1 if cost.turns is None else cost.turns.cap
    return cost.prompt_tokens + turns * cost.lengths.cap + (turns - 1) * cost.observation_tokens.cap


def _check_engine(config: JobConfig, cost: RooflineConfig, layout: JobLayout) -> None:
    longest, room = longest_sample(cost), kv_tokens(config.model, config.device, cost, layout)
    if room < longest:
        raise ConfigError(
            f"model={config.model.name}: beside its weights a rollout engine on device={config.device.name} has room "
            f"for {room:,} tokens, and the longest sample has {longest:,} (cost.prompt_tokens and cost.lengths.cap); "
            f"{advice(layout)}"
        )
