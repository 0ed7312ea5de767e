"""The base of every schedule, by which it describes itself. What it may ask of a job is in `schedules.protocol`."""

import asyncio
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from schedules.capacity import Capacity
from schedules.protocol import Job

BESIDE = "local"
"""The transport of engines that share devices with the trainer, in whatever schedule."""
Order = str
"""`fifo`, `completion`, or `package.module:Class` of a policy of the queue that training follows instead."""


def option(
    default: Any,
    *,
    least: float = 0,
    most: float = math.inf,
    examples: Sequence[float] = (),
    read_where: tuple[str, Callable[[Any], bool]] = ("", lambda own: True),
) -> Any:
    """An option of the user's: a number within bounds, a word, a switch. examples: values that tests try, not some in
    these bounds. read_where: the schedules that read it, in words after "read only where", and as a function of all
    options; every one by default."""
    numeric = isinstance(default, int | float) and not isinstance(default, bool)
    bounds = {"bounds": (least, most), "examples": tuple(examples)} if numeric else {}
    return dataclasses.field(default=default, metadata={**bounds, "read_where": read_where})


class Schedule(ABC):
    """A schedule is a frozen dataclass whose fields are its options.

    A subclass gives `transport`, `eta` and `run`, and what else differs from the defaults here. A class variable is the
    same for every job (`eta = 1.0`), a field is an option (`streaming: bool = True`), a property follows from options.
    Raises ValueError, with the value and the fix, for an option that is out of its bounds.
    """

    transport: ClassVar[str]
    """How weights travel: by broadcast between pools (collective), through memory that the processes of a host share
    (ipc), to host memory in the background (host_staged), not at all: roles that share a pool take them from the
    trainer beside them (local); or by `package.module:Class`, a transport of one's own."""

    colocated: ClassVar[bool] = False
    """All device roles share one pool and take turns; otherwise rollout has devices of its own."""

    lends: ClassVar[bool] = False
    """Training devices have rollout engines, too, and are lent to them (`Job.lent`)."""

    loads_between_batches: ClassVar[bool] = False
    """Engines take new weights between batches only, when no sample is under way in them."""

    loads_after_each_batch: ClassVar[bool] = False
    """Engines that share devices load new weights between any two batches that they generate: so when they give the
    devices back, they need not keep those that they have."""

    awaits_completion: ClassVar[bool] = False
    """Whether it waits for `Rollout.completed`."""

    puts_off: ClassVar[bool] = False
    """Whether it calls `Rollout.put_off`: then samples leave their engine once their group is complete."""

    follows_time: ClassVar[bool] = False
    """Whether what an engine loads, or how far ahead groups may be, follows from what took how long: so its runs are
    not replayed."""

    def __post_init__(self) -> None:
        for made in dataclasses.fields(self):  # type: ignore[arg-type]
            if "bounds" in made.metadata:
                value, (least, most) = getattr(self, made.name), made.metadata["bounds"]
                if not least <= value <= most:
                    fix = f"{least} or more" if most == math.inf else f"{least} to {most}"
                    raise ValueError(f"schedule.{made.name}={value} is out of bounds; use {fix}")

    @property
    @abstractmethod
    def eta(self) -> float:
        """Admitted staleness in iterations."""

    @property
    def order(self) -> Order:
        """The order in which groups are trained: as they were admitted, as they are completed, or by a policy of one's
        own, which as `completion` picks among those that are complete."""
        return "fifo"

    @property
    def in_rounds(self) -> bool:
        """Whether engines have devices that they share until a batch is complete, and the other roles after that."""
        return self.lends or (self.colocated and self.awaits_completion)

    @property
    def least_engines(self) -> int:
        """Rollout engines that it needs at least."""
        return 1

    @property
    def cycle(self) -> int:
        """Batches that are generated as one, so iterations after which what it does repeats."""
        return 1

    def window_groups(self, batch: int) -> int | None:
        """How many groups may be trained next, counted in their order from the oldest untrained one, where `order` lets
        some overtake others; None: all of them."""
        return None

    def capacity(self, job: Job) -> Capacity:
        """How far ahead groups of this job may be."""
        return Capacity(job.batch, self.eta)

    def lag_bounds(self, iteration: int) -> tuple[int, int]:
        """The least and the largest lag of any token trained in this iteration, from 0. There are as many versions
        behind it as iterations before it."""
        return 0, min(iteration, math.ceil(self.eta))

    @abstractmethod
    async def run(self, job: Job) -> None:
        """The whole job, from version 0 to version `job.iterations`."""


async def gather(*work: Coroutine[Any, Any, None]) -> None:
    """Begin all of it in this order, and wait for all; the first failure cancels the rest (ExceptionGroup)."""
    async with asyncio.TaskGroup() as tasks:
        for part in work:
            tasks.create_task(part)


async def train_handing_over(job: Job, capacity: Capacity) -> None:
    """Consumes trained columns, produces versions; each new version admits the next groups and goes on its way."""
    await job.prompts.admit(below=capacity.limit(0))
    for version in range(1, job.iterations + 1):
        await job.trainer.train(version - 1)
        await job.weights.start_transfer(version)
        await job.prompts.admit(below=capacity.limit(version))
    await job.prompts.close()


async def go_on(job: Job, version: int, limit: int) -> None:
    """Engines, which have this version, may start what is below the limit: they know before it is admitted, so that
    they start nothing under another one."""
    if version:
        await job.rollout.resume(below=limit)
    else:
        await job.rollout.set_dispatch_limit(below=limit)
    await job.prompts.admit(below=limit)
