"""What goes into a simulated rollout engine and what comes out of it, run-length coded: see `rollout`."""

from __future__ import annotations

import numpy as np

from engines.simulated.samples import SimulatedSample
from harness.protocols import Completion, FinishReason, Request


def sample_of(request: Request, length: int) -> SimulatedSample:
    """A sample of `length` tokens in all, less those of its partial.

    Raises ValueError for a prompt that is not one value of 1 or more, and for a partial that is not the sample's own.
    """
    partial = request.partial
    if len(request.prompt) != 1 or request.prompt[0] < 1:
        raise ValueError(
            f"sample {request.sample_id}: a simulated prompt is one value, its number of tokens, which is 1 or more; "
            f"got {request.prompt.tolist()}"
        )
    prompt = int(request.prompt[0])
    if partial is None:
        return SimulatedSample(request.sample_id, prompt, length)
    if partial.sample_id != request.sample_id or partial.finish_reason != "abort":
        raise ValueError(
            f"sample {request.sample_id}: only its own aborted completion can be continued, got one of sample "
            f"{partial.sample_id} that ended by {partial.finish_reason!r}"
        )
    runs = list(zip(partial.versions.tolist(), partial.tokens.tolist(), strict=True))
    before = int(partial.tokens.sum())
    started_at = partial.started_at if before else None  # one that had only waited begins here
    return SimulatedSample(request.sample_id, prompt + before, length - before, runs, started_at)


def completion_of(sample: SimulatedSample, reason: FinishReason, at: float) -> Completion:
    return Completion(
        sample_id=sample.sample_id,
        tokens=np.array([tokens for _, tokens in sample.runs], np.int64),
        log_probs=np.zeros(len(sample.runs), np.float32),
        versions=np.array([version for version, _ in sample.runs], np.int32),
        finish_reason=reason,
        started_at=at if sample.started_at is None else sample.started_at,
        finished_at=at,
    )
