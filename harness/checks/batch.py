"""Whether a batch divides into what ranks and steps train on. Raises ConfigError: the value and the fix."""

from __future__ import annotations

from harness.checks.layout import training_ranks
from harness.config import ConfigError, JobConfig
from harness.config.job import WHOLE_BATCH
from harness.config.placement import Placement
from schedules import Schedule


def check_batch(config: JobConfig, schedule: Schedule, placement: Placement) -> None:
    algorithm, world = config.algorithm, training_ranks(config, placement)
    if algorithm.batch_groups % algorithm.mini_batches:
        fits = [parts for parts in range(1, algorithm.batch_groups + 1) if algorithm.batch_groups % parts == 0]
        raise ConfigError(
            f"algorithm.mini_batches={algorithm.mini_batches} does not cut algorithm.batch_groups="
            f"{algorithm.batch_groups} into equal parts of whole groups; set it to one of {', '.join(map(str, fits))}"
        )
    if algorithm.correction in WHOLE_BATCH:
        _check_whole_batch(config, schedule, world)
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


def _check_over_sampling(config: JobConfig, schedule: Schedule) -> None:
    """Of more groups than are trained: something refuses groups, and a batch is known before they are trained."""
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
    """Of a world of so many ranks, called so."""
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
    """For a loss that compares all tokens of a batch with each other."""
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
