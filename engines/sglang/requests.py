"""A sample as an SGLang server is asked for it, and what it says about it."""

from __future__ import annotations

from typing import Any

import numpy as np

from engines.running_sample import RunningSample
from harness.protocols import Sampling


def body_of(sample: RunningSample, sampling: Sampling, *, seed: int, vocabulary: int) -> dict[str, Any]:
    """What /generate is asked for: the rest of the sample, with log-probs of what it is drawn from."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens - len(sample.log_probs),
        "sampling_seed": sampling_seed(seed, sample.sample_id),
        # `ignore_eos` would ignore stop_token_ids too; the model is served without an end-of-sequence token of its own.
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": not sampling.stop_tokens,
    }
    body = {"input_ids": sample.context, "sampling_params": parameters, "return_logprob": True}
    if _restricted(sampling):
        # Plain log-probs are those before the restriction. Its own are told with the tokens that it leaves, where top_k
        # says how many these may be.
        parameters |= {"top_p": sampling.top_p, "top_k": vocabulary}
        body["return_sampling_mask"] = True
    return body


def sampling_seed(seed: int, sample_id: int) -> int:
    """63 bits that (run seed, sample id) determine. The server draws a token by this seed and the token's position: so
    an interrupted sample goes on with the draws that it would have had."""
    return int(np.random.SeedSequence([seed, sample_id]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _restricted(sampling: Sampling) -> bool:
    return sampling.top_p < 1 and sampling.temperature > 0


class Reply:
    """All that the server has said about one request. Its messages repeat what came before, or leave it out: either way
    what is new is at the end."""

    def __init__(self, sampling: Sampling, owner: str) -> None:
        self._sampling, self._owner = sampling, owner
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish: dict[str, Any] | None = None
        self._spans: list[dict[str, Any]] = []

    def add(self, message: dict[str, Any]) -> None:
        """Raises RuntimeError for a message without the log-probs that were asked for; FloatingPointError for such as
        are no numbers."""
        meta = message["meta_info"]
        self.finish = meta["finish_reason"]
        self._spans = meta.get("weight_versions") or self._spans
        new = meta["completion_tokens"] - len(self.tokens)
        if new > 0:
            log_probs = self._log_probs(meta)[-new:]
            if not np.isfinite(log_probs).all():
                raise FloatingPointError(f"{self._owner}: log-probabilities are not finite: {log_probs}")
            self.tokens += message["output_ids"][-new:]
            self.log_probs += log_probs
        if not len(self.tokens) == len(self.log_probs) == meta["completion_tokens"]:
            raise RuntimeError(
                f"{self._owner}: the SGLang server counts {meta['completion_tokens']} tokens, and has sent "
                f"{len(self.tokens)} of them with {len(self.log_probs)} log-probs"
            )

    def versions(self, version: int) -> list[int]:
        """The version of each token, as the server tells; one that does not tell was never updated under a request, so
        it is `version`, which it had at the start."""
        told = [int(span["version"]) for span in self._spans for _ in range(span["start"], span["end"])]
        return told if len(told) == len(self.tokens) else [version] * len(self.tokens)

    def _log_probs(self, meta: dict[str, Any]) -> list[float]:
        if self._sampling.temperature == 0:
            return [0.0] * len(meta["output_token_logprobs"])  # of the only choice
        if not _restricted(self._sampling):
            return [log_prob for log_prob, *_ in meta["output_token_logprobs"]]
        if "output_token_sampling_logprobs" not in meta:
            raise RuntimeError(
                f"{self._owner}: this SGLang server does not tell log-probs under top_p={self._sampling.top_p}; "
                "set algorithm.top_p=1, or use SGLang 0.5.21 or later"
            )
        return list(meta["output_token_sampling_logprobs"])
