"""What a schedule is, and all it may ask of a job.

A schedule decides when groups are admitted, when roles work, and when engines take new weights. It sees the roles
through these protocols only, so the same file runs on a real cluster and on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

Transport = Literal["collective", "ipc"]


class Prompts(Protocol):
    async def admit(self, below: int) -> None:
        """Put every group numbered under `below` that is not there yet into the queue; later calls go on from there.

        Never goes past the job's last group. Waits while the queue is at its cap.
        """


class Rollout(Protocol):
    """All rollout engines. They take groups from the queue on their own, whole and in order."""

    async def generate(self, iteration: int) -> None:
        """Take the device, generate batch `iteration` to its last token, and give the device back."""

    async def stream(self) -> None:
        """Generate whatever the dispatch limit allows, batch after batch, until the job's last group is done."""

    async def allow(self, below: int) -> None:
        """Let engines start groups numbered under `below` (the dispatch limit)."""

    async def pause(self, *, drain: bool) -> None:
        """Stop all engines between two tokens, or (`drain`) once their running samples are done."""

    async def resume(self, below: int) -> None:
        """Go on under the loaded weights, with dispatch limit `below`."""


class Stage(Protocol):
    """One role between rollout and training: reward, reference, old log-probs, advantages."""

    @property
    def name(self) -> str: ...

    async def process(self, iteration: int) -> None:
        """Work through every row of batch `iteration`, each as soon as its inputs are in the queue."""


class Trainer(Protocol):
    async def train(self, iteration: int) -> None:
        """Train on batch `iteration` in group order, micro-batch by micro-batch as they become ready, then step."""


class Weights(Protocol):
    async def publish(self, version: int) -> None:
        """Bring the trained weights, now called `version`, to every engine. Engines must be paused or idle."""


class Job(Protocol):
    """One training job, placed and ready."""

    @property
    def iterations(self) -> int: ...

    @property
    def batch(self) -> int:
        """Groups trained in one iteration."""

    @property
    def prompts(self) -> Prompts: ...

    @property
    def rollout(self) -> Rollout: ...

    @property
    def device_stages(self) -> Sequence[Stage]: ...

    @property
    def host_stages(self) -> Sequence[Stage]: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def weights(self) -> Weights: ...


class Schedule(Protocol):
    """A frozen dataclass of the schedule's own options, with `eta`, the way weights travel, and `run`."""

    @property
    def transport(self) -> Transport:
        """How weights travel: by broadcast between pools, or through memory that processes of a pool share."""

    @property
    def eta(self) -> float:
        """Admitted staleness in iterations."""

    async def run(self, job: Job) -> None:
        """The whole job, from version 0 to version `job.iterations`."""
