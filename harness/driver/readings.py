"""What a trained sample's columns mean: tokens where they were sampled, runs of tokens where they were simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.metrics.samples import (
    SampleRecord,
    TrainedSamples,
    custom_metrics,
    length_metrics,
    reward_metrics,
    trained_records,
)
from harness.rl.diagnostics import policy_metrics
from harness.workers.actor import TrainedRows

Response = tuple[int, np.ndarray, np.ndarray]
"""Sample id, tokens int64 [L], log-probs float32 [L]."""


class Reading(Protocol):
    def prompt_tokens(self, values: int) -> int:
        """Tokens of a prompt whose column has this many values."""

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> list[SampleRecord]:
        """Records of what one rank trained; the trainer held version `iteration` when the batch started."""

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        """What these samples say of the policy."""

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        """The texts, where there are any."""


@dataclass(frozen=True)
class Measured:
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
        )

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        measured = length_metrics(records) | reward_metrics(records) | policy_metrics(dict(sums))
        return measured | custom_metrics(records)

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        return zip(rows.rows.tolist(), rows.responses.rows(), rows.log_probs.rows(), strict=True)


@dataclass(frozen=True)
class Simulated:
    """A value per run of tokens that one version sampled; nothing was said, so nothing is rewarded."""

    prompt: int
    """Tokens of every prompt."""

    def prompt_tokens(self, values: int) -> int:
        return self.prompt

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> list[SampleRecord]:
        prompts = np.full(rows.rows.size, self.prompt)
        return trained_records(_samples(rows, prompts, rows.responses.values), iteration, group_size)

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        return length_metrics(records)

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        return iter(())


def _samples(rows: TrainedRows, prompt_tokens: np.ndarray, run_tokens: np.ndarray | None) -> TrainedSamples:
    return TrainedSamples(
        sample_id=rows.rows,
        engine=rows.engine,
        versions=rows.versions.values,
        runs=rows.versions.lengths,
        run_tokens=run_tokens,
        prompt_tokens=prompt_tokens,
        admitted_at=rows.admitted_at,
        started_at=rows.started_at,
        finished_at=rows.finished_at,
        trained_at=rows.trained_at,
    )
