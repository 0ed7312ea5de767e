"""How likely a model finds tokens that were sampled: the one forward pass behind training and scoring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist

from engines.loading import ModelWeights
from engines.torch.experts import Routers
from engines.torch.first_weights import local_part
from engines.torch.model import compile_blocks, float32_head
from engines.torch.packing import pack_batch, pad_batch, use_packed_attention
from engines.torch.pipeline import Elsewhere, Pipeline
from harness.config import Layout, TrainingConfig
from harness.rl.log_probs import head_log_probs
from harness.rl.micro_batches import Part, passes_over
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LaidOut(Protocol):
    """Samples laid out for a forward pass."""

    @property
    def targets(self) -> torch.Tensor:
        """Tokens to score: int64 [N]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens that go through the model."""

    @property
    def routes(self) -> torch.Tensor | None:
        """Experts of the tokens that go through, row after row, int16 [N, layers, k]; None where routers choose."""

    def through(self, decoder: PreTrainedModel, received: torch.Tensor | None = None) -> torch.Tensor:
        """The last hidden states: [rows, tokens, H]. received: those before this stage's layers, of the same shape;
        None where it begins with tokens."""

    def at_targets(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state that predicts each target: [N, H]."""

    def at_responses(self, values: torch.Tensor) -> torch.Tensor:
        """Values of response tokens, sample after sample, [R], of a value per target [N]."""

    def with_routes(self, routes: Ragged, experts: tuple[int, int]) -> Self:
        """The same, going through the experts that are given. routes: as of `TrainBatch`; experts: layers, and experts
        of a token in each."""


LAYOUTS: dict[Layout, Callable[[Ragged, Ragged, torch.device], LaidOut]] = {"padded": pad_batch, "packed": pack_batch}


class Scores(NamedTuple):
    """A value per response token, sample after sample: float32 [R]. The first two are differentiable."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    gradient_squares: torch.Tensor | None = None


@dataclass(frozen=True)
class Head:
    """The head, with the settings that `harness.rl.log_probs.head_log_probs` takes."""

    temperature: float
    group: dist.ProcessGroup | None
    float32: bool
    logit_bytes: int

    def __call__(
        self, laid: LaidOut, hidden: torch.Tensor, weight: torch.Tensor, gradient_squares: bool = False
    ) -> Scores:
        """Scores by the last hidden states, [rows, tokens, H], and the output layer's weight, [V, H]."""
        how = (self.temperature, self.group, self.float32, self.logit_bytes, gradient_squares)
        found = head_log_probs(laid.at_targets(hidden), weight, laid.targets, *how)
        return Scores(*map(laid.at_responses, found))


class ScoringModel(torch.nn.Module, ABC):
    """A model, or one stage of it, that says something of each response token. Called with samples as `lay_out` lays
    them out, and with what the stage before computed, [rows, tokens, H], it returns its own hidden states or, where it
    has the head, what it has to say."""

    def __init__(self, model: PreTrainedModel, training: TrainingConfig) -> None:
        super().__init__()
        if training.layout == "packed":
            use_packed_attention(model)
        if training.compile:
            compile_blocks(model)
        self.model, self._lay_out = model, LAYOUTS[training.layout]
        self.routers = Routers.of(model)

    def lay_out(self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None) -> LaidOut:
        """prompts and responses: int64, of k rows each; routes: as of `TrainBatch`."""
        laid = self._lay_out(prompts, responses, next(self.model.buffers()).device)
        if routes is None:
            return laid
        assert self.routers is not None and self.routers.experts is not None, "experts were chosen of a model without"
        return laid.with_routes(routes, self.routers.experts)

    @abstractmethod
    def at_tokens(self, laid: LaidOut, received: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """A column or several, of a value per response token, sample after sample: float32 [R]; or hidden states."""


class TokenScorer(ScoringModel):
    """A model that is asked for log-probabilities, never for logits. `group`: the ranks that share the vocabulary."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        training: TrainingConfig,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, training)
        self._head = Head(temperature, group, float32_head(model), training.logit_bytes)

    def forward(
        self, laid: LaidOut, received: torch.Tensor | None = None, gradient_squares: bool = False
    ) -> Scores | torch.Tensor:
        """Scores of response tokens."""
        hidden, head = laid.through(self.model.base_model, received), self.model.get_output_embeddings()
        if isinstance(head, Elsewhere):
            return hidden
        return self._head(laid, hidden, local_part(head.weight), gradient_squares)

    def at_tokens(self, laid: LaidOut, received: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Log-probabilities."""
        scores: Scores | torch.Tensor = self(laid, received)
        return (scores.log_probs,) if isinstance(scores, Scores) else scores

    def with_gradient_squares(
        self, laid: LaidOut, received: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Log-probabilities, and the squares of their gradients by the logits, from one pass."""
        scores: Scores | torch.Tensor = self(laid, received, gradient_squares=True)
        if not isinstance(scores, Scores):
            return scores
        assert scores.gradient_squares is not None, "they were asked for"
        return scores.log_probs, scores.gradient_squares


VALUE_HEAD = "score"
"""The head of a model of values, in place of the output layer: as transformers names it in models that classify
tokens."""


class ValueScorer(ScoringModel):
    """A model with a head of one number (engines/torch/critic.py), that is asked what a response is worth before each
    of its tokens."""

    def forward(self, laid: LaidOut, received: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor]:
        """Values of response tokens, float32 [R], differentiable."""
        hidden, head = laid.through(self.model.base_model, received), getattr(self.model, VALUE_HEAD)
        if isinstance(head, Elsewhere):
            return hidden
        return (laid.at_responses(head(laid.at_targets(hidden)).squeeze(-1).float()),)

    def at_tokens(self, laid: LaidOut, received: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Values."""
        found: torch.Tensor | tuple[torch.Tensor] = self(laid, received)
        return found


AtTokens = Callable[[LaidOut, torch.Tensor | None], torch.Tensor | tuple[torch.Tensor, ...]]
"""The type of `ScoringModel.at_tokens`."""

ONE_STAGE = Pipeline(None, 0, torch.float32, torch.device("cpu"))


def score_parts(
    scorer: ScoringModel,
    at_tokens: AtTokens,
    prompts: Ragged,
    responses: Ragged,
    parts: Sequence[Part],
    pipeline: Pipeline = ONE_STAGE,
    routes: Ragged | None = None,
) -> list[Ragged]:
    """Columns of float32 values, one for every response token, on every stage. at_tokens: of `scorer`; parts: the
    samples of each forward pass, every one once; routes: as of `TrainBatch`."""
    laid = lay_out_parts(scorer.lay_out, parts, prompts, responses, routes)
    found = list[tuple[torch.Tensor, ...]]()

    def forward(number: int, received: torch.Tensor | None) -> torch.Tensor | None:
        said = at_tokens(laid[number], received)
        if isinstance(said, torch.Tensor):
            return said
        found.append(said)
        return None

    pipeline.compute([each.shape for each in laid], forward)
    return in_order(found, responses, parts, pipeline)


def lay_out_parts(lay_out: Callable[..., LaidOut], parts: Sequence[Part], *columns: Ragged | None) -> list[LaidOut]:
    """Samples as `lay_out` lays them out by these columns, but those that are None: each part for itself."""
    given = [column for column in columns if column is not None]
    return [lay_out(*(column.take(part) for column in given)) for part in parts]


def in_order(
    found: Sequence[tuple[torch.Tensor | None, ...]], responses: Ragged, parts: Sequence[Part], pipeline: Pipeline
) -> list[Ragged]:
    """Columns in the order of `responses`, on every stage, of what the last stage found for each part; those that are
    None are left out."""
    order = np.concatenate(parts)
    lengths, back = responses.lengths[order], np.argsort(order)
    columns = [torch.cat(column).cpu().numpy() for column in zip(*found, strict=True) if column[0] is not None]
    return [Ragged(column, lengths).take(back) for column in pipeline.from_last(columns)]


class TorchScorer(ABC):
    """`harness.protocols.Scorer` on a model in this process."""

    def __init__(self, scorer: TokenScorer, training: TrainingConfig) -> None:
        self._scorer, self._training = scorer, training

    async def log_probs(self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None) -> Ragged:
        """Log-probabilities of response tokens. Raises RuntimeError where the weights are incomplete."""
        (log_probs,) = self._scored(self._scorer.at_tokens, prompts, responses, routes)
        return log_probs

    async def gradient_squares(
        self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None
    ) -> tuple[Ragged, Ragged]:
        """Log-probabilities and their gradients' squares. Raises RuntimeError where the weights are incomplete."""
        log_probs, squares = self._scored(self._scorer.with_gradient_squares, prompts, responses, routes)
        return log_probs, squares

    @abstractmethod
    def _scored(self, at_tokens: AtTokens, prompts: Ragged, responses: Ragged, routes: Ragged | None) -> list[Ragged]:
        """Columns of float32 values, one for every response token."""


class TorchLogProb(TorchScorer):
    """`harness.protocols.LogProbEngine` on a transformers model in this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        device: torch.device,
        training: TrainingConfig | None = None,
    ) -> None:
        training = training or TrainingConfig()
        super().__init__(TokenScorer(model.to(device).eval(), temperature, training), training)
        self._weights = ModelWeights(model, "log-prob engine")
        self.version = 0

    @torch.inference_mode()
    def _scored(self, at_tokens: AtTokens, prompts: Ragged, responses: Ragged, routes: Ragged | None) -> list[Ragged]:
        self._weights.require_complete()
        parts = passes_over(prompts, responses, self._training)
        return score_parts(self._scorer, at_tokens, prompts, responses, parts, routes=routes)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError as `ModelWeights.load`. Where the weights do not come whole, it scores nothing before
        another set has."""
        self._weights.load(version, weights)
        self.version = version
