"""Forward and training passes that let time pass instead of computing. Whose turn it is on a device is decided by the
roles around them. Samples are run-length coded, see `engines.simulated.rollout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness.config import CostConfig, TrainingConfig
from harness.cost_model.cost import rank_shares, slowest_share_s
from harness.protocols import Clock, TrainBatch, ValueBatch
from harness.rl.micro_batches import cut_by_tokens
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    import torch


class SimulatedLogProb:
    """`harness.protocols.LogProbEngine`: data-parallel ranks that share each micro-batch; the slowest decides.

    cost: resolved for the model; group_size: samples that stay together; load_s: what taking new weights lasts.
    """

    def __init__(
        self,
        cost: CostConfig,
        clock: Clock,
        *,
        ranks: int = 1,
        group_size: int = 1,
        load_s: float = 0.0,
        training: TrainingConfig | None = None,
    ) -> None:
        self._cost, self._clock, self._ranks, self._group_size, self._load_s = cost, clock, ranks, group_size, load_s
        self._training = training or TrainingConfig()
        self.version = 0

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Zeros, a value per run."""
        cost, shares = self._cost, rank_shares(prompts, responses, self._ranks, self._group_size)
        share_s = slowest_share_s(shares, s_per_token=cost.log_prob_s_per_token, s_per_pair=cost.log_prob_s_per_pair)
        calls = calls_of(shares, self._training)
        await self._clock.sleep(calls * (cost.call_s + cost.log_prob_call_s) + share_s)
        return Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)

    async def gradient_squares(self, prompts: Ragged, responses: Ragged) -> tuple[Ragged, Ragged]:
        """The same twice, for the time of one pass: log-probs need all probabilities anyway."""
        zeros = await self.log_probs(prompts, responses)
        return zeros, zeros

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        start = self._clock.now()
        for _ in weights:
            pass
        await self._clock.sleep(max(0.0, self._load_s - (self._clock.now() - start)))
        self.version = version


class SimulatedTrainer:
    """`harness.protocols.TrainEngine`: one rank, or (ranks > 1) a whole training world in one.

    cost: resolved for the model. A world shares each micro-batch, in groups of `group_size`, and waits for the slowest.
    `parameters` are what it offers to send, if anything; they never change.
    """

    def __init__(
        self,
        cost: CostConfig,
        clock: Clock,
        *,
        ranks: int = 1,
        group_size: int = 1,
        parameters: Mapping[str, torch.Tensor] | None = None,
        training: TrainingConfig | None = None,
    ) -> None:
        self._cost, self._clock, self._ranks, self._group_size = cost, clock, ranks, group_size
        self._training = training or TrainingConfig()
        self._parameters = dict(parameters or {})

    async def accumulate(self, batch: TrainBatch | ValueBatch) -> dict[str, float]:
        """Let the time of a micro-batch pass; no sums: nothing was computed that a policy metric could be made of."""
        cost, shares = self._cost, self._shares(batch)
        share_s = slowest_share_s(shares, s_per_token=cost.train_s_per_token, s_per_pair=cost.train_s_per_pair)
        calls = calls_of(shares, self._training)
        await self._clock.sleep(calls * (cost.call_s + cost.train_call_s) + share_s)
        return {}

    def rank_tokens(self, batch: TrainBatch | ValueBatch) -> list[int]:
        return [int(share.sum()) for share in self._shares(batch)]

    def _shares(self, batch: TrainBatch | ValueBatch) -> list[NDArray[np.int64]]:
        return rank_shares(batch.prompts, batch.responses, self._ranks, self._group_size)

    async def step(self) -> dict[str, float]:
        """Let the time of a step pass; there are no gradients to tell of."""
        await self._clock.sleep(self._cost.train_step_s)
        return {}

    async def state(self) -> SimulatedState:
        return SimulatedState()

    async def load(self, folder: Path) -> None:
        """Do nothing: there is nothing to remember."""

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._parameters)


class SimulatedState:
    """`harness.protocols.WrittenState` of nothing."""

    def write(self, folder: Path) -> dict[str, tuple[int, str]]:
        return {}


class SimulatedCritic(SimulatedTrainer):
    """`harness.protocols.CriticEngine`: costs what scoring and training of a policy of this shape cost."""

    def __init__(
        self,
        cost: CostConfig,
        clock: Clock,
        *,
        ranks: int = 1,
        group_size: int = 1,
        training: TrainingConfig | None = None,
    ) -> None:
        super().__init__(cost, clock, ranks=ranks, group_size=group_size, training=training)
        self._scorer = SimulatedLogProb(cost, clock, ranks=ranks, group_size=group_size, training=training)

    async def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Zeros, a value per run."""
        return await self._scorer.log_probs(prompts, responses)


def calls_of(shares: Sequence[NDArray[np.int64]], training: TrainingConfig) -> int:
    """Passes over a micro-batch of these shares of ranks: of the rank that needs most, which all make."""
    if training.tokens_per_micro_batch is None:
        return 1
    return max(len(cut_by_tokens(share, training.tokens_per_micro_batch, training.layout)) for share in shares)
