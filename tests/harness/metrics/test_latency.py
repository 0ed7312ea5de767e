"""Latencies of requests: from which times they are made, and of which samples."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest

from harness.metrics.definitions import LATENCIES
from harness.metrics.latency import latencies, latencies_by_engine, latency_metrics
from harness.metrics.samples import SCHEMA, SampleRecord, untrained_record
from tests.support.sample_records import trained_record


def record(number: int, *, engine: int = 0, first: float = 1.5, tokens: int = 5) -> SampleRecord:
    return trained_record(
        [0] * tokens, 0, sample_id=number, engine=engine, times=(0.25, 1.0, 2.5, 3.0), first_token_at=first
    )


def test_a_request_is_parted_at_its_slot_its_first_and_its_last_token() -> None:
    found = latency_metrics([record(0), untrained_record(1, "in_flight", group_id=0, admitted_at=0.0, prompt_tokens=5)])
    expected = dict(zip(LATENCIES, (0.75, 0.5, 1.0 / 4, 1.5), strict=True))
    assert found == {f"latency/{part}_p{n}_s": value for part, value in expected.items() for n in (50, 99)}


def test_what_is_not_known_is_left_out_and_one_token_has_none_after_it() -> None:
    assert set(latency_metrics([record(0, first=math.nan)])) == {
        f"latency/{part}_p{n}_s" for part in ("queueing", "request") for n in (50, 99)
    }
    times = {"admitted_at": 0.0, "started_at": 1.0, "first_token_at": 2.0, "finished_at": 2.0, "response_tokens": 1.0}
    assert np.isnan(latencies({name: np.array([time]) for name, time in times.items()})["between_tokens"])


def test_engines_are_told_apart_in_the_order_of_their_numbers() -> None:
    runs = [[record(0, engine=10), record(1, engine=2)], [record(2)]]
    found = latencies_by_engine(pa.Table.from_pylist([*map(asdict, records)], SCHEMA) for records in runs)
    assert list(found) == ["0", "2", "10"]
    assert all(parts["first_token"].tolist() == [pytest.approx(0.5)] for parts in found.values())
