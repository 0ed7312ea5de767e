"""Decoders of the columns of a trained sample: of tokens that were sampled, or of runs of tokens that were
simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.metrics.arrivals import runs_of
from harness.metrics.samples import (
    SampleRecord,
    TrainedSamples,
    baseline_metrics,
    custom_metrics,
    length_metrics,
    reward_metrics,
    trained_records,
    truncation_metrics,
)
from harness.rl.diagnostics import policy_metrics
from harness.transfer_queue import Batch
from harness.workers.dataflow import texts_of


class SampleDecoder(Protocol):
    """Reads the columns of trained samples. samples: their ids, int64 [k], in the order of the batch's rows."""

    @property
    def extra_names(self) -> Sequence[str]:
        """Names of the extra values that scores may have."""

    @property
    def has_tokens(self) -> bool:
        """Whether responses are tokens, which can be kept."""

    def prompt_tokens(self, values: int) -> int:
        """Tokens of a prompt whose column has this many values."""

    def records(
        self, batch: Batch, samples: np.ndarray, trained_at: np.ndarray, iteration: int, group_size: int
    ) -> list[SampleRecord]:
        """Records of rows; the trainer held version `iteration` when the batch started. trained_at: seconds, float64
        [k]."""

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics that these samples, and the sums of their training, give of the policy."""

    def runs(self, batch: Batch) -> Iterator[list[tuple[int, int]]]:
        """Runs of each sample, one after another: (version, tokens)."""


@dataclass(frozen=True)
class TokenDecoder:
    """A value per token, a reward per sample. extra_names: of the values in `score_extras`."""

    extra_names: Sequence[str] = ()
    has_tokens = True

    def prompt_tokens(self, values: int) -> int:
        return values

    def records(
        self, batch: Batch, samples: np.ndarray, trained_at: np.ndarray, iteration: int, group_size: int
    ) -> list[SampleRecord]:
        trained = _samples(batch, samples, trained_at, batch.ragged("prompt").lengths, run_tokens=None)
        extras: Sequence[np.ndarray] = ()
        if self.extra_names:
            extras = list(batch.ragged("score_extras").values.reshape(-1, len(self.extra_names)).T)
        return trained_records(
            trained,
            iteration,
            group_size,
            batch.dense("reward").tolist(),
            batch.dense("exact_match").tolist(),
            dict(zip(self.extra_names, extras, strict=True)),
            texts_of(batch.ragged("reward_failure")),
        )

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        lengths = length_metrics(records) | truncation_metrics(records)
        rewards = reward_metrics(records) | baseline_metrics(sums)
        return lengths | rewards | policy_metrics(dict(sums)) | custom_metrics(records)

    def runs(self, batch: Batch) -> Iterator[list[tuple[int, int]]]:
        return map(runs_of, batch.ragged("versions").rows())


@dataclass(frozen=True)
class RunLengthDecoder:
    """A value per run of tokens that one version sampled; nothing was said, so nothing is rewarded."""

    prompt: int
    """Tokens of every prompt."""
    extra_names = ()
    has_tokens = False

    def prompt_tokens(self, values: int) -> int:
        return self.prompt

    def records(
        self, batch: Batch, samples: np.ndarray, trained_at: np.ndarray, iteration: int, group_size: int
    ) -> list[SampleRecord]:
        prompts = np.full(samples.size, self.prompt)
        trained = _samples(batch, samples, trained_at, prompts, batch.ragged("response").values)
        return trained_records(trained, iteration, group_size)

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        return length_metrics(records)

    def runs(self, batch: Batch) -> Iterator[list[tuple[int, int]]]:
        return map(runs_of, batch.ragged("versions").rows(), batch.ragged("response").rows())


def _samples(
    batch: Batch, samples: np.ndarray, trained_at: np.ndarray, prompt_tokens: np.ndarray, run_tokens: np.ndarray | None
) -> TrainedSamples:
    versions = batch.ragged("versions")
    of_rows = ("engine", "admitted_at", "started_at", "finished_at", "finish_reason", "turns")
    return TrainedSamples(
        sample_id=samples,
        versions=versions.values,
        runs=versions.lengths,
        run_tokens=run_tokens,
        mask=batch.ragged("loss_mask").values,
        prompt_tokens=prompt_tokens,
        trained_at=trained_at,
        **{name: batch.dense(name) for name in of_rows},
    )
