"""Forward and training passes that let time pass instead of computing. Whose turn it is on a device is decided by the
roles around them. Samples are run-length coded, see `engines.simulated.rollout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness.config import CostConfig, TrainingConfig
from harness.cost_model.cost import rank_shares, sample_tokens, slowest_share_s
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
        lengths = sample_tokens(prompts, responses)
        await self._clock.sleep(scoring_s(self._cost, lengths, self._ranks, self._group_size, self._training))
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
    `parameters` are what it offers to send, if anything; they never change. steps_per_version: optimizer steps.
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
        steps_per_version: int = 1,
    ) -> None:
        self._steps, self._steps_per_version = 0, steps_per_version
        self._cost, self._clock, self._ranks, self._group_size = cost, clock, ranks, group_size
        self._training = training or TrainingConfig()
        self._parameters = dict(parameters or {})

    async def accumulate(self, batch: TrainBatch | ValueBatch) -> dict[str, float]:
        """Let the time of a micro-batch pass; no sums: nothing was computed that a policy metric could be made of."""
        lengths = sample_tokens(batch.prompts, batch.responses)
        await self._clock.sleep(training_s(self._cost, lengths, self._ranks, self._group_size, self._training))
        return {}

    def rank_tokens(self, batch: TrainBatch | ValueBatch) -> list[int]:
        lengths = sample_tokens(batch.prompts, batch.responses)
        return [int(share.sum()) for share in rank_shares(lengths, self._ranks, self._group_size, self._cost.dealing)]

    async def step(self) -> dict[str, float]:
        """Let the time of a step pass, and of a checkpoint behind it; there are no gradients to tell of."""
        self._steps += 1
        version, within = divmod(self._steps, self._steps_per_version)
        await self._clock.sleep(self._cost.train_step_s + (0.0 if within else self._cost.checkpoint.of(version)))
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
        steps_per_version: int = 1,
    ) -> None:
        super().__init__(
            cost, clock, ranks=ranks, group_size=group_size, training=training, steps_per_version=steps_per_version
        )
        self._scorer = SimulatedLogProb(cost, clock, ranks=ranks, group_size=group_size, training=training)

    async def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Zeros, a value per run."""
        return await self._scorer.log_probs(prompts, responses)


def scoring_s(
    cost: CostConfig, lengths: NDArray[np.int64], ranks: int, group_size: int, training: TrainingConfig
) -> float:
    """Seconds to score a micro-batch of samples of so many tokens, int64 [samples], prompt and response."""
    shares = rank_shares(lengths, ranks, group_size, cost.dealing)
    calls, shares = _passes(shares, training, cost.padding)
    share_s = slowest_share_s(shares, s_per_token=cost.log_prob_s_per_token, s_per_pair=cost.log_prob_s_per_pair)
    return calls * (cost.call_s + cost.log_prob_call_s) + share_s


def training_s(
    cost: CostConfig, lengths: NDArray[np.int64], ranks: int, group_size: int, training: TrainingConfig
) -> float:
    """Seconds to train on such a micro-batch, forward and backward."""
    shares = rank_shares(lengths, ranks, group_size, cost.dealing)
    calls, shares = _passes(shares, training, cost.padding)
    share_s = slowest_share_s(shares, s_per_token=cost.train_s_per_token, s_per_pair=cost.train_s_per_pair)
    return calls * (cost.call_s + cost.train_call_s) + share_s


def _passes(
    shares: Sequence[NDArray[np.int64]], training: TrainingConfig, padding: bool
) -> tuple[int, list[NDArray[np.int64]]]:
    """Passes over a micro-batch of these shares of ranks, of the rank that needs most, which all make; and the tokens
    that each rank computes for each of its samples."""
    limit, layout = training.tokens_per_micro_batch, training.layout
    padded = padding and layout == "padded"
    if limit is None:
        return 1, [_padded(share) for share in shares] if padded else list(shares)
    parts = [[share[part] for part in cut_by_tokens(share, limit, layout)] for share in shares]
    computed = [np.concatenate([*map(_padded, its), share[:0]]) for its, share in zip(parts, shares, strict=True)]
    return max(map(len, parts)), computed if padded else list(shares)


def _padded(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.full_like(lengths, lengths.max(initial=0))
