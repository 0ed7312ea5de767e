"""Forward and training passes that let time pass instead of computing. Whose turn it is on a device is decided by the
roles around them. Samples are run-length coded, see `engines.simulated.rollout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
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


@dataclass(eq=False)
class _Passes:
    """Data-parallel ranks that share each micro-batch, in groups of `group_size` samples that stay together; the
    slowest decides. cost: resolved for the model."""

    cost: CostConfig
    clock: Clock
    _: KW_ONLY
    ranks: int = 1
    group_size: int = 1
    training: TrainingConfig = field(default_factory=TrainingConfig)

    async def _scored(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Zeros, a value per run, after the time of a forward pass."""
        lengths = sample_tokens(prompts, responses)
        await self.clock.sleep(scoring_s(self.cost, lengths, self.ranks, self.group_size, self.training))
        return Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)


@dataclass(eq=False)
class SimulatedLogProb(_Passes):
    """`harness.protocols.LogProbEngine`. load_s: what taking new weights lasts."""

    load_s: float = field(default=0.0, kw_only=True)
    version: int = field(default=0, init=False)

    async def log_probs(self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None) -> Ragged:
        """Zeros, a value per run."""
        return await self._scored(prompts, responses)

    async def gradient_squares(
        self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None
    ) -> tuple[Ragged, Ragged]:
        """The same twice, for the time of one pass: log-probs need all probabilities anyway."""
        zeros = await self.log_probs(prompts, responses)
        return zeros, zeros

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        start = self.clock.now()
        for _ in weights:
            pass
        await self.clock.sleep(max(0.0, self.load_s - (self.clock.now() - start)))
        self.version = version


@dataclass(eq=False)
class SimulatedTrainer(_Passes):
    """`harness.protocols.TrainEngine`: one rank, or (ranks > 1) a whole training world in one.

    `parameters` are what it offers to send, if anything; they never change. steps_per_version: optimizer steps.
    """

    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)
    steps_per_version: int = field(default=1, kw_only=True)
    _steps: int = field(default=0, init=False)

    async def accumulate(self, batch: TrainBatch | ValueBatch) -> dict[str, float]:
        """Let the time of a micro-batch pass; no sums: nothing was computed that a policy metric could be made of."""
        lengths = sample_tokens(batch.prompts, batch.responses)
        await self.clock.sleep(training_s(self.cost, lengths, self.ranks, self.group_size, self.training))
        return {}

    def rank_tokens(self, batch: TrainBatch | ValueBatch) -> list[int]:
        lengths = sample_tokens(batch.prompts, batch.responses)
        return [int(share.sum()) for share in rank_shares(lengths, self.ranks, self.group_size, self.cost.dealing)]

    async def step(self) -> dict[str, float]:
        """Let the time of a step pass, and of a checkpoint behind it; there are no gradients to tell of."""
        self._steps += 1
        version, within = divmod(self._steps, self.steps_per_version)
        await self.clock.sleep(self.cost.train_step_s + (0.0 if within else self.cost.checkpoint.of(version)))
        return {}

    async def state(self) -> SimulatedState:
        return SimulatedState()

    async def load(self, folder: Path) -> None:
        """Do nothing: there is nothing to remember."""

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.parameters)

    def holders(self) -> dict[str, tuple[int, ...]]:
        return {}


class SimulatedState:
    """`harness.protocols.WrittenState` of nothing."""

    def write(self, folder: Path) -> dict[str, tuple[int, str]]:
        return {}


class SimulatedCritic(SimulatedTrainer):
    """`harness.protocols.CriticEngine`: costs what scoring and training of a policy of this shape cost."""

    async def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Zeros, a value per run."""
        return await self._scored(prompts, responses)


def scoring_s(
    cost: CostConfig, lengths: NDArray[np.int64], ranks: int, group_size: int, training: TrainingConfig
) -> float:
    """Seconds to score a micro-batch of samples of so many tokens, int64 [samples], prompt and response."""
    calls, shares = _passes(rank_shares(lengths, ranks, group_size, cost.dealing), training, cost.padding)
    share_s = slowest_share_s(shares, s_per_token=cost.log_prob_s_per_token, s_per_pair=cost.log_prob_s_per_pair)
    return calls * (cost.call_s + cost.log_prob_call_s) + share_s


def training_s(
    cost: CostConfig, lengths: NDArray[np.int64], ranks: int, group_size: int, training: TrainingConfig
) -> float:
    """Seconds to train on such a micro-batch, forward and backward."""
    calls, shares = _passes(rank_shares(lengths, ranks, group_size, cost.dealing), training, cost.padding)
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
