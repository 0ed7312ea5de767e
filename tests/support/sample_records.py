"""Records of single samples, made and written by the product's own functions for many."""

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from harness.metrics.parquet import write_table
from harness.metrics.parts import PARTS, SampleParts, read_samples_so_far
from harness.metrics.samples import SampleRecord, TrainedSamples, trained_records
from harness.protocols import FINISH_REASONS, FinishReason


def trained_record(
    versions: Sequence[int],
    iteration: int,
    *,
    sample_id: int = 1,
    group_size: int = 8,
    run_tokens: Sequence[int] | None = None,
    engine: int = 0,
    prompt_tokens: int = 5,
    times: tuple[float, float, float, float] = (0.0, 0.5, 1.0, 2.0),
    first_token_at: float = math.nan,
    reward: float | None = 1.0,
    exact_match: bool | None = True,
    custom: Mapping[str, float] | None = None,
    mask: Sequence[bool] | None = None,
    finish_reason: FinishReason = "stop",
    turns: int = 1,
    keeps_cache: bool = False,
    max_token_staleness: int | None = None,
) -> SampleRecord:
    """A sample that was trained in `iteration`. times: admitted, started, finished, trained."""
    admitted_at, started_at, finished_at, trained_at = (np.array([time]) for time in times)
    given: dict[str, Any] = {"run_tokens": None if run_tokens is None else np.array(run_tokens)}
    samples = TrainedSamples(
        sample_id=np.array([sample_id]), engine=np.array([engine]), versions=np.array(versions, np.int32),
        runs=np.array([len(versions)]), mask=np.array([True] * len(versions) if mask is None else mask),
        prompt_tokens=np.array([prompt_tokens]), admitted_at=admitted_at, started_at=started_at,
        first_token_at=np.array([first_token_at]), finished_at=finished_at, trained_at=trained_at,
        finish_reason=np.array([FINISH_REASONS.index(finish_reason)]), turns=np.array([turns]),
        keeps_cache=keeps_cache, max_token_staleness=max_token_staleness, **given,
    )  # fmt: skip
    extra = {name: np.array([value]) for name, value in (custom or {}).items()}
    (record,) = trained_records(samples, iteration, group_size, [reward], [exact_match], extra)  # type: ignore[list-item]
    return record


def write_samples(path: Path, records: Sequence[SampleRecord]) -> None:
    """samples.parquet, as a run with these samples writes it."""
    names = sorted({name for record in records for name in record.custom})
    with closing(SampleParts(path.parent, names, run_of=None)) as parts:
        parts.samples(records)
    write_table(path, read_samples_so_far(path.parent / PARTS))
    shutil.rmtree(path.parent / PARTS)
