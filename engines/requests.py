"""Running samples, and the requests that every rollout engine refuses."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.config.job import routes_dtype
from harness.config.model_folder import shape_of
from harness.protocols import Clock, Completion, FinishReason, Request, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RouteShape:
    """How engines tell experts. of_token: those that a token goes to, of all layers; experts: of a layer."""

    of_token: int
    experts: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> RouteShape:
        """The shape of a model that has experts."""
        shape = shape_of(model.config, "of this model")
        return cls(shape["layers"] * shape["active_experts"], shape["experts"])


@dataclass(frozen=True)
class Served:
    """A model as an engine's own processes serve it. slots: samples at a time; device: the first of `tensor_parallel`
    that share each layer; routes: whether experts are told."""

    model: PreTrainedModel
    slots: int
    device: torch.device
    tensor_parallel: int = 1
    routes: bool = False

    @property
    def longest(self) -> int:
        """Tokens that a sample may have."""
        return int(self.model.config.max_position_embeddings)


@dataclass(slots=True, eq=False)
class RunningSample:
    """One sample on its way. `context` is the prompt and what was sampled so far; `cached` says whether the keys and
    values of all of it but the last token are in its slot."""

    sampling: Sampling
    sample_id: int
    prompt_length: int
    context: list[int]
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    started_at: float | None = None
    first_token_at: float = math.nan
    given: int = 0  # tokens that were there before it came to this engine
    uniforms: list[float] = field(default_factory=list)
    cached: bool = False
    kept: int = 0  # tokens whose keys and values are in its slot from its last turn
    cut: bool = False  # it is to end as soon as it has a token
    routes: list[np.ndarray] = field(default_factory=list)  # of its first tokens, [.., layers * k], in their order
    routed: int = 0  # tokens whose experts are known

    @classmethod
    def of(cls, request: Request, sampling: Sampling) -> RunningSample:
        """The running sample of a request. sampling: the engine's, for a request without its own."""
        prompt = request.prompt
        sample = cls(request.sampling or sampling, request.sample_id, len(prompt), prompt.tolist())
        if (partial := request.partial) is not None:
            sample.context += partial.tokens.tolist()
            sample.log_probs += partial.log_probs.tolist()
            sample.versions += partial.versions.tolist()
            sample.started_at, sample.first_token_at = partial.started_at, partial.first_token_at
            sample.given = len(partial.tokens)
            if partial.routes is not None:
                sample.keep_routes(partial.routes)
        return sample

    def finish_reason(self) -> FinishReason | None:
        """Reason why it is done; None while it is not."""
        if len(self.log_probs) > self.given and self.context[-1] in self.sampling.stop_tokens:
            return "stop"
        if len(self.log_probs) == self.sampling.max_tokens:
            return "length"
        return "cut" if self.cut and self.log_probs else None

    @property
    def tokens_left(self) -> int:
        """Tokens that the engine may still be asked for."""
        return 1 if self.cut else self.sampling.max_tokens - len(self.log_probs)

    def keep_routes(self, found: np.ndarray) -> None:
        """Add the experts of tokens that follow those that are known, as a completion has them."""
        self.routes.append(found)
        self.routed += len(found)

    def add_routes(self, told: np.ndarray, shape: RouteShape) -> None:
        """Add them as an engine tells them. RuntimeError where these are more tokens than were followed by another."""
        found = told.reshape(-1, shape.of_token).astype(routes_dtype(shape.experts))
        if self.routed + len(found) >= len(self.context):
            known = f"{self.routed} and {len(found)}"
            raise RuntimeError(f"sample {self.sample_id}: experts of {known} tokens, and it has {len(self.context)}")
        self.keep_routes(found)

    def completion(self, reason: FinishReason, now: float) -> Completion:
        """The sample as `RolloutEngine.finished` returns it. now: its end, in seconds of the engine's clock."""
        return Completion(
            sample_id=self.sample_id,
            tokens=np.array(self.context[self.prompt_length :], dtype=np.int64),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            started_at=now if self.started_at is None else self.started_at,
            finished_at=now,
            first_token_at=self.first_token_at,
            routes=np.concatenate(self.routes) if self.routes else None,
        )


def cut(samples: Iterable[RunningSample], sample_ids: Collection[int]) -> list[RunningSample]:
    """Let the named samples end with their next token, and return them."""
    named = [sample for sample in samples if sample.sample_id in sample_ids]
    for sample in named:
        sample.cut = True
    return named


def cut_waiting(waiting: MutableSequence[RunningSample], sample_ids: Collection[int], now: float) -> list[Completion]:
    """Cut samples that have no slot: those that have tokens leave, as completions."""
    ended = [sample for sample in cut(waiting, sample_ids) if sample.log_probs]
    for sample in ended:
        waiting.remove(sample)
    return [sample.completion("cut", now) for sample in ended]


def accepted(
    requests: Sequence[Request], engine: str, *, vocabulary: int, max_length: int, sampling: Sampling
) -> list[RunningSample]:
    """Running samples of all requests, or of none: raises ValueError as `check_request`. sampling: the engine's."""
    for request in requests:
        max_tokens = (request.sampling or sampling).max_tokens
        check_request(request, engine, vocabulary=vocabulary, max_length=max_length, max_tokens=max_tokens)
    return [RunningSample.of(request, sampling) for request in requests]


def check_request(request: Request, engine: str, *, vocabulary: int, max_length: int, max_tokens: int) -> None:
    """Raises ValueError, naming the engine and the sample, where the prompt is empty, leaves the vocabulary, or is too
    long for a model of `max_length` tokens with `max_tokens` more; or where `partial` is not the sample's own."""
    where, prompt = f"engine {engine}, sample {request.sample_id}", request.prompt
    if len(prompt) == 0 or prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ValueError(f"{where}: a prompt needs one or more tokens in 0 ... {vocabulary - 1}, got {prompt.tolist()}")
    if len(prompt) + max_tokens > max_length:
        raise ValueError(
            f"{where}: {len(prompt)} prompt tokens and max_tokens {max_tokens} exceed the model's max_length "
            f"{max_length}; shorten the prompt or lower max_tokens"
        )
    if (partial := request.partial) is not None:
        check_partial(request.sample_id, partial, where)
        if len(partial.tokens) >= max_tokens:
            raise ValueError(f"{where}: its {len(partial.tokens)} tokens leave none of max_tokens {max_tokens}")


def check_partial(sample_id: int, partial: Completion, where: str) -> None:
    """Raises ValueError unless it is the sample's own, and was aborted, or stopped for its environment to answer."""
    if partial.sample_id != sample_id or partial.finish_reason not in ("abort", "stop"):
        raise ValueError(
            f"{where}: only its own aborted completion (or one that stopped) can be continued, got one of sample "
            f"{partial.sample_id} that ended by {partial.finish_reason!r}"
        )


def require_still(action: str, engine: str, *, paused: bool, running: int, waiting: int) -> None:
    """Raises RuntimeError, naming the engine and the action, unless it is paused or idle."""
    if not paused and (running or waiting):
        raise RuntimeError(
            f"engine {engine}: {action} needs a paused or idle engine, but {running} samples run and "
            f"{waiting} wait; call pause() first"
        )


class SlotEngine:
    """Base of rollout engines that hold each running sample in a slot. A subclass generates; it sets `_changed` where
    something happened that `finished` or a pause may wait for.

    model: its config says which token ids there are, and how long a sample may be; not kept. slots: samples at a time.

    Its attributes are more than a dozen: they are the parts of one state, which every engine had to itself before.
    """

    def __init__(self, model: PreTrainedModel, *, name: str, slots: int, sampling: Sampling, clock: Clock) -> None:
        self.name, self.slots, self.sampling, self.version = name, slots, sampling, 0
        self._clock = clock
        self._vocabulary, self._max_length = model.config.vocab_size, model.config.max_position_embeddings
        self._waiting: deque[RunningSample] = deque()
        self._running: list[RunningSample] = []
        self._done: list[Completion] = []
        self._changed = asyncio.Event()
        self._admitting, self._paused, self._closed = True, False, False

    @property
    def running(self) -> int:
        """Samples that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Samples that were submitted and have no slot yet."""
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError as `check_request`."""
        limits = {"vocabulary": self._vocabulary, "max_length": self._max_length}
        self._waiting += accepted(requests, self.name, sampling=self.sampling, **limits)
        self._changed.set()

    async def cut(self, sample_ids: Collection[int]) -> None:
        """Let running samples end with their next token; waiting ones that have some end at once."""
        self._cut(sample_ids)

    def _cut(self, sample_ids: Collection[int]) -> list[RunningSample]:
        """Do so, and return those that run."""
        self._done += cut_waiting(self._waiting, sample_ids, self._clock.now())
        self._changed.set()
        return cut(self._running, sample_ids)

    def _next_to_start(self) -> RunningSample | None:
        """Give a free slot to the sample that waits longest; None where there is none of either, or none may start."""
        if not self._admitting or not self._waiting or len(self._running) >= self.slots:
            return None
        sample = self._waiting.popleft()
        if sample.started_at is None:
            sample.started_at = self._clock.now()
        self._running.append(sample)
        return sample

    def _finish(self, sample: RunningSample, reason: FinishReason) -> None:
        """Take it out of its slot."""
        self._running.remove(sample)
        self._done.append(sample.completion(reason, self._clock.now()))

    def _abort_all(self) -> None:
        """End all samples with reason "abort", running ones first."""
        now = self._clock.now()
        self._done += [sample.completion("abort", now) for sample in (*self._running, *self._waiting)]
        self._forget_all()

    def _forget_all(self) -> None:
        self._running.clear()
        self._waiting.clear()

    def _take_done(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    async def _change(self) -> None:
        """Wait for the next one."""
        self._changed.clear()
        await self._changed.wait()

    def _require_still(self, action: str) -> None:
        """Raises RuntimeError, naming the engine and the action, unless it is paused or idle."""
        require_still(action, self.name, paused=self._paused, running=self.running, waiting=self.waiting)
