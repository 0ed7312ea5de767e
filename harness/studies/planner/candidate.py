"""One way to use the devices: who gets how many, how models lie on them, and how far ahead rollout may run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.config import JobConfig


@dataclass(frozen=True, order=True)
class Candidate:
    """Settings that the planner chooses. Devices are counted whole; groups are of a micro-batch of one training rank.

    scoring: devices of a pool that actor_fwd and reference share in turn; 0 where they take turns on the actor's.
    shared: rollout takes turns on the actor's devices too. options: of the schedule.
    """

    rollout: int
    actor: int
    scoring: int
    shared: bool
    engine_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    recompute: bool
    micro_groups: int
    expert_parallel: int = 1
    options: tuple[tuple[str, float], ...] = ()

    @property
    def engines(self) -> int:
        return self.rollout // self.engine_parallel

    @property
    def rank_devices(self) -> int:
        """Devices of one data-parallel training rank."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks(self) -> int:
        return self.actor // self.rank_devices

    @property
    def devices(self) -> int:
        """Devices that it uses."""
        return self.actor + self.scoring + (0 if self.shared else self.rollout)

    def split(self, roles: tuple[str, ...]) -> dict[str, int | str]:
        """`schedule.split` for these device roles."""
        split: dict[str, int | str] = {"actor": self.actor, "rollout": "actor" if self.shared else self.rollout}
        owner = "actor"
        for role in ("actor_fwd", "reference"):
            if role not in roles:
                split[role] = "actor"
            elif self.scoring and owner == "actor":
                split[role], owner = self.scoring, role
            else:
                split[role] = owner
        return split

    def settings(self, roles: tuple[str, ...]) -> Mapping[str, int | float | str | bool]:
        """Every setting that it stands for, by its path."""
        return {
            **{f"schedule.split.{role}": share for role, share in self.split(roles).items()},
            **{f"schedule.{name}": value for name, value in self.options},
            "engine.tensor_parallel": self.engine_parallel,
            "training.tensor_parallel": self.tensor_parallel,
            "training.pipeline_parallel": self.pipeline_parallel,
            "training.expert_parallel": self.expert_parallel,
            "training.recompute_activations": self.recompute,
            "algorithm.micro_batch_groups": self.micro_groups,
        }

    def apply(self, config: JobConfig, roles: tuple[str, ...]) -> JobConfig:
        """The job with these settings."""
        options = {**config.schedule.options, **dict(self.options)}
        return replace(
            config,
            schedule=replace(config.schedule, split=self.split(roles), options=options),
            engine=replace(config.engine, tensor_parallel=self.engine_parallel),
            training=replace(
                config.training,
                tensor_parallel=self.tensor_parallel,
                pipeline_parallel=self.pipeline_parallel,
                expert_parallel=self.expert_parallel,
                recompute_activations=self.recompute,
            ),
            algorithm=replace(config.algorithm, micro_batch_groups=self.micro_groups),
        )

    def told(self) -> tuple[str, str]:
        """Its split (devices) and its layout, as a table says them."""
        parts = [f"{self.actor} shared" if self.shared else f"{self.rollout} + {self.actor}"]
        parts += [f"{self.scoring} scoring"] if self.scoring else []
        train = f"TP{self.tensor_parallel}"
        train += f" PP{self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        train += f" EP{self.expert_parallel}" if self.expert_parallel > 1 else ""
        train += " recompute" if self.recompute else ""
        return " + ".join(parts), f"{self.engines} engines TP{self.engine_parallel}, {self.ranks} ranks {train}"
