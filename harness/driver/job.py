"""The job as a schedule sees it.

Its parts satisfy the protocols of schedules/protocol.py by shape; nothing in them knows which schedule calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.driver.already_done import AlreadyDone
from harness.driver.pools import RolloutPool, StagePool, TrainerPool
from harness.driver.prompts import PromptSource
from harness.driver.published_weights import PublishedWeights


@dataclass(frozen=True)
class RunningJob:
    """`schedules.protocol.Job`."""

    iterations: int
    batch: int
    prompts: PromptSource
    rollout: RolloutPool
    device_stages: Sequence[StagePool]
    host_stages: Sequence[StagePool]
    trainer: TrainerPool
    weights: PublishedWeights
    already: AlreadyDone = field(default_factory=AlreadyDone)

    @property
    def stages(self) -> Sequence[StagePool]:
        return (*self.host_stages, *self.device_stages)
