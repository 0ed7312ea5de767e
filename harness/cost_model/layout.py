"""How a job's simulated work lies on devices, as far as its cost depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Devices of a rollout engine, and of the training world. Scoring is laid out as training is."""

    engine_devices: int = 1  # of one rollout engine: its tensor parallelism
    train_devices: int = 1  # of one data-parallel rank: tensor x pipeline
    train_ranks: int = 1  # data-parallel ranks; they share weights, gradients and optimizer (FSDP, ZeRO-3)
    colocated: bool = False  # rollout takes turns with training on the same devices
    pipeline: int = 1  # of train_devices: stages that the layers are cut into
    expert_ranks: int = 1  # of train_ranks: those over which the experts of each layer are spread
    samples_per_call: int = 1  # of a rank's micro-batch: they go through the pipeline one after another
    recompute: bool = False  # activations inside of layers are computed again for the backward pass
    one_node: bool = False  # all devices of the job stand in one node

    @property
    def tensor(self) -> int:
        """Devices of a rank that share each layer."""
        return self.train_devices // self.pipeline

    @property
    def shards(self) -> int:
        """Devices over which training state is cut."""
        return self.train_ranks * self.train_devices
