"""A training engine from outside, the reference of the suite: one rank of plain torch that takes samples one by one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engines.torch.checkpoint import TrainingState, load_training, training_state
from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import AlgorithmConfig
from harness.protocols import CriticEngine, Scorer, TrainBatch, TrainingSetting
from harness.rl.losses import policy_loss


class PlainWorld:
    """`harness.protocols.TrainingWorld` of one rank, for losses of which each token has its own."""

    def __init__(self, setting: TrainingSetting) -> None:
        assert setting.world == 1, "it knows nothing of other ranks"
        self._setting = setting

    @cached_property
    def policy(self) -> "PlainPolicy":
        return PlainPolicy(build_model(self._setting.model).train(), self._setting.algorithm)

    def scorer(self) -> Scorer:
        return TorchLogProb(self.policy.model, temperature=1.0, device=torch.device("cpu"))

    def reference(self) -> Scorer:
        return TorchLogProb(build_model(self._setting.model), temperature=1.0, device=torch.device("cpu"))

    def critic(self, algorithm: AlgorithmConfig) -> CriticEngine:
        raise NotImplementedError


@contextmanager
def _routed(batch: TrainBatch, sample: int, model: Any) -> Iterator[None]:
    """Each router in turn takes the first of the tokens that it sees to the experts that were chosen before."""
    if batch.routes is None:
        yield
        return
    config, topk = model.config, torch.topk
    routes = torch.from_numpy(batch.routes.row(sample).astype(np.int64))
    of_layers = iter(routes.view(-1, config.num_hidden_layers, config.num_experts_per_tok).unbind(1))

    def chosen(scores: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        experts, given = topk(scores, k, dim=dim).indices, next(of_layers)
        experts[: len(given)] = given
        return scores.gather(dim, experts), experts

    with patch("torch.topk", chosen):
        yield


@dataclass
class PlainPolicy:
    """`harness.protocols.TrainEngine`."""

    model: torch.nn.Module
    algorithm: AlgorithmConfig

    def __post_init__(self) -> None:
        self._named = dict(self.model.named_parameters())
        how = {"lr": self.algorithm.learning_rate, "betas": self.algorithm.betas}
        self._optimizer = torch.optim.AdamW(self._named.values(), weight_decay=self.algorithm.weight_decay, **how)
        self._steps, self._tokens = torch.zeros((), dtype=torch.int64), 0

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        loss = policy_loss(self.algorithm)
        for i in range(len(batch.prompts)):
            prompt, response = batch.prompts.row(i), batch.responses.row(i)
            tokens = torch.from_numpy(np.concatenate([prompt, response]))
            with _routed(batch, i, self.model):
                logits = self.model(tokens[None]).logits[0, len(prompt) - 1 : -1]
            found = torch.log_softmax(logits, -1).gather(-1, tokens[len(prompt) :, None])[:, 0]
            given = torch.from_numpy(batch.behaviour_log_probs.row(i)), torch.full_like(found, batch.advantages[i])
            counts = torch.ones_like(found, dtype=torch.bool)
            loss(found, *given, counts, lengths=torch.tensor([len(found)]), proximal_log_probs=None).sum().backward()
            self._tokens += len(found)
        return {"tokens": float(len(batch.responses.values))}

    def rank_tokens(self, batch: TrainBatch) -> Sequence[int]:
        return [len(batch.prompts.values) + len(batch.responses.values)]

    async def step(self) -> dict[str, float]:
        for parameter in self._named.values():
            parameter.grad /= self._tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self._named.values(), self.algorithm.grad_clip))
        skipped = not np.isfinite(norm)
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps, self._tokens = self._steps + 1, 0
        return {"grad_norm": norm, "learning_rate": float(self.algorithm.learning_rate), "skipped": float(skipped)}

    async def state(self) -> TrainingState:
        if self._tokens:
            raise RuntimeError("gradients would be lost")
        return training_state(self._named, self._optimizer, self._steps, rank=0, ranks=1)

    async def load(self, folder: Path) -> None:
        load_training(folder, self._named, self._optimizer, self._steps, rank=0, ranks=1)

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def holders(self) -> Mapping[str, tuple[int, ...]]:
        return {}
