"""Settings that nobody gave, chosen so that the job runs on the GPUs that are there: devices, the split, micro-batches
and their layout, recomputation, where the optimizer's moments rest, slots, buckets of weights, bytes of logits. What
the user says stays; without GPUs everything stays but micro-batches that do not divide a batch."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from harness.checks.job import (
    WEIGHTS_ALONE,
    JobPlan,
    check_engine_devices,
    lengths_of,
    only_simulated,
    plan_elsewhere,
    without_hub,
)
from harness.checks.layout import check_layout, device_roles, training_ranks
from harness.checks.machine import real_setting
from harness.checks.plugins import looks_at_whole_batches
from harness.config import ConfigError, JobConfig, RooflineConfig
from harness.config.compose import as_arguments, changed
from harness.config.machine import Machine
from harness.config.model_folder import DRAWN, DRAWN_WITH_EXPERTS
from harness.config.placement import Placement, resolve_split
from harness.cost_model.job_cost import longest_sample
from harness.cost_model.memory_plan import GIB, Lengths, MemoryPlan, plan_memory
from harness.cost_model.transfer import bucket_sizes
from schedules import Schedule

MICRO_BATCH = "algorithm.micro_batch_groups"
TOKENS = "training.tokens_per_micro_batch"
RECOMPUTE = "training.recompute_activations"
OFFLOAD = "training.optimizer_offload"
SLOTS = "engine.slots"
SPLIT = "schedule.split"
LAYOUT = "training.layout"
LOGITS = "training.logit_bytes"
BUCKETS = "cluster.bucket_bytes"

FITTED = (
    "cluster.devices",
    f"{SPLIT}.rollout",
    MICRO_BATCH,
    TOKENS,
    RECOMPUTE,
    OFFLOAD,
    SLOTS,
    LAYOUT,
    LOGITS,
    BUCKETS,
)
"""Settings that are chosen here: where all of them are given, nothing is."""

_LOGITS = 1 / 128
"""Share of a GPU's memory for logits that exist at a time; what depends on them takes some six times as much."""

_TOKENS = (65536, 32768, 16384, 8192, 4096)


@dataclass(frozen=True)
class FittedJob:
    """A job fitted to a machine. settings: chosen, by their path, for what `chosen_for` says; empty where none was."""

    config: JobConfig
    settings: Mapping[str, Any]
    chosen_for: str = "these GPUs"

    @property
    def messages(self) -> tuple[str, ...]:
        """Lines for the user."""
        return (f"Chosen for {self.chosen_for}: {as_arguments(self.settings)}",) if self.settings else ()


def fit_to_gpus(config: JobConfig, schedule: Schedule, given: Collection[str], machine: Machine) -> FittedJob:
    """The job with settings under which these GPUs hold it, as near to its own as can be. Where none is found, those
    that need least are taken, and the check at the door says what is missing. Raises ConfigError where its task cannot
    be made."""
    wanted = config.backend in ("auto", "real") and config.cluster.kind != "cpu"
    if not machine.gpus or not wanted or only_simulated(config) is not None:
        return _with_micro_batches(config, schedule, given)
    chosen: dict[str, Any] = {}
    if not {"cluster", "cluster.devices"} & set(given) and config.cluster.devices != machine.gpus:
        chosen["cluster.devices"] = machine.gpus
    chosen |= _by_device(config, given, machine)
    base = changed(config, chosen)
    if not any(True for _ in _splits(base, schedule, given)):
        return FittedJob(config, {})  # which says what it needs, by its own devices
    if not leanest(base, schedule, given, machine, WEIGHTS_ALONE)[1]:
        return FittedJob(base, chosen)
    settings, _ = leanest(base, schedule, given, machine, lengths_of(config))
    if not {"cluster", BUCKETS} & set(given):
        settings |= _buckets(changed(base, settings), schedule, machine)
    return FittedJob(changed(base, settings), chosen | settings)


def _by_device(config: JobConfig, given: Collection[str], machine: Machine) -> dict[str, Any]:
    """Settings that change the last bits of a result: by GPU and model alone, so that every schedule computes alike.
    Rows without padding, where attention has a kernel for them; logits by the power of two below their share."""
    model, training, there = config.model, config.training, config.cluster.memory_gib
    packs = model.dtype != "float32" and model.architecture in (*DRAWN, *DRAWN_WITH_EXPERTS)
    share = int(_LOGITS * (machine.gpu_bytes if there is None else there * GIB))
    wanted: dict[str, tuple[Any, Any]] = {
        LAYOUT: (training.layout, "packed" if packs else training.layout),
        LOGITS: (training.logit_bytes, max(training.logit_bytes, 1 << (share.bit_length() - 1))),
    }
    return {name: new for name, (now, new) in wanted.items() if new != now and not {"training", name} & set(given)}


def _with_micro_batches(config: JobConfig, schedule: Schedule, given: Collection[str]) -> FittedJob:
    """The job with micro-batches that divide a batch, where its own do not; nothing else depends on no GPU."""
    placement = _placement(config, schedule)
    groups = None if placement is None else _micro_batches(config, placement, given)
    if groups is None or groups == config.algorithm.micro_batch_groups:
        return FittedJob(config, {})
    settings = {MICRO_BATCH: groups}
    return FittedJob(changed(config, settings), settings, chosen_for="equal micro-batches")


def plan_fitted(config: JobConfig, schedule: Schedule, given: Collection[str], machine: Machine) -> JobPlan:
    """The door that `make bench BACKEND=real` has on another machine, after what nobody gave is chosen for it. Raises
    ConfigError where it does not open."""
    check_engine_devices(config, schedule, check_layout(config, schedule))  # nothing that is chosen changes it
    return plan_elsewhere(_fitted(config, schedule, given, machine), schedule, machine)


def holds_fitted(config: JobConfig, schedule: Schedule, given: Collection[str], machine: Machine) -> bool:
    """Whether that machine has the memory of a real run of the job. Raises ConfigError where devices do not divide."""
    job = _fitted(config, schedule, given, machine)
    setting = real_setting(job, schedule, machine, lengths_of(job), gpu=True)
    return plan_memory(job, check_layout(job, schedule), setting).fits


def _fitted(config: JobConfig, schedule: Schedule, given: Collection[str], machine: Machine) -> JobConfig:
    """The job with samples as long as simulated ones, and what nobody gave chosen for another machine."""
    return fit_to_gpus(as_long_as_simulated(without_hub(config), given), schedule, given, machine).config


def as_long_as_simulated(config: JobConfig, given: Collection[str]) -> JobConfig:
    """The job with samples as long as those that are simulated, unless max_tokens or costs are given. Raises
    ConfigError where its task cannot be made."""
    if "max_tokens" in given or not isinstance(config.cost, RooflineConfig):
        return config
    longest = min(longest_sample(config.cost), config.model.max_length)
    return replace(config, max_tokens=max(1, longest - lengths_of(config).prompt))


def _buckets(config: JobConfig, schedule: Schedule, machine: Machine) -> dict[str, Any]:
    """The size of buckets in which weights travel: the best one that these GPUs hold beside the rest of the job."""
    placement = _placement(config, schedule)
    if schedule.colocated or placement is None:
        return {}
    for size in bucket_sizes(config, schedule.transport, len(placement.devices["actor"])):
        if size == config.cluster.bucket_bytes:
            return {}
        plan = _plan(config, schedule, machine, lengths_of(config), {BUCKETS: size})
        if plan is not None and plan.fits:
            return {BUCKETS: size}
    return {}


def leanest(
    config: JobConfig, schedule: Schedule, given: Collection[str], machine: Machine, lengths: Lengths
) -> tuple[dict[str, Any], bool]:
    """The first settings under which the GPUs hold the job, and that they do; else those that need least."""
    least: dict[str, Any] = {}
    peak = math.inf
    for split in _splits(config, schedule, given):
        for settings in _choices(config, split, given, lengths):
            plan = _plan(config, schedule, machine, lengths, settings)
            if plan is None:
                continue
            if plan.fits:
                return settings, True
            if plan.fullest.peak < peak:
                least, peak = settings, plan.fullest.peak
    return least, False


def _plan(
    config: JobConfig, schedule: Schedule, machine: Machine, lengths: Lengths, settings: Mapping[str, Any]
) -> MemoryPlan | None:
    """None where devices do not divide."""
    job = changed(config, settings)
    placement = _placement(job, schedule)
    return (
        None
        if placement is None
        else plan_memory(job, placement, real_setting(job, schedule, machine, lengths, gpu=True))
    )


def _placement(config: JobConfig, schedule: Schedule) -> Placement | None:
    try:
        return check_layout(config, schedule)
    except ConfigError:
        return None


def _splits(config: JobConfig, schedule: Schedule, given: Collection[str]) -> Iterator[dict[str, Any]]:
    """The job's own split; then others, from the one that is nearest: as many training ranks as divide a batch."""
    placement = _placement(config, schedule)
    if placement is not None and config.algorithm.batch_groups % training_ranks(config, placement) == 0:
        yield {}
    if schedule.colocated or any(name.startswith(SPLIT) for name in given):
        return
    devices, middle = config.cluster.devices, config.cluster.devices / 2
    together = config.training.ranks_together
    for actor in sorted(range(together, devices, together), key=lambda number: (abs(number - middle), number)):
        if config.algorithm.batch_groups % (actor // together) == 0:
            yield {f"{SPLIT}.rollout": devices - actor}


def _choices(
    config: JobConfig, split: Mapping[str, Any], given: Collection[str], lengths: Lengths
) -> Iterator[dict[str, Any]]:
    """How a rank computes, the fastest first; then with moments on the host; then fewer slots."""
    job = changed(config, split)
    algorithm = job.algorithm
    placement = resolve_split(job.schedule.split, job.cluster.devices, device_roles(job))
    micro = _micro_batches(job, placement, given)
    tokens = [None, *(limit for limit in _TOKENS if limit > lengths.sample), lengths.sample]
    now = {
        MICRO_BATCH: algorithm.micro_batch_groups,
        SLOTS: job.engine.slots,
        OFFLOAD: job.training.optimizer_offload,
        RECOMPUTE: job.training.recompute_activations,
        TOKENS: job.training.tokens_per_micro_batch,
    }
    ways = product(
        _slots(job, given),
        [now[OFFLOAD]] if OFFLOAD in given else ["none", "between_phases", "always"],
        [now[RECOMPUTE]] if RECOMPUTE in given else [False, True],
        [now[TOKENS]] if TOKENS in given else tokens,
    )
    for slots, offload, recompute, limit in ways:
        wanted = {MICRO_BATCH: micro, SLOTS: slots, OFFLOAD: offload, RECOMPUTE: recompute, TOKENS: limit}
        yield dict(split) | {name: value for name, value in wanted.items() if value != now[name]}


def _micro_batches(config: JobConfig, placement: Placement, given: Collection[str]) -> int:
    """The largest, up to its own, that divides a mini-batch over the ranks; all of it for a loss that needs that."""
    algorithm = config.algorithm
    if MICRO_BATCH in given:
        return algorithm.micro_batch_groups
    ranks = training_ranks(config, placement)
    part = algorithm.mini_batch_groups
    if algorithm.batch_groups % algorithm.mini_batches:
        return algorithm.micro_batch_groups
    if looks_at_whole_batches(algorithm) and ranks == 1:
        return part
    own = range(algorithm.micro_batch_groups, 0, -1)
    return next((groups for groups in own if part % (groups * ranks) == 0), algorithm.micro_batch_groups)


def _slots(config: JobConfig, given: Collection[str]) -> Iterator[int]:
    """The engine's own number of slots, and halves of it down to a group."""
    slots = config.engine.slots
    yield slots
    while SLOTS not in given and config.engine.name == "torch" and slots // 2 >= config.algorithm.group_size:
        slots //= 2
        yield slots
