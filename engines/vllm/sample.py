"""A sample in vLLM's terms: how it is to be drawn, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from engines.running_sample import RunningSample
from harness.protocols import FinishReason, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams

FIRST_LABEL = "default"
"""What vLLM calls the weights that it was started with."""


def parameters(sample: RunningSample, sampling: Sampling, seed: int) -> SamplingParams:
    """How the rest of `sample` is drawn. vLLM's generator starts anew with each request: so the length of what is there
    is part of its key, or a sample that goes on would repeat its first draws."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    drawn = len(sample.log_probs)
    key = np.random.SeedSequence([seed, sample.sample_id, drawn]).generate_state(1, np.uint64)[0]
    return SamplingParams(
        max_tokens=sampling.max_tokens - drawn,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop_tokens),
        seed=int(key >> np.uint64(1)),
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def extend(sample: RunningSample, generated: CompletionOutput, *, greedy: bool) -> FinishReason:
    """Add what vLLM made of a sample to it; why it ended. A greedy token is certain, where vLLM gives the model's
    log-probability.

    Raises FloatingPointError where log-probabilities are not finite.
    """
    tokens = list(generated.token_ids)
    choices = zip(tokens, generated.logprobs or (), strict=True)
    log_probs = [0.0 if greedy else of_tokens[token].logprob for token, of_tokens in choices]
    versions = versions_of(generated)
    if not np.isfinite(log_probs).all():
        raise FloatingPointError(
            f"sample {sample.sample_id}: log-probabilities under version {versions[-1]} are not finite"
        )
    sample.context += tokens
    sample.log_probs += log_probs
    sample.versions += versions
    return cast(FinishReason, generated.finish_reason)


def versions_of(generated: CompletionOutput) -> list[int]:
    """The version of each token, as vLLM counted it."""
    versions = []
    for span in generated.weight_versions or ():
        versions += [0 if span.version == FIRST_LABEL else int(span.version)] * (span.end - span.start)
    return versions
