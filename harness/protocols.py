"""The narrow waist: what roles ask of engines, and the records that travel between them.

Engines implement these protocols and import nothing else of the harness; roles and schedules use them and know no
engine. What takes a device's time is a coroutine: a real engine computes in it, a simulated one lets its clock pass.
Array shapes are in brackets; `L` is the number of response tokens of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from harness.config import AlgorithmConfig, ModelConfig, TrainingConfig
    from harness.transfer_queue import Ragged

FinishReason = Literal["stop", "length", "abort", "turns", "failed", "cut"]
"""Why a sample ended. stop, length, abort: as its engine says. Of samples with several turns besides: turns, it had as
many as it may have; failed, a step of its environment raised an error or took too long. cut: it took longer than
`engine.sample_limit_s`, and ends where it was."""
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
"""The column `finish_reason` holds the place in here."""
TRUNCATED = (FINISH_REASONS.index("length"), FINISH_REASONS.index("cut"))
"""Finish reasons of samples that might have gone on."""
StopMode = Literal["keep", "wait", "abort"]
"""How an engine itself stops; a schedule's `carry` is an abort, too, after which it gets its samples as partials."""


class Clock(Protocol):
    """The runtime's time. Seconds since the run began; a virtual clock jumps, a real one passes."""

    def now(self) -> float:
        """Seconds since the run began."""

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The draw itself is keyed by (run seed, sample id, position), never by engine or time."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A response, with the policy version that sampled each token.

    tokens: int64 [L], the stop token included where one ended it; log_probs: float32 [L], log-probability of each
    sampled token under the distribution it was drawn from; versions: int32 [L]. Times are seconds on the run's clock:
    started_at: as it got a slot; first_token_at: as its first token was there; NaN: not known.

    mask: bool [L], False where an environment wrote and nothing was sampled; there log_probs are 0, and versions that
    of the token before. None: all was sampled. Engines need not fill in what follows, nor it; failure:
    why its environment failed, where finish_reason is "failed". routes: [R, layers * k], the experts that the
    first R tokens of prompt and response went to when what follows each was sampled; from engines that are asked.
    """

    sample_id: int
    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    started_at: float
    finished_at: float
    mask: np.ndarray | None = None
    turns: int = 1
    environment_reward: float = math.nan
    failure: str = ""
    first_token_at: float = math.nan
    routes: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Tokens that it has."""
        return len(self.tokens)

    @property
    def sampled(self) -> int:
        """Tokens of these that an engine sampled: not those that an environment wrote."""
        return self.length if self.mask is None else int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Request:
    """A sample to generate. prompt: int64 [P]. `partial` is what to go on from, losing no token: an aborted completion,
    or one that stopped, with what its environment answered behind it. `sampling`: of this sample, where it is not the
    engine's."""

    sample_id: int
    prompt: np.ndarray
    partial: Completion | None = None
    sampling: Sampling | None = None

    def after(self, aborted: Completion) -> Request:
        """The rest of this request, of which an engine gave this back; all of it, where it had no token yet."""
        if not len(aborted.tokens):
            return self
        mask = None if self.partial is None else self.partial.mask
        if mask is not None:
            mask = np.concatenate([mask, np.ones(len(aborted.tokens) - len(mask), np.bool_)])
        return replace(self, partial=replace(aborted, mask=mask))


@dataclass(frozen=True, slots=True)
class CarriedSample:
    """A sample on its way from one engine to another, in this row of a partition of the queue. tokens: that it has;
    left_s: seconds that it may still take, None: as long as it likes."""

    request: Request
    partition: str
    row: int
    tokens: int
    left_s: float | None = None


class TransferError(RuntimeError):
    """Weights did not arrive whole: a peer died, a wait timed out, a tensor is damaged. Another attempt may succeed.

    A receiver that did not get them keeps the version that it had; all ends of the transfer have to connect again.
    """


class EngineDied(RuntimeError):
    """The process behind an engine is gone, though the worker that drives it is there. The message names the engine."""


class RolloutEngine(Protocol):
    """One replica that samples responses with continuous batching and streams each out as it finishes."""

    @property
    def slots(self) -> int:
        """How many samples it generates at a time."""

    @property
    def version(self) -> int:
        """The policy version whose weights it holds."""

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, unfinished samples' too, as far as it knows: more whenever it makes progress."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they start as slots become free, in order, unless paused."""

    async def finished(self) -> list[Completion]:
        """Wait until at least one sample is done, and return all that are done and were not returned before."""

    @property
    def running(self) -> int:
        """Samples that hold a slot."""

    @property
    def waiting(self) -> int:
        """Samples submitted that hold no slot yet."""

    async def pause(self, mode: StopMode) -> None:
        """Stop generating. keep: running samples stay as they are; wait: start nothing new and let the running ones
        finish first; abort: running and waiting samples are returned by `finished` with reason "abort"."""

    def drop_cache(self) -> None:
        """Forget the KV cache; running samples recompute it from their tokens when generation resumes."""

    async def resume(self) -> None:
        """Generate again, under whatever weights are loaded now."""

    async def cut(self, sample_ids: Collection[int]) -> None:
        """End those of these samples that it has as soon as they have a token: `finished` returns them with reason
        "cut", or as they ended by themselves meanwhile. Returns when that is under way. Of an engine that is not
        paused, and only where `engine.sample_limit_s` is set."""

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by (name, full tensor) pairs; the engine must be paused or idle.

        If the iterable raises, the engine keeps its version. One that puts weights in place as they come refuses to
        generate then, until a complete set has been loaded; it never serves a mixture. A `ReceivingEngine` that joined
        gets `FromTrainer` for them; it raises TransferError where they did not arrive whole.
        """

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give the device back: release the KV cache and move the weights to the host. Paused or idle engines only.

        keep_weights: False allows to forget them, since new ones are loaded before it is to generate again; until then
        an engine that forgot refuses to.
        """

    async def wake(self) -> None:
        """Take the device again; does nothing where the engine is awake."""

    async def close(self) -> None:
        """Stop and release everything, whatever state the engine is in."""


@dataclass(frozen=True)
class TransferOffer:
    """How a process of an engine becomes a receiver of the trainer's weights.

    join: import path of a function of (data, number of the receiver, device, the receiver before it or None) that
    returns one: its `receive(version)` yields (name, full tensor) pairs, each valid until the next one is asked for.
    shapes: of all that travels, by name.
    """

    join: str
    data: bytes
    shapes: Mapping[str, tuple[int, ...]]


class FromTrainer:
    """Stands in `load_weights` for weights that processes of the engine receive themselves, where they joined."""

    def __iter__(self) -> FromTrainer:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        """No pair: none comes by this process."""
        raise StopIteration


@runtime_checkable
class ReceivingEngine(Protocol):
    """A rollout engine whose processes receive the trainer's weights themselves; it may be given them, too."""

    @property
    def ends(self) -> int:
        """Processes that hold the model, or a part of it: each is a receiver. 0 where they cannot be."""

    async def join(self, offer: TransferOffer, number: int) -> None:
        """Let its processes become receivers `number` and those after it. Returns when all have met the senders.

        Raises TransferError where they did not meet, ValueError where what travels does not fit the model.
        """


class Scorer(Protocol):
    """A policy that scores tokens and samples none."""

    async def log_probs(self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None) -> Ragged:
        """Log-probability of every response token, at the sampling temperature: float32, lengths of `responses`.
        routes: as of `TrainBatch`."""

    async def gradient_squares(
        self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None
    ) -> tuple[Ragged, Ragged]:
        """Log-probabilities, and from the same pass the square of each one's gradient by the logits over the
        temperature, 1 - 2 p(token) + the sum of p^2 over the vocabulary: float32, lengths of `responses`."""


class LogProbEngine(Scorer, Protocol):
    """A scorer with weights of its own."""

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, as `RolloutEngine.load_weights` does."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One micro-batch. prompts, responses, behaviour_log_probs, versions: a value per token; advantages: float32, a
    value per token, or [k] where all tokens of a response have the same one.

    old_log_probs come with the version that computed them (int32 [k]); both and ref_log_probs may be absent.
    proximal_log_probs: by the trainer's weights before the batch's first step, where the loss is to stay near these.
    mask: bool, a value per token: those that the policy sampled, and learns from; None is all of them. lags: int32, a
    value per token: versions from the weights that sampled it to those before the batch's first step; None is 0.
    routes: of each sample those of its `Completion`, token after token, which experts replace a router's own choice by;
    None, and beyond these tokens: a router chooses.
    """

    prompts: Ragged
    responses: Ragged
    behaviour_log_probs: Ragged
    versions: Ragged
    advantages: np.ndarray | Ragged
    ref_log_probs: Ragged | None = None
    old_log_probs: Ragged | None = None
    old_versions: np.ndarray | None = None
    proximal_log_probs: Ragged | None = None
    mask: Ragged | None = None
    lags: Ragged | None = None
    routes: Ragged | None = None

    @property
    def advantages_of_tokens(self) -> np.ndarray:
        """float32 [R], response after response."""
        if isinstance(self.advantages, np.ndarray):
            return np.repeat(self.advantages, self.responses.lengths)
        return self.advantages.values


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """One micro-batch of a critic. prompts, responses: int64; values: by the critic that advantages were made with;
    returns: float32; mask: bool, tokens that the policy sampled, and that have a value. A value per token, each."""

    prompts: Ragged
    responses: Ragged
    values: Ragged
    returns: Ragged
    mask: Ragged


class WrittenState(Protocol):
    """The training state of a rank, in host memory."""

    def write(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Write it to files on the disk; by file name, bytes and SHA-256."""


class Remembers(Protocol):
    """One rank of a model in training."""

    async def state(self) -> WrittenState:
        """A copy of what training remembers, of this rank; between two steps."""

    async def load(self, folder: Path) -> None:
        """Go on from what all ranks wrote there, as many as they were."""


class TrainEngine(Remembers, Protocol):
    """One rank of the training world. Every rank makes the same calls in the same order."""

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        """Forward and backward of a micro-batch; gradients of the summed token losses add up. Returns the sums of
        `harness.rl.diagnostics`."""

    def rank_tokens(self, batch: TrainBatch) -> Sequence[int]:
        """Tokens of a micro-batch, prompts and responses: of this rank's, or of each rank's where one stands for a
        world."""

    async def step(self) -> dict[str, float]:
        """Divide the gradients by the sampled tokens of all ranks since the last step, clip, and update; gradients that
        are not finite update nothing, on any rank. {"grad_norm": before clipping, "learning_rate": ..., "skipped": 1 or
        0}"""

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Weights by the names and in the dtype that rollout engines know, tensors or DTensors; tied weights once.
        Every rank has all names in one order; what it has nothing of is on the device meta."""

    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks that have a parameter, or a shard of it, ascending, by the names of those that some ranks have nothing
        of."""


class CriticEngine(Remembers, Protocol):
    """One rank of a model of values, in training. Every rank makes the same calls in the same order."""

    async def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """The value of a response before each of its tokens, by the parameters as they are: float32, lengths of
        `responses`."""

    async def accumulate(self, batch: ValueBatch) -> dict[str, float]:
        """Add gradients as `TrainEngine.accumulate`; returns the sums of `harness.rl.value_loss`."""

    def rank_tokens(self, batch: ValueBatch) -> Sequence[int]:
        """Tokens as `TrainEngine.rank_tokens`."""

    async def step(self) -> dict[str, float]:
        """Take a step as `TrainEngine.step`."""

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters as `TrainEngine.named_parameters`, by the names of a model that classifies tokens."""

    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks as `TrainEngine.holders`."""


@dataclass(frozen=True)
class TrainingSetting:
    """The facts by which rank `rank` of `world` joins a training world, whose ranks meet at `store` and wait for one
    another no longer than timeout_s. algorithm: of the policy; steps: of the run, to whose end the learning rate
    decays; horizon: tokens that a response may have; seed: of the run."""

    model: ModelConfig
    algorithm: AlgorithmConfig
    training: TrainingConfig
    store: Store
    rank: int
    world: int
    device: torch.device
    timeout_s: float
    steps: int = 1
    horizon: int = 1
    seed: int = 0


class TrainingWorld(Protocol):
    """One rank's place in a training world: what `training.engine` names is a class of these, made with a
    `TrainingSetting`. It returns when all ranks have met, and every rank makes the same calls in the same order.

    `training.tensor_parallel * training.pipeline_parallel` neighbours hold one copy of the layers between them: they
    are given the same micro-batches, and answer all calls alike.
    """

    @property
    def policy(self) -> TrainEngine:
        """The policy, with the model's first weights."""

    def scorer(self) -> Scorer:
        """A scorer with the policy's parameters as they are when it is asked, in the arithmetic of training; it may be
        asked between any two calls of the policy."""

    def reference(self) -> Scorer:
        """A scorer with the first weights, spread over the ranks as those of the policy are."""

    def critic(self, algorithm: AlgorithmConfig) -> CriticEngine:
        """A critic in this world, by an optimizer of its own."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work of one device, for the timeline. Seconds on the run's clock."""

    role: str
    engine: str
    kind: str
    start: float
    end: float
    version: int
    iteration: int
