"""Everything that can be known before a job starts to be impossible. Raises ConfigError: the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil

from engines import ENGINES
from harness.config import Backend, ConfigError, JobConfig, ModelConfig
from harness.config.changes import as_arguments, changed
from harness.config.checks.plugins import (
    check_environment,
    check_plugins,
    engine_options,
    engine_takes_several_devices,
    planned_options,
)
from harness.config.communicators import Communicator, check_communicators, communicators
from harness.config.job import WHOLE_BATCH
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
from harness.config.placement import DEVICE_ROLES, Placement, resolve_split
from harness.config.plugins import is_path
from harness.cost_model.engine_memory import EngineMemory
from harness.cost_model.engine_share import EngineShare, engine_share
from harness.cost_model.job_cost import check_memory, too_much
from harness.cost_model.memory_plan import USABLE, Lengths, Setting, plan_memory
from harness.tasks import TASKS, Task, make_task, max_tokens
from schedules import Schedule

_GIB = 1 << 30


class HardwareMissing(ConfigError):
    """The job is sound, and cannot run for real here."""


@dataclass(frozen=True)
class JobPlan:
    """A job that can run: where its roles go, and on what. `why`: what made it a simulation, where nobody asked."""

    placement: Placement
    gpu: bool
    backend: Backend = "real"
    why: str = ""
    share: EngineShare | None = None
    """Of a device's memory, that a rollout engine may take; of a real job."""


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


def plan_job(config: JobConfig, schedule: Schedule, machine: Machine) -> JobPlan:
    """Check the job against itself, and where it is to run for real against this machine.

    backend=auto runs for real where this machine can hold the job, and is a simulation otherwise.
    """
    placement, groups = _check_itself(config, schedule)
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
    """As `plan_job` with backend=real, for another machine: neither what is installed on this one nor what it has of
    the hub is asked for."""
    config = without_hub(config)
    return _real(config, schedule, *_check_itself(config, schedule), machine)


def without_hub(config: JobConfig) -> JobConfig:
    """The same sizes without the weights and the tokenizer of a repository, which nothing is read from."""
    checkpoint = config.model.checkpoint
    if checkpoint is None or not checkpoint.startswith(HUB):
        return config
    return replace(config, model=replace(config.model, checkpoint=None))


def _check_itself(config: JobConfig, schedule: Schedule) -> tuple[Placement, list[Communicator]]:
    if config.checkpoint.every:
        _check_checkpoints(config)
    _check_names(config)
    engine_options(config)
    check_plugins(config, schedule)
    _check_model(config.model)
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    check_layout(config, schedule, placement)
    return placement, _check_communicators(config, schedule, placement)


def _real(
    config: JobConfig, schedule: Schedule, placement: Placement, groups: Sequence[Communicator], machine: Machine
) -> JobPlan:
    """Raises HardwareMissing for what another machine, or a simulation, could do."""
    gpu = machine.gpus > 0 if config.cluster.kind == "auto" else config.cluster.kind == "gpu"
    _check_computable(config)
    _check_engine_alone(config, placement)
    _check_devices(config, schedule, placement, machine, gpu)
    _check_instances(groups, machine, gpu)
    _check_nodes(schedule, placement, machine, gpu)
    _check_memory(config, schedule, placement, machine, gpu, WEIGHTS_ALONE)
    _check_memory(config, schedule, placement, machine, gpu, lengths_of(config))
    _check_weights(config.model)
    _check_lengths(config)
    _check_top_p(config.algorithm.top_p)
    _check_batch(config, schedule, placement)
    share = share_of_engines(config, schedule, placement, machine, gpu)
    planned_options(config, share)
    return JobPlan(placement, gpu, share=share)


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
    _check_batch(config, schedule, placement)
    _check_pools(schedule, placement)
    check_memory(config, placement)
    return JobPlan(placement, gpu=False, backend=backend, why=why)


def _check_communicators(config: JobConfig, schedule: Schedule, placement: Placement) -> list[Communicator]:
    transport = "local" if schedule.colocated else schedule.transport
    found = communicators(
        placement,
        transport=transport,
        training_tensor_parallel=config.training.tensor_parallel,
        engine_tensor_parallel=config.engine.tensor_parallel,
        in_order=schedule.order == "fifo",
    )
    check_communicators(found, placement, transport)
    return found


def _check_instances(groups: Sequence[Communicator], machine: Machine, gpu: bool) -> None:
    """NCCL knows a device by its bus, which instances of one GPU share."""
    joined = [group.name for group in groups if group.over == "device"]
    if gpu and machine.divided and joined:
        raise HardwareMissing(
            f"this machine's devices are instances of divided GPUs (MIG), which NCCL joins to no group, and the job "
            f"has {', '.join(map(repr, joined))}; use SCHEDULE=colocate_sync DEVICES=1, or name GPUs that are not "
            "divided in CUDA_VISIBLE_DEVICES"
        )


def _check_nodes(schedule: Schedule, placement: Placement, machine: Machine, gpu: bool) -> None:
    """What processes share by a path or a handle stays on their host."""
    per_node = machine.gpus // machine.nodes
    if gpu and schedule.transport == "ipc" and placement.total > per_node:
        raise HardwareMissing(
            f"transport=ipc shares memory inside of one host, and {placement.total} devices stand in "
            f"{machine.nodes} nodes of {per_node}; set DEVICES={per_node}, or give the schedule transport = "
            '"collective"'
        )


def _check_pools(schedule: Schedule, placement: Placement) -> None:
    """What scores beside an engine that keeps its device takes memory from its KV cache, which no cost counts."""
    sharing = set(placement.roles_on(placement.devices["rollout"][0])) - {"rollout"}
    if sharing and not schedule.colocated:
        raise ConfigError(
            f"schedule.split gives rollout the devices of {', '.join(sorted(sharing))}, whose weights take room from "
            "the engine's KV cache: no simulation counts that; give rollout devices of its own, as in "
            "schedule.split.rollout=50%"
        )


def _check_names(config: JobConfig) -> None:
    for setting, value, known in (
        ("engine.name", config.engine.name, ENGINES),
        ("task.name", config.task.name, TASKS),
    ):
        if value not in known and not is_path(value):
            raise ConfigError(f"{setting}={value} is unknown; choose one of {', '.join(known)}")
    if config.algorithm.train_on_old_log_probs and not config.algorithm.recompute_log_probs:
        raise ConfigError(
            "algorithm.correction=decoupled needs the actor_fwd role, which scores samples under the proximal policy; "
            "set algorithm.recompute_log_probs=true, or algorithm.proximal=trainer or log_linear"
        )


def _check_model(model: ModelConfig) -> None:
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.heads={model.heads} cannot share model.kv_heads={model.kv_heads}; make one a multiple of the other"
        )
    check_experts(model)
    if bool(model.sliding_layers) != (model.sliding_window is not None) or model.sliding_layers > model.layers:
        raise ConfigError(
            f"model.sliding_layers={model.sliding_layers} and model.sliding_window={model.sliding_window} of "
            f"model.layers={model.layers}: give both or neither, and no more layers than there are"
        )


def _check_weights(model: ModelConfig) -> None:
    """What a real run starts from is there, or can be made. Repositories of the hub are looked for, not downloaded."""
    if model.checkpoint is None:
        drawn = (*DRAWN, *DRAWN_WITH_EXPERTS)
        if model.architecture not in drawn:
            raise ConfigError(
                f"model.architecture={model.architecture}: weights can be drawn for {', '.join(drawn)} only; name a "
                "folder with weights as model.checkpoint"
            )
        return
    require_shape(
        model,
        read_config(local_folder(model.checkpoint, weights=not model.checkpoint.startswith(HUB)), model.checkpoint),
    )


def _check_top_p(top_p: float) -> None:
    """What was drawn from a nucleus has log-probabilities under that nucleus: training would compare them with those
    of all tokens, and the nucleus of a newer policy may lack the token (docs/algorithms.md)."""
    if top_p < 1:
        raise ConfigError(
            f"algorithm.top_p={top_p} samples from part of the distribution that is trained, so that every ratio of "
            "the loss would be off; set algorithm.top_p=1 (temperature is accounted for)"
        )


def _check_batch(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    algorithm, world = config.algorithm, training_ranks(config, placement)
    if algorithm.batch_groups % algorithm.mini_batches:
        fits = [parts for parts in range(1, algorithm.batch_groups + 1) if algorithm.batch_groups % parts == 0]
        raise ConfigError(
            f"algorithm.mini_batches={algorithm.mini_batches} does not cut algorithm.batch_groups="
            f"{algorithm.batch_groups} into equal parts of whole groups; set it to one of {', '.join(map(str, fits))}"
        )
    _check_micro_batches(config, world, "training")
    if algorithm.has_critic:
        _check_micro_batches(config, training_ranks(config, placement, "critic"), "critic")
        if schedule.order != "fifo":
            raise ConfigError(
                f"algorithm.advantage={algorithm.advantage}: the critic trains on the groups of the actor's batch, and "
                f"with schedule.order={schedule.order} these are not known before; set schedule.order=fifo"
            )
    if algorithm.correction in WHOLE_BATCH:
        _check_whole_batch(config, schedule, world)
    if config.engine.slots < algorithm.group_size:
        raise ConfigError(
            f"engine.slots={config.engine.slots} is less than algorithm.group_size={algorithm.group_size}; "
            f"set engine.slots={algorithm.group_size} or more"
        )


def _check_micro_batches(config: JobConfig, world: int, ranks: str) -> None:
    """Of a world of so many ranks, called so."""
    algorithm = config.algorithm
    groups = algorithm.batch_groups // algorithm.mini_batches
    if groups % (algorithm.micro_batch_groups * world):
        fits = [size for size in range(1, groups + 1) if groups % (size * world) == 0]
        parts = "" if algorithm.mini_batches == 1 else f" in algorithm.mini_batches={algorithm.mini_batches}"
        fix = (
            f"set algorithm.micro_batch_groups to one of {', '.join(map(str, fits))}"
            if fits
            else f"make algorithm.batch_groups a multiple of {world * algorithm.mini_batches}"
        )
        raise ConfigError(
            f"algorithm.batch_groups={algorithm.batch_groups}{parts} does not divide into micro-batches of "
            f"{algorithm.micro_batch_groups} groups on {world} {ranks} rank{'s' if world > 1 else ''}; {fix}"
        )


def _check_whole_batch(config: JobConfig, schedule: Schedule, world: int) -> None:
    """For a loss that compares all tokens of a batch with each other."""
    algorithm = config.algorithm
    groups = algorithm.batch_groups // algorithm.mini_batches
    what = "a whole batch" if algorithm.mini_batches == 1 else "a whole mini-batch"
    where = f"algorithm.correction={algorithm.correction} looks at {what}"
    if world > 1:
        raise ConfigError(f"{where}, which {world} training ranks share; train on one device, or choose another")
    if schedule.order != "fifo":
        raise ConfigError(
            f"{where}, and schedule.order={schedule.order} trains what is complete; set it to fifo, or choose another"
        )
    if algorithm.micro_batch_groups < groups:
        raise ConfigError(
            f"{where}, and micro-batches have algorithm.micro_batch_groups={algorithm.micro_batch_groups} groups of "
            f"{groups}; set it to {groups}"
        )
    if config.training.tokens_per_micro_batch is not None:
        raise ConfigError(
            f"{where}, which training.tokens_per_micro_batch={config.training.tokens_per_micro_batch} may cut; "
            "set it to null"
        )


def _check_lengths(config: JobConfig) -> None:
    task = make_task(config)
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
    if config.eval.every:
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


def _check_checkpoints(config: JobConfig) -> None:
    """What a checkpoint would not have."""
    where, fix = f"checkpoint.every={config.checkpoint.every}", "or set checkpoint.every=0"
    if config.algorithm.filters:
        raise ConfigError(f"{where} keeps nothing of groups that a filter refused; set algorithm.filter=none, {fix}")
    if config.task.buffer is not None:
        raise ConfigError(
            f"{where} keeps nothing of what task.buffer={config.task.buffer} was told; leave out task.buffer, {fix}"
        )
    if config.algorithm.kl_target is not None:
        raise ConfigError(
            f"{where} does not keep the coefficient that algorithm.kl_target={config.algorithm.kl_target} has found; "
            f"set algorithm.kl_target=null, {fix}"
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


WEIGHTS_ALONE = Lengths(1, 1)
"""What a machine has to hold whatever is sampled: asked before the task is, which may read files."""


def lengths_of(config: JobConfig) -> Lengths:
    """The longest sample of its task. Raises ConfigError where the task cannot be made."""
    task = make_task(config)
    return Lengths(task.max_prompt_tokens, max_tokens(config, task))


def _check_computable(config: JobConfig) -> None:
    refused = only_simulated(config)
    if refused is not None:
        raise HardwareMissing(refused)


def _check_engine_alone(config: JobConfig, placement: Placement) -> None:
    together = config.engine.tensor_parallel
    others = {role for device in placement.devices["rollout"] for role in placement.roles_on(device)} - {"rollout"}
    if together > 1 and others:
        raise HardwareMissing(
            f"engine.tensor_parallel={together}: a real engine of several devices shares them with no other role, and "
            f"schedule={config.schedule.name} has {' and '.join(sorted(others))} there; set it to 1, give rollout "
            "devices of its own (SCHEDULE=separated_sync), or BACKEND=virtual"
        )


def _check_devices(config: JobConfig, schedule: Schedule, placement: Placement, machine: Machine, gpu: bool) -> None:
    needed, threads = placement.total, config.cluster.threads_per_device
    there = machine.gpus if gpu else machine.cores // threads
    if needed <= there or (config.cluster.oversubscribe and not gpu):
        return
    if gpu and not there:
        raise ConfigError("cluster.kind=gpu: this machine has no GPU; set cluster.kind=cpu")
    fixes = [f"set DEVICES={there}"] if _fits(config, there) else []
    if gpu and there == 1 and not schedule.colocated:
        fixes.append("SCHEDULE=colocate_sync, whose roles take turns on one")
    fixes.append('ARGS="cluster.kind=cpu" to use cores' if gpu else 'ARGS="cluster.oversubscribe=true" to share cores')
    kind = _count(there, "GPU") if gpu else _count(machine.cores, "core")
    each = f" of {threads} threads" if threads > 1 and not gpu else ""
    raise HardwareMissing(
        f"the job needs {_count(needed, 'device')}{each}, this machine has {kind}; {', or '.join(fixes)}"
    )


def _fits(config: JobConfig, devices: int) -> bool:
    """Whether the split can be made over this many devices, so that the advice to use so many is sound."""
    try:
        return devices > 0 and resolve_split(config.schedule.split, devices, device_roles(config)).total <= devices
    except ConfigError:
        return False


def _check_memory(
    config: JobConfig, schedule: Schedule, placement: Placement, machine: Machine, gpu: bool, lengths: Lengths
) -> None:
    """GPUs each hold what is on them; devices of a CPU job hold it together."""
    setting = real_setting(config, schedule, machine, lengths, gpu=gpu)
    plan = plan_memory(config, placement, setting)
    if plan.fits if gpu else plan.everything <= setting.device_bytes:
        return
    if gpu:
        found = changes_that_fit(config, schedule, machine, lengths)
        fix = f"{', or '.join(found)}, BACKEND=virtual to simulate it" if found else "BACKEND=virtual simulates it"
        raise HardwareMissing(
            f"{too_much(config, plan, plan.fullest)} of the {machine.gpu_bytes / _GIB:.1f} GiB of a GPU here; "
            f"use {fix}, or MODEL=tiny"
        )
    raise HardwareMissing(
        f"model={config.model.name} needs {plan.everything / _GIB:.1f} GiB for its training state, its activations and "
        f"the copies of its weights, and there is no GPU and {setting.device_bytes / _GIB:.1f} GiB of memory here; "
        "use more or larger GPUs, BACKEND=virtual to simulate it, or MODEL=tiny"
    )


def share_of_engines(
    config: JobConfig, schedule: Schedule, placement: Placement, machine: Machine, gpu: bool
) -> EngineShare:
    """Of a job that this machine holds."""
    setting = real_setting(config, schedule, machine, lengths_of(config), gpu=gpu)
    token = EngineMemory(config.model, config.engine, setting.lengths.sample).token
    return engine_share(plan_memory(config, placement, setting), setting, token)


def real_setting(config: JobConfig, schedule: Schedule, machine: Machine, lengths: Lengths, *, gpu: bool) -> Setting:
    """Of this machine. device_bytes: of a GPU; without GPUs of all devices together, of which all may be used."""
    given = config.cluster.memory_gib
    if gpu:
        here = float(machine.gpu_bytes) if given is None else given * _GIB
    else:
        here = psutil.virtual_memory().total if given is None else given * _GIB * config.cluster.devices
    return Setting(lengths, here, schedule.transport, gpu=gpu, usable=USABLE if gpu else 1.0)


def changes_that_fit(config: JobConfig, schedule: Schedule, machine: Machine, lengths: Lengths) -> list[str]:
    """Settings under which the GPUs hold the job, each by itself or with those before it."""
    found: list[str] = []
    tries: tuple[dict[str, Any], ...] = (
        {"training.recompute_activations": True},
        {"training.tokens_per_micro_batch": lengths.sample},
        {"training.recompute_activations": True, "training.tokens_per_micro_batch": lengths.sample},
        {"training.optimizer_offload": "between_phases"},
        {"training.optimizer_offload": "always"},
        {
            "training.optimizer_offload": "always",
            "training.recompute_activations": True,
            "training.tokens_per_micro_batch": lengths.sample,
        },
        {"algorithm.reference": False, "algorithm.kl_coef": 0.0},
        {"engine.slots": config.algorithm.group_size},
        *({"cluster.devices": devices} for devices in range(config.cluster.devices + 1, 65)),
    )
    for settings in tries:
        other = changed(config, settings)
        if other == config:
            continue
        try:
            placement = resolve_split(other.schedule.split, other.cluster.devices, device_roles(other))
            check_layout(other, schedule, placement)
        except ConfigError:
            continue
        setting = real_setting(other, schedule, machine, lengths, gpu=True)
        if plan_memory(other, placement, setting).fits:
            found.append(as_arguments(settings))
            if "cluster.devices" in settings:
                break
    return found[:3]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_layout(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    """Devices divide into engines and ranks, and layers over devices."""
    _check_engines(config, schedule, placement)
    _check_ranks(config, placement)
    _check_expert_ranks(config, placement)


def training_ranks(config: JobConfig, placement: Placement, role: str = "actor") -> int:
    """Data-parallel ranks of a role that trains: each does on its own part of a batch."""
    return len(placement.devices[role]) // _rank_devices(config)


def check_experts(model: ModelConfig) -> None:
    if model.active_experts > model.experts or bool(model.experts) != bool(model.active_experts):
        fix = "set it to 0" if not model.experts else f"use 1 to {model.experts}"
        raise ConfigError(
            f"model.active_experts={model.active_experts} cannot be chosen of model.experts={model.experts}; {fix}"
        )


def only_simulated(config: JobConfig) -> str | None:
    """What keeps this job from running for real, whatever the machine."""
    together, engine = config.engine.tensor_parallel, config.engine.name
    if together > 1 and not engine_takes_several_devices(engine):
        able = " or ".join(f"ENGINE={name}" for name in ENGINES if engine_takes_several_devices(name))
        return (
            f"engine.tensor_parallel={together} can be simulated only with engine={engine}, whose engines have one "
            f"device each; set it to 1, {able}, or BACKEND=virtual"
        )
    settings = {
        "training.pipeline_parallel": (config.training.pipeline_parallel, 1),
        "training.expert_parallel": (config.training.expert_parallel, 1),
    }
    architecture = config.model.architecture
    if config.training.tensor_parallel > 1 and architecture not in DRAWN:
        return (
            f"training.tensor_parallel={config.training.tensor_parallel}: layers of model.architecture={architecture} "
            f"can be shared in simulation only, real ones are those of {', '.join(DRAWN)}; set it to 1, or "
            "BACKEND=virtual"
        )
    if config.model.experts and architecture not in WITH_EXPERTS:
        return (
            f"model.experts={config.model.experts}: experts of model.architecture={architecture} can be simulated "
            f"only, real ones are those of {', '.join(WITH_EXPERTS)}; use such a model, or BACKEND=virtual"
        )
    for setting, (value, most) in settings.items():
        if value > most:
            return f"{setting}={value} can be simulated only; set it to {most}, or BACKEND=virtual"
    return None


def _rank_devices(config: JobConfig) -> int:
    return config.training.tensor_parallel * config.training.pipeline_parallel


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
    more = range(there + 1, 64 * needed + there)
    enough = next((n for n in more if len(resolve_split(split, n, roles).devices["rollout"]) >= needed), None)
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
            fits = [n for n in range(1, min(shared.values()) + 1) if all(value % n == 0 for value in shared.values())]
            raise ConfigError(
                f"{setting}={together} does not divide the {number} {what}; set it to {' or '.join(map(str, fits))}"
            )
