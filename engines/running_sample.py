"""A sample on its way through an engine, and what it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harness.protocols import Completion, FinishReason, Request, Sampling


@dataclass(slots=True)
class RunningSample:
    """One sample on its way. `context` is the prompt and what was sampled so far; `cached` says whether the keys and
    values of all of it but the last token are in its slot."""

    sample_id: int
    prompt_length: int
    context: list[int]
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    started_at: float | None = None
    uniforms: list[float] = field(default_factory=list)
    cached: bool = False

    @classmethod
    def of(cls, request: Request) -> RunningSample:
        sample = cls(request.sample_id, len(request.prompt), request.prompt.tolist())
        if (partial := request.partial) is not None:
            sample.context += partial.tokens.tolist()
            sample.log_probs += partial.log_probs.tolist()
            sample.versions += partial.versions.tolist()
            sample.started_at = partial.started_at
        return sample

    def finish_reason(self, sampling: Sampling) -> FinishReason | None:
        """Why it is done; None while it is not."""
        if self.log_probs and self.context[-1] in sampling.stop_tokens:
            return "stop"
        return "length" if len(self.log_probs) == sampling.max_tokens else None

    def completion(self, reason: FinishReason, now: float) -> Completion:
        return Completion(
            sample_id=self.sample_id,
            tokens=np.array(self.context[self.prompt_length :], dtype=np.int64),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
            started_at=now if self.started_at is None else self.started_at,
            finished_at=now,
        )
