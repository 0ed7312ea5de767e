"""Everything that can be known before a job starts to be impossible. Raises ConfigError: the value and the fix."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.checks.earlier_run import check_begin_with, check_replay
from harness.checks.layout import check_batch, check_layout
from harness.checks.machine import (
    HardwareMissing,
    check_devices,
    check_instances,
    check_machine_memory,
    check_nodes,
    check_trial_groups,
    real_setting,
    share_of_engines,
)
from harness.checks.plugins import (
    check_environment,
    check_plugins,
    check_queue,
    engine_options,
    engine_takes_several_devices,
    planned_options,
)
from harness.config import AlgorithmConfig, Backend, ConfigError, EvalConfig, JobConfig, ModelConfig
from harness.config.machine import Machine
from harness.config.model_folder import (
    DRAWN,
    DRAWN_WITH_EXPERTS,
    HUB,
    WITH_EXPERTS,
    local_folder,
    read_config,
    require_shape,
)
from harness.config.placement import ENGINE_ROLES, Communicator, Placement, check_communicators, communicators
from harness.config.readers import described_engine
from harness.config.registries import ENGINES
from harness.cost_model.job_cost import check_memory
from harness.cost_model.memory import is_fp8
from harness.cost_model.memory_plan import EngineShare, Lengths
from harness.cost_model.shape import linear_layers
from harness.tasks import Task, environment_of, extra_metrics, make_task, max_tokens
from schedules import Schedule


@dataclass(frozen=True)
class JobPlan:
    """A job that can run: where its roles go, and on what. `why`: what made it a simulation, where nobody asked."""

    placement: Placement
    gpu: bool
    backend: Backend = "real"
    why: str = ""
    shares: Mapping[str, EngineShare] = field(default_factory=dict)
    """Share of a device's memory that a rollout engine may take; of a real job."""
    trial: bool = False  # whether its processes share one GPU: that shows that they run, and measures nothing


def plan_job(config: JobConfig, schedule: Schedule, machine: Machine) -> JobPlan:
    """Check the job against itself, and where it is to run for real against this machine. backend=auto runs for real
    where this machine can hold the job, and is a simulation otherwise."""
    plan = _planned(config, schedule, machine)
    if config.checkpoint.begin_with is not None:
        check_begin_with(config, plan.backend)
    if config.replay is not None:
        check_replay(config, schedule, plan.backend, plan.gpu)
    return plan


def _planned(config: JobConfig, schedule: Schedule, machine: Machine) -> JobPlan:
    placement, groups = _check_itself(config, schedule)
    if config.backend == "virtual" and config.cluster.queue is not None:
        raise ConfigError(
            f"cluster.queue={config.cluster.queue} is of a queue in a process of its own, and a simulation has one in "
            "its own memory; leave it out, or set backend=paced"
        )
    check_queue(config.cluster)
    if config.backend in ("virtual", "paced"):
        return _simulated(config, schedule, placement, config.backend)
    check_environment(config)
    try:
        return _real(config, schedule, placement, groups, machine)
    except HardwareMissing as missing:
        if config.backend == "real":
            raise
        return _simulated(config, schedule, placement, "virtual", why=str(missing))


def plan_elsewhere(config: JobConfig, schedule: Schedule, machine: Machine) -> JobPlan:
    """Plan as `plan_job` with backend=real, for another machine, whatever is installed or downloaded on this one."""
    config = without_hub(config)
    return _real(config, schedule, *_check_itself(config, schedule), machine)


def without_hub(config: JobConfig) -> JobConfig:
    """The same sizes without the weights and the tokenizer of a repository, which nothing is read from."""
    checkpoint = config.model.checkpoint
    if checkpoint is None or not checkpoint.startswith(HUB):
        return config
    return replace(config, model=replace(config.model, checkpoint=None))


def _check_itself(config: JobConfig, schedule: Schedule) -> tuple[Placement, list[Communicator]]:
    _check_scoring(config)
    engine_options(config)
    check_plugins(config, schedule)
    _check_greedy_baseline(config)
    _check_model(config.model)
    _check_quantization(config)
    check_adapters(config)
    placement = check_layout(config, schedule)
    return placement, _check_communicators(config, schedule, placement)


def _real(
    config: JobConfig, schedule: Schedule, placement: Placement, groups: Sequence[Communicator], machine: Machine
) -> JobPlan:
    """Raises HardwareMissing for what another machine, or a simulation, could do."""
    gpu = machine.gpus > 0 if config.cluster.kind == "auto" else config.cluster.kind == "gpu"
    if (refused := only_simulated(config)) is not None:
        raise HardwareMissing(refused)
    check_engine_devices(config, schedule, placement)
    check_devices(config, schedule, placement, machine, gpu)
    _check_compile(config, gpu)
    _check_replay(config, gpu)
    trial = gpu and config.cluster.oversubscribe
    if trial:
        check_trial_groups(groups)
    else:
        check_instances(groups, machine, gpu)
    check_nodes(schedule, placement, machine, gpu)
    setting = real_setting(config, schedule, machine, WEIGHTS_ALONE, gpu=gpu)
    check_machine_memory(config, schedule, placement, machine, setting)
    task = make_task(config)
    _check_handed_over(config, schedule, environment_of(task) is not None)
    setting = replace(setting, lengths=Lengths(task.max_prompt_tokens, max_tokens(config, task)))
    memory = check_machine_memory(config, schedule, placement, machine, setting)
    _check_weights(config.model)
    _check_lengths(config, task)
    _check_parts(config, extra_metrics(task))
    _check_top_p(config.algorithm.top_p)
    check_batch(config, schedule, placement)
    shares = {
        role: share_of_engines(config, memory, setting, role) for role in ENGINE_ROLES if role in placement.devices
    }
    for share in shares.values():
        planned_options(config, share)
    return JobPlan(placement, gpu, shares=shares, trial=trial)


def _simulated(
    config: JobConfig, schedule: Schedule, placement: Placement, backend: Literal["virtual", "paced"], why: str = ""
) -> JobPlan:
    """Nothing is asked of the machine."""
    algorithm = config.algorithm
    if algorithm.filters and config.cost.filtered_share is None:
        raise ConfigError(
            f"algorithm.filter={algorithm.filter} has no rewards to read on a simulated clock; set "
            "cost.filtered_share to the share of groups that it refuses, such as 0.3"
        )
    _check_parts(config, ())
    _check_handed_over(config, schedule, config.cost.turns is not None)
    check_batch(config, schedule, placement)
    _check_pools(schedule, placement)
    check_memory(config, placement, schedule.transport)
    return JobPlan(placement, gpu=False, backend=backend, why=why)


def _check_communicators(config: JobConfig, schedule: Schedule, placement: Placement) -> list[Communicator]:
    found = communicators(
        placement,
        transport=schedule.transport,
        training_tensor_parallel=config.training.tensor_parallel,
        training_pipeline_parallel=config.training.pipeline_parallel,
        expert_parallel=config.training.expert_parallel,
        engine_tensor_parallel=config.engine.tensor_parallel,
        in_order=schedule.order == "fifo",
    )
    check_communicators(found, placement, schedule.transport)
    return found


def _check_pools(schedule: Schedule, placement: Placement) -> None:
    """Refuse roles that score beside an engine which keeps its device: no cost counts what its KV cache loses."""
    sharing = set(placement.roles_on(placement.devices["rollout"][0])) - {"rollout"}
    if sharing and not schedule.colocated:
        raise ConfigError(
            f"schedule.split gives rollout the devices of {', '.join(sorted(sharing))}, whose weights take room from "
            "the engine's KV cache: no simulation counts that; give rollout devices of its own, as in "
            "schedule.split.rollout=50%"
        )


def _check_scoring(config: JobConfig) -> None:
    if config.algorithm.train_on_old_log_probs and not config.algorithm.recompute_log_probs:
        raise ConfigError(
            f"algorithm.correction={config.algorithm.correction} needs the actor_fwd role, which scores samples under "
            "the proximal policy; "
            "set algorithm.recompute_log_probs=true, or algorithm.proximal=trainer or log_linear"
        )
    if config.algorithm.has_token_baseline and not config.algorithm.recompute_log_probs:
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage} is made of the probabilities that the actor_fwd role "
            "computes at every token; set algorithm.recompute_log_probs=true, or algorithm.advantage=opo"
        )


def _check_greedy_baseline(config: JobConfig) -> None:
    """The first response to a prompt can be drawn greedily, and its reward is what the others are compared with."""
    algorithm = config.algorithm
    if not algorithm.has_greedy_baseline:
        return
    where = f"algorithm.advantage={algorithm.advantage}"
    if config.task.generate is not None:
        raise ConfigError(
            f"{where} compares with a greedy response, and what task.generate={config.task.generate} does besides its "
            "turns is not greedy; choose algorithm.advantage=rloo, or leave task.generate out"
        )
    if algorithm.has_reward_kl:
        raise ConfigError(
            f"{where} compares with the reward of a greedy response, whose tokens were certain: they have no KL to the "
            f"reference, as algorithm.kl_in={algorithm.kl_in} needs; set algorithm.kl_in=loss"
        )


def _check_model(model: ModelConfig) -> None:
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.heads={model.heads} cannot share model.kv_heads={model.kv_heads}; make one a multiple of the other"
        )
    _check_experts(model)
    if bool(model.sliding_layers) != (model.sliding_window is not None) or model.sliding_layers > model.layers:
        raise ConfigError(
            f"model.sliding_layers={model.sliding_layers} and model.sliding_window={model.sliding_window} of "
            f"model.layers={model.layers}: give both or neither, and no more layers than there are"
        )


def _check_quantization(config: JobConfig) -> None:
    """Refuse 8 bits made of float32 weights, which no kernel computes with."""
    if is_fp8(config.engine) and (config.engine.options.get("dtype") or config.model.dtype) == "float32":
        raise ConfigError(
            "engine.quantization=fp8 is made of weights of 16 bits; set engine.dtype=bfloat16, or model.dtype=bfloat16"
        )


def _check_weights(model: ModelConfig) -> None:
    """Check that what a real run starts from is there, or can be made. Repositories are looked for, not downloaded."""
    if model.checkpoint is None:
        drawn = (*DRAWN, *DRAWN_WITH_EXPERTS)
        if model.architecture not in drawn:
            raise ConfigError(
                f"model.architecture={model.architecture}: weights can be drawn for {', '.join(drawn)} only; name a "
                "folder with weights as model.checkpoint"
            )
        return
    if model.checkpoint.startswith(HUB):  # its weights are checked when they are there: harness/driver/model_folders.py
        require_shape(model, read_config(local_folder(model.checkpoint, weights=False), model.checkpoint))
        return
    from engines.torch.model import check_weights

    check_weights(model)


def _check_parts(config: JobConfig, told: Collection[str]) -> None:
    """Refuse advantages by parts of scores that are not told, and what changes the rewards that these do not read."""
    algorithm = config.algorithm
    if algorithm.advantage == AlgorithmConfig.advantage:
        return
    from harness.rl.advantages import parts_compared

    parts = parts_compared(algorithm)
    if missing := [name for name in parts if name not in told]:
        raise ConfigError(
            f"algorithm.options.parts names {', '.join(missing)}; scores here have {', '.join(told) or 'no parts'}; "
            "declare what a reward returns besides as its `extra_metrics` (docs/plugins.md)"
        )
    if parts and (algorithm.shaping or algorithm.has_reward_kl):
        changed = "algorithm.shaping" if algorithm.shaping else "algorithm.kl_in=reward"
        raise ConfigError(
            f"{changed} changes rewards, which algorithm.advantage={algorithm.advantage} does not read; leave it out"
        )


def _check_compile(config: JobConfig, gpu: bool) -> None:
    """Refuse what torch 2.13 does not compile, and a machine without a compiler."""
    if not config.training.compile:
        return
    together = config.training.tensor_parallel
    for setting, why in {
        f"training.tensor_parallel={together}": "Inductor fails on layers that ranks share" if together > 1 else "",
        f"model.experts={config.model.experts}": "their sizes follow from data" if config.model.experts else "",
    }.items():
        if why:
            raise ConfigError(f"training.compile=true does not work with {setting}: {why}; set it to false")
    from engines.torch.model import require_compiler

    require_compiler(gpu)


def _check_top_p(top_p: float) -> None:
    """Refuse sampling from a nucleus, which gives log-probabilities under that nucleus: training would compare them
    with those of all tokens, and the nucleus of a newer policy may lack the token (docs/algorithms.md)."""
    if top_p < 1:
        raise ConfigError(
            f"algorithm.top_p={top_p} samples from part of the distribution that is trained, so that every ratio of "
            "the loss would be off; set algorithm.top_p=1 (temperature is accounted for)"
        )


def _check_lengths(config: JobConfig, task: Task) -> None:
    try:
        task.problem(0, config.seed_list[0])  # whatever it is made of has been read then
    except ValueError as error:
        raise ConfigError(f"task={config.task.name}: {error}") from error
    longest = task.max_prompt_tokens + max_tokens(config, task)
    if longest > config.model.max_length:
        left = config.model.max_length - task.max_prompt_tokens
        fix = f"set max_tokens={left} or less" if left > 0 else f"set model.max_length={longest}"
        raise ConfigError(
            f"max_tokens={max_tokens(config, task)} after prompts of up to {task.max_prompt_tokens} tokens exceeds "
            f"model.max_length={config.model.max_length}; {fix}"
        )
    if config.algorithm.shaping:
        from harness.rl.shaping import shaping_of

        shaping_of(config.algorithm, max_tokens(config, task))
    if config.eval.period:
        _check_evaluation(config, task)
    limit = config.training.tokens_per_micro_batch
    if limit is not None and limit < longest:
        raise ConfigError(
            f"training.tokens_per_micro_batch={limit} is less than the {longest} that a sample may have, prompt "
            f"and response; set it to {longest} or more, or lower max_tokens"
        )
    if task.vocabulary_size > config.model.vocabulary:
        raise ConfigError(
            f"model.vocabulary={config.model.vocabulary} is smaller than the {task.vocabulary_size} tokens of task "
            f"{config.task.name}; set model.vocabulary={task.vocabulary_size}"
        )


def _check_evaluation(config: JobConfig, task: Task) -> None:
    where = f"eval.every={config.eval.every}"
    if config.engine.keep_cache:
        raise ConfigError(
            f"{where} takes running samples out of their engines and puts them back, which keeps no cache of older "
            "weights; set engine.keep_cache=false"
        )
    try:
        task.held_out(0)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def settled_evaluation(config: JobConfig, task: Task | None) -> EvalConfig:
    """`eval` with a number for `every=auto`: a fifth of the run, of four versions at least, where the run is a result
    that was sampled and its task, which a simulated one lacks, holds problems out. An engine that keeps its cache is
    evaluated before the run and after it, when nothing runs that could lose one. Else 0."""
    if config.eval.every != "auto":
        return config.eval
    every = 0
    if task is not None and not config.smoke and config.replay is None and _holds_out(task):
        every = config.iterations if config.engine.keep_cache else max(4, math.ceil(config.iterations / 5))
    return replace(config.eval, every=every)


def _holds_out(task: Task) -> bool:
    try:
        task.held_out(0)
    except ValueError:
        return False
    return True


WEIGHTS_ALONE = Lengths(1, 1)
"""Lengths by which a machine has to hold the job whatever is sampled: before the task, which may read files."""


def lengths_of(config: JobConfig) -> Lengths:
    """The longest sample of its task. Raises ConfigError where the task cannot be made."""
    task = make_task(config)
    return Lengths(task.max_prompt_tokens, max_tokens(config, task))


def check_engine_devices(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    """Check that a real engine of several devices has them alone, or takes turns with a colocated schedule's ranks."""
    together = config.engine.tensor_parallel
    others = {role for device in placement.devices["rollout"] for role in placement.roles_on(device)} - {"rollout"}
    if together > 1 and others and not schedule.colocated:
        raise HardwareMissing(
            f"engine.tensor_parallel={together}: a real engine of several devices has them alone, or takes turns with "
            f"a colocated schedule, and schedule={config.schedule.name} has {' and '.join(sorted(others))} there; set "
            "it to 1, give rollout devices of its own, schedule=colocate_sync, or backend=virtual"
        )
    if schedule.colocated and schedule.in_rounds and config.cluster.serve_membership:
        raise ConfigError(
            f"cluster.serve_membership=true: engines of schedule={config.schedule.name} take their devices in one turn "
            "with the training ranks, so none can leave; set it to false"
        )
    if together > 1 and schedule.in_rounds:
        raise HardwareMissing(
            f"engine.tensor_parallel={together}: engines of schedule={config.schedule.name} take their devices in one "
            "turn with the training ranks, for now of one device each; set it to 1, schedule=colocate_sync, or "
            "backend=virtual"
        )


def _check_handed_over(config: JobConfig, schedule: Schedule, several_turns: bool) -> None:
    if schedule.lends and several_turns:
        raise ConfigError(
            f"schedule={config.schedule.name}: lent engines hand over what they have under way, and of samples with "
            "several turns the environment stays behind; use a task without one, or schedule=fully_async"
        )


def _check_experts(model: ModelConfig) -> None:
    if model.active_experts > model.experts or bool(model.experts) != bool(model.active_experts):
        fix = "set it to 0" if not model.experts else f"use 1 to {model.experts}"
        raise ConfigError(
            f"model.active_experts={model.active_experts} cannot be chosen of model.experts={model.experts}; {fix}"
        )


def _check_replay(config: JobConfig, gpu: bool) -> None:
    """Check that the engine tells which experts it chose, where these are replayed."""
    engine = config.engine.name
    gives = getattr(described_engine(engine), "GIVES_ROUTES", False)
    if config.replays_routing and not (gives is True or (gives and gpu)):
        missing, but = (HardwareMissing, f" but {gives}") if gives else (ConfigError, "")
        raise missing(
            f"training.routing_replay=true: engine={engine} does not tell which experts it chose{but}; use "
            "engine=torch, or set it to false"
        )


def only_simulated(config: JobConfig) -> str | None:
    """The reason why this job cannot run for real, whatever the machine."""
    together, engine = config.engine.tensor_parallel, config.engine.name
    if together > 1 and not engine_takes_several_devices(engine):
        able = " or ".join(f"engine={name}" for name in ENGINES if engine_takes_several_devices(name))
        return (
            f"engine.tensor_parallel={together} can be simulated only with engine={engine}, whose engines have one "
            f"device each; set it to 1, {able}, or backend=virtual"
        )
    cannot: str | None = getattr(described_engine(engine), "cannot_serve", lambda model: None)(config.model)
    if cannot is not None:
        return cannot
    described, architecture = described_engine(config.training.engine, "training.engine"), config.model.architecture
    refused: str | None = getattr(described, "refusal", lambda config: None)(config)
    if refused is not None:
        return refused
    if config.model.experts and architecture not in WITH_EXPERTS:
        return (
            f"model.experts={config.model.experts}: experts of model.architecture={architecture} can be simulated "
            f"only, real ones are those of {', '.join(WITH_EXPERTS)}; use such a model, or backend=virtual"
        )
    return None


def check_adapters(config: JobConfig) -> None:
    """Check rank and targets, and refuse what is not built for adapters."""
    training, model = config.training, config.model
    where = f"training.lora_rank={training.lora_rank}"
    if not training.lora_rank:
        return
    if training.lora_rank > model.hidden:
        raise ConfigError(
            f"{where} is more than model.hidden={model.hidden}, beyond which a rank adds nothing; set it to "
            f"{model.hidden} or less, such as 8"
        )
    layers = linear_layers(model)
    if unknown := [name for name in training.lora_targets if name not in layers]:
        raise ConfigError(
            f"training.lora_targets names {', '.join(unknown)}; linear layers of model={model.name} are "
            f"{', '.join(layers)}"
        )
    if len(set(training.lora_targets)) < len(training.lora_targets):
        raise ConfigError(f"training.lora_targets={training.lora_targets} names a layer twice; name each once")
    refused = {
        f"training.tensor_parallel={training.tensor_parallel}": training.tensor_parallel > 1,
        f"training.pipeline_parallel={training.pipeline_parallel}": training.pipeline_parallel > 1,
        f"training.expert_parallel={training.expert_parallel}": training.expert_parallel > 1,
        "cluster.delta_weights=true": config.cluster.delta_weights,
    }
    engine = described_engine(config.engine.name)
    if not getattr(engine, "reads_files", lambda: True)():
        raise ConfigError(
            f"{where}: servers of engine={config.engine.name} that run already have files of their own, which adapters "
            "cannot be merged into here; have them started for the job (docs/engines.md), or set training.lora_rank=0"
        )
    for setting, is_set in refused.items():
        if is_set:
            off = "false" if setting.endswith("true") else "1"
            raise ConfigError(f"{where} is not built for {setting}; set that to {off}, or training.lora_rank=0")
