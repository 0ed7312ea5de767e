"""The place of a rank in a training world of this engine: the policy, what scores beside it, and a critic."""

from functools import cached_property
from typing import Any

from engines.torch.critic import FSDPCritic, value_model
from engines.torch.first_weights import Outline
from engines.torch.fsdp import FSDPEngine, init_world, sharded_reference
from engines.torch.lora import with_adapters
from engines.torch.model import outline_model
from harness.config import AlgorithmConfig
from harness.protocols import Scorer, TrainingSetting


class TorchWorld:
    """`harness.protocols.TrainingWorld`."""

    def __init__(self, setting: TrainingSetting) -> None:
        self._setting = setting
        training, place = setting.training, (setting.store, setting.rank, setting.world)
        together = training.tensor_parallel, training.pipeline_parallel
        self._mesh = init_world(*place, setting.device, setting.timeout_s, *together)

    @cached_property
    def policy(self) -> FSDPEngine:
        """The rank of the policy. Every rank asks for it, when all others do."""
        setting = self._setting
        return FSDPEngine(
            with_adapters(self._outline(), setting.training, setting.seed), setting.algorithm, **self._how()
        )

    def scorer(self) -> Scorer:
        return self.policy.scorer()

    def reference(self) -> Scorer:
        setting = self._setting
        if setting.training.lora_rank:
            return self.policy.base_scorer()
        return sharded_reference(
            self._outline(),
            mesh=self._mesh,
            device=setting.device,
            temperature=setting.algorithm.temperature,
            training=setting.training,
        )

    def critic(self, algorithm: AlgorithmConfig) -> FSDPCritic:
        return FSDPCritic(value_model(self._outline()), algorithm, **self._how())

    def _how(self) -> dict[str, Any]:
        setting = self._setting
        return {
            "mesh": self._mesh,
            "device": setting.device,
            "training": setting.training,
            "steps": setting.steps,
            "horizon": setting.horizon,
        }

    def _outline(self) -> Outline:
        return outline_model(self._setting.model, seed=0)
