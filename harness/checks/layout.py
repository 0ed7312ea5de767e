"""Whether devices divide into engines and ranks, layers over devices, and a batch into what ranks and steps train on.
Raises ConfigError: the value and the fix."""

import math

from harness.checks.plugins import looks_at_whole_batches
from harness.config import AlgorithmConfig, ConfigError, JobConfig
from harness.config.fields import MOST_DEVICES
from harness.config.placement import DEVICE_ROLES, ENGINE_ROLES, Placement, devices_of, resolve_split
from harness.runtime.messages import BYTES_OF_A_SAMPLE, FRAME_LIMIT
from schedules import Schedule
from schedules.capacity import Capacity


def device_roles(config: JobConfig) -> tuple[str, ...]:
    """The device roles of this job: reference, actor_fwd, critic if they are read, lent engines if split so."""
    absent = {"lent"} - config.schedule.split.keys()
    if not config.algorithm.has_reference:
        absent.add("reference")
    if not config.algorithm.recompute_log_probs:
        absent.add("actor_fwd")
    if not config.algorithm.has_critic:
        absent.add("critic")
    return tuple(role for role in DEVICE_ROLES if role not in absent)


def training_ranks(config: JobConfig, placement: Placement, role: str = "actor") -> int:
    """Data-parallel ranks of a role that trains: each does on its own part of a batch."""
    return len(placement.devices[role]) // config.training.ranks_together


def capacity_rows(config: JobConfig, schedule: Schedule) -> int:
    """The queue's cap, in samples: what admission can be ahead of training, in whole batches (docs/schedules.md). In
    completion order a group may be trained, or dropped, ceil(eta) iterations after its batch, and holds the batch's
    rows as long; what is admitted instead of dropped groups comes on top. A dropped sample that still runs may hold its
    batch longer: then admission waits for it."""
    algorithm = config.algorithm
    ahead = Capacity(algorithm.batch_groups, schedule.eta).worst_lag
    batches = ahead + 1 if schedule.order == "fifo" else 3 * ahead + 3
    return algorithm.admitted_groups * algorithm.group_size * batches


def check_layout(config: JobConfig, schedule: Schedule) -> Placement:
    """Return where roles go. Raises ConfigError unless devices make whole engines and ranks, and divide layers."""
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    _check_lent(config, schedule, placement)
    _check_engines(config, schedule, placement)
    _check_ranks(config, placement)
    _check_expert_ranks(config, placement)
    return placement


def _check_lent(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    """Check that engines are on training devices where the schedule lends these, and nowhere else."""
    if schedule.lends == placement.share("lent", "actor") and schedule.lends == ("lent" in placement.devices):
        return
    does, fix = ("lends training devices", "set it to actor") if schedule.lends else ("lends none", "leave it out")
    raise ConfigError(
        f"schedule.split.lent={config.schedule.split.get('lent')}: schedule={config.schedule.name} {does}; {fix}"
    )


def _check_engines(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    together, devices = config.engine.tensor_parallel, len(placement.devices["rollout"])
    model = config.model
    shared = {f"{role} devices": len(placement.devices[role]) for role in ENGINE_ROLES if role in placement.devices}
    shared |= {"model.heads": model.heads, "model.ff": model.ff}
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
    fix = f"set schedule.split.rollout={needed}" if enough is None else f"set cluster.devices={enough}"
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
        "model.vocabulary": model.vocabulary,
        **({"model.experts": model.experts} if model.experts else {"model.ff": model.ff}),
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
    tensor = config.training.tensor_parallel
    what = "model.experts" if tensor == 1 else f"experts of a rank of training.tensor_parallel={tensor}"
    shared = {"data-parallel ranks": training_ranks(config, placement), what: model.experts // tensor}
    if "critic" in placement.devices:
        shared["data-parallel ranks of the critic"] = training_ranks(config, placement, "critic")
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


def check_batch(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    """Raises ConfigError where a batch does not divide into mini-batches, ranks and micro-batches."""
    algorithm, world = config.algorithm, training_ranks(config, placement)
    if algorithm.batch_groups % algorithm.mini_batches:
        fits = [parts for parts in range(1, algorithm.batch_groups + 1) if algorithm.batch_groups % parts == 0]
        raise ConfigError(
            f"algorithm.mini_batches={algorithm.mini_batches} does not cut algorithm.batch_groups="
            f"{algorithm.batch_groups} into equal parts of whole groups; set it to one of {', '.join(map(str, fits))}"
        )
    if looks_at_whole_batches(algorithm):
        _check_whole_batch(config, schedule, world)
    _check_reports(algorithm)
    _check_micro_batches(config, world, "training")
    if algorithm.has_critic:
        _check_micro_batches(config, training_ranks(config, placement, "critic"), "critic")
        if schedule.order != "fifo":
            raise ConfigError(
                f"algorithm.advantage={algorithm.advantage}: the critic trains on the groups of the actor's batch, and "
                f"with schedule.order={schedule.order} these are not known before; set schedule.order=fifo"
            )
    if algorithm.spare_groups:
        _check_over_sampling(config, schedule)
    if config.engine.slots < algorithm.group_size:
        raise ConfigError(
            f"engine.slots={config.engine.slots} is less than algorithm.group_size={algorithm.group_size}; "
            f"set engine.slots={algorithm.group_size} or more"
        )


def _check_reports(algorithm: AlgorithmConfig) -> None:
    """Check that what is told of each sample of an iteration, trained or refused, fits into a message."""
    samples = algorithm.admitted_groups * algorithm.group_size * (algorithm.filter_rounds if algorithm.filters else 1)
    most = FRAME_LIMIT // BYTES_OF_A_SAMPLE
    if samples > most:
        rounds = f" in algorithm.filter_rounds={algorithm.filter_rounds}" if algorithm.filters else ""
        raise ConfigError(
            f"algorithm.batch_groups={algorithm.batch_groups} of algorithm.group_size={algorithm.group_size}{rounds} "
            f"make up to {samples:,} samples an iteration, more than the {most:,} that a message tells of"
        )


def _check_over_sampling(config: JobConfig, schedule: Schedule) -> None:
    """Check a job that admits more groups than are trained: something refuses groups, and batches are known before."""
    where = f"algorithm.over_sampling={config.algorithm.over_sampling}"
    if not config.refills:
        raise ConfigError(
            f"{where} admits spares for groups that are refused, and none is; set "
            "algorithm.filter=zero_variance, or algorithm.over_sampling=1"
        )
    if schedule.order != "fifo":
        raise ConfigError(
            f"{where} fills batches that wait for their groups, and with schedule.order={schedule.order} none does: "
            "others are trained meanwhile; set algorithm.over_sampling=1, or schedule.order=fifo"
        )


def _check_micro_batches(config: JobConfig, world: int, ranks: str) -> None:
    """Check the micro-batches of a world of so many ranks, called so."""
    algorithm = config.algorithm
    groups = algorithm.mini_batch_groups
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
    """Check a loss that compares all tokens of a batch with each other."""
    algorithm = config.algorithm
    groups = algorithm.mini_batch_groups
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
