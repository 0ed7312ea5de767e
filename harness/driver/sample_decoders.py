"""What the columns of a trained sample mean: of tokens that were sampled, or of runs of tokens that were simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.metrics.arrivals import runs_of
from harness.metrics.parts import Response
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
from harness.workers.training import TrainedRows


class SampleDecoder(Protocol):
    """What the columns of a trained sample mean: tokens that were sampled, or runs of tokens that were simulated."""

    @property
    def extra_names(self) -> Sequence[str]:
        """Of the extra values that scores may have."""

    def prompt_tokens(self, values: int) -> int:
        """Tokens of a prompt whose column has this many values."""

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> list[SampleRecord]:
        """Records of what one rank trained; the trainer held version `iteration` when the batch started."""

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        """What these samples say of the policy."""

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        """The texts, where there are any."""

    def runs(self, rows: TrainedRows) -> Iterator[list[tuple[int, int]]]:
        """Of each sample: which versions gave it how many tokens, one after another."""


@dataclass(frozen=True)
class TokenDecoder:
    """A value per token, a reward per sample. extra_names: of the values in `score_extras`."""

    extra_names: Sequence[str] = ()

    def prompt_tokens(self, values: int) -> int:
        return values

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> list[SampleRecord]:
        samples = _samples(rows, rows.prompt_tokens, run_tokens=None)
        extras = rows.score_extras.values.reshape(-1, len(self.extra_names)).T if rows.score_extras is not None else ()
        return trained_records(
            samples,
            iteration,
            group_size,
            rows.reward.tolist(),
            rows.exact_match.tolist(),
            dict(zip(self.extra_names, extras, strict=True)),
            rows.reward_failed.tolist(),
        )

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        lengths = length_metrics(records) | truncation_metrics(records)
        rewards = reward_metrics(records) | baseline_metrics(sums)
        return lengths | rewards | policy_metrics(dict(sums)) | custom_metrics(records)

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        of_tokens = (rows.responses, rows.log_probs, rows.loss_mask)
        return zip(rows.rows.tolist(), *(column.rows() for column in of_tokens), strict=True)

    def runs(self, rows: TrainedRows) -> Iterator[list[tuple[int, int]]]:
        return map(runs_of, rows.versions.rows())


@dataclass(frozen=True)
class RunLengthDecoder:
    """A value per run of tokens that one version sampled; nothing was said, so nothing is rewarded."""

    prompt: int
    """Tokens of every prompt."""
    extra_names = ()

    def prompt_tokens(self, values: int) -> int:
        return self.prompt

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> list[SampleRecord]:
        prompts = np.full(rows.rows.size, self.prompt)
        return trained_records(_samples(rows, prompts, rows.responses.values), iteration, group_size)

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        return length_metrics(records)

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        return iter(())

    def runs(self, rows: TrainedRows) -> Iterator[list[tuple[int, int]]]:
        return map(runs_of, rows.versions.rows(), rows.responses.rows())


def _samples(rows: TrainedRows, prompt_tokens: np.ndarray, run_tokens: np.ndarray | None) -> TrainedSamples:
    return TrainedSamples(
        sample_id=rows.rows,
        engine=rows.engine,
        versions=rows.versions.values,
        runs=rows.versions.lengths,
        run_tokens=run_tokens,
        mask=rows.loss_mask.values,
        prompt_tokens=prompt_tokens,
        admitted_at=rows.admitted_at,
        started_at=rows.started_at,
        finished_at=rows.finished_at,
        trained_at=rows.trained_at,
        finish_reason=rows.finish_reason,
        turns=rows.turns,
    )
