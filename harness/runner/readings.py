"""What a trained sample's columns mean: tokens where they were sampled, runs of tokens where they were simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from harness.metrics.samples import SampleRecord, length_metrics, reward_metrics, sample_record
from harness.rl.diagnostics import policy_metrics
from harness.roles.actor import TrainedRows

Response = tuple[int, np.ndarray, np.ndarray]
"""Sample id, tokens int64 [L], log-probs float32 [L]."""


class Reading(Protocol):
    def prompt_tokens(self, values: int) -> int:
        """Tokens of a prompt whose column has this many values."""

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> Iterator[SampleRecord]:
        """Records of what one rank trained; the trainer held version `iteration` when the batch started."""

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        """What these samples say of the policy."""

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        """The texts, where there are any."""


class Measured:
    """A value per token, a reward per sample."""

    def prompt_tokens(self, values: int) -> int:
        return values

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> Iterator[SampleRecord]:
        for i, versions in enumerate(rows.versions.rows()):
            yield sample_record(
                **_of_row(rows, i, iteration, group_size),
                versions=versions,
                prompt_tokens=int(rows.prompt_tokens[i]),
                reward=float(rows.reward[i]),
                exact_match=bool(rows.exact_match[i]),
            )

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        return length_metrics(records) | reward_metrics(records) | policy_metrics(dict(sums))

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        return zip(rows.rows.tolist(), rows.responses.rows(), rows.log_probs.rows(), strict=True)


@dataclass(frozen=True)
class Simulated:
    """A value per run of tokens that one version sampled; nothing was said, so nothing is rewarded."""

    prompt: int
    """Tokens of every prompt."""

    def prompt_tokens(self, values: int) -> int:
        return self.prompt

    def records(self, rows: TrainedRows, iteration: int, group_size: int) -> Iterator[SampleRecord]:
        for i, (versions, runs) in enumerate(zip(rows.versions.rows(), rows.responses.rows(), strict=True)):
            yield sample_record(
                **_of_row(rows, i, iteration, group_size),
                versions=versions,
                run_tokens=runs,
                prompt_tokens=self.prompt,
            )

    def metrics(self, records: Sequence[SampleRecord], sums: Mapping[str, float]) -> dict[str, float]:
        return length_metrics(records)

    def responses(self, rows: TrainedRows) -> Iterator[Response]:
        return iter(())


def _of_row(rows: TrainedRows, i: int, iteration: int, group_size: int) -> dict[str, Any]:
    row = int(rows.rows[i])
    return {
        "sample_id": row,
        "group_id": row // group_size,
        "fate": "trained",
        "engine": str(rows.engine[i]),
        "trainer_version": iteration,
        "trained_iteration": iteration,
        "admitted_at": float(rows.admitted_at[i]),
        "started_at": float(rows.started_at[i]),
        "finished_at": float(rows.finished_at[i]),
        "trained_at": float(rows.trained_at[i]),
    }
