"""Lags of one sample, the metrics over samples, and samples.parquet."""

import math
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics.definitions import LATENCIES
from harness.metrics.parquet import read_columns
from harness.metrics.parts import read_growing
from harness.metrics.samples import (
    FILE_SCHEMA,
    SCHEMA,
    Fate,
    SampleRecord,
    TrainedSamples,
    custom_metrics,
    latencies,
    latencies_by_engine,
    latency_metrics,
    length_metrics,
    masked_metrics,
    read_samples,
    record_of,
    reward_metrics,
    staleness_metrics,
    trained_records,
    truncation_metrics,
    untrained_record,
)
from tests.support.project import python
from tests.support.sample_records import trained_record, write_samples

COLUMNS = (
    "sample_id group_id engine fate trained_iteration version_first version_last lag_worst lag_mean lag_in_flight "
    "lag_in_queue span cache_age admitted_at started_at first_token_at finished_at trained_at prompt_tokens "
    "response_tokens stale_tokens reward exact_match finish_reason turns environment_tokens reward_failed failure"
).split()


def waiting(sample_id: int = 2, fate: Fate = "in_flight") -> SampleRecord:
    return untrained_record(sample_id, fate, group_id=0, admitted_at=0.5, prompt_tokens=5)


def test_lag_is_taken_apart_into_flight_and_queue_and_runs_weigh_their_tokens() -> None:
    record = trained_record([3, 3, 4, 6], 7, sample_id=17, engine=1)
    assert (record.sample_id, record.group_id, record.engine, record.fate) == (17, 2, "1", "trained")
    assert (record.version_first, record.version_last, record.span) == (3, 6, 3)
    assert (record.lag_worst, record.lag_in_flight, record.lag_in_queue) == (4, 3, 1)
    assert record.lag_mean == (4 + 4 + 3 + 1) / 4
    assert (record.trained_iteration, record.response_tokens) == (7, 4)
    by_run, by_token = trained_record([1, 3], 4, run_tokens=[30, 10]), trained_record([1] * 30 + [3] * 10, 4)
    assert by_run == by_token and by_run.lag_mean == 2.5


TOKENS = st.lists(st.integers(0, 20), min_size=1, max_size=12).map(sorted)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(0, 5))
def test_lags_of_many_samples_at_once_are_those_of_their_tokens(drawn: list[list[int]], waited: int) -> None:
    trainer = max(map(max, drawn)) + waited
    values = np.concatenate([np.array(versions) for versions in drawn])
    tokens = {"versions": values, "mask": np.ones(len(values), np.bool_), "run_tokens": None}
    samples = many(len(drawn), runs=np.array([len(versions) for versions in drawn]), **tokens)
    records = trained_records(samples, trainer, 2, np.arange(len(drawn)).tolist(), [False] * len(drawn))
    for i, (record, versions) in enumerate(zip(records, drawn, strict=True)):
        lags = [trainer - version for version in versions]
        assert (record.sample_id, record.reward, record.prompt_tokens) == (4 + i, i, 5 + i)
        assert record.lag_worst == max(lags) and record.span == len(set(versions))
        assert record.lag_in_flight is not None and record.lag_in_queue is not None
        assert record.lag_in_flight + record.lag_in_queue == record.lag_worst
        assert record.lag_in_queue == min(lags) and record.response_tokens == len(lags)
        assert record.lag_mean == pytest.approx(sum(lags) / len(lags))


def test_what_an_environment_wrote_counts_in_no_lag_and_no_length() -> None:
    record = trained_record([1, 1, 1, 4, 4], 5, mask=[True, False, False, True, True], finish_reason="turns", turns=2)
    alone = trained_record([1, 4, 4], 5)
    assert (record.response_tokens, record.environment_tokens, record.lag_mean) == (3, 2, alone.lag_mean)
    assert (record.finish_reason, record.turns, alone.finish_reason, alone.turns) == ("turns", 2, "stop", 1)
    by_run = trained_record(
        [1, 1, 4], 5, run_tokens=[1, 2, 2], mask=[True, False, True], finish_reason="turns", turns=2
    )
    assert by_run == record
    with pytest.raises(ValueError, match="sample 1 was trained but has no token that was sampled"):
        trained_record([1, 1], 5, mask=[False, False])


TURN = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2))


@given(st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 6))
def test_the_age_of_a_cache_is_that_of_its_entries(drawn: list[list[tuple[int, int, int]]], prompt: int) -> None:
    """Of each turn tokens are sampled, weights come after the first of them, and an environment writes; then weights
    come once more, and an engine that does not run the sample meanwhile keeps nothing of it."""
    versions, mask, expected = [], [], []
    for turns in drawn:
        version, entries, ages = 0, [0] * prompt, list[int | float]()
        own: list[tuple[int, bool]] = []
        for said, newer, written in turns:
            for number in range(said):
                ages.append(version - sum(entries) / len(entries))
                own.append((version, True))
                version += newer * (number == 0 < said - 1)
                entries.append(version)
            if written:
                own += [(version, False)] * written
                version += 1
                entries = [version] * (len(entries) + written)
        versions.append([one for one, _ in own])
        mask += [sampled for _, sampled in own]
        expected.append(sum(ages) / len(ages))
    tokens = {"versions": np.concatenate(versions), "mask": np.array(mask), "run_tokens": None, "keeps_cache": True}
    runs, prompts = np.array([len(one) for one in versions]), np.full(len(drawn), prompt)
    samples = many(len(drawn), runs=runs, prompt_tokens=prompts, **tokens)
    found = [record.cache_age for record in trained_records(samples, 99, 2)]
    assert found == pytest.approx(expected)
    dropped = replace(samples, keeps_cache=False)
    assert [record.cache_age for record in trained_records(dropped, 99, 2)] == [0] * len(drawn)


def test_tokens_that_lag_by_more_than_the_limit_are_counted_as_masked_where_the_policy_sampled_them() -> None:
    tokens, mask = [1, 1, 2, 3, 5], [True, True, False, True, True]
    counts = [trained_record(tokens, 5, mask=mask, max_token_staleness=most).stale_tokens for most in (None, 0, 2, 4)]
    assert counts == [0, 3, 2, 0]
    by_run = trained_record(
        [1, 2, 3, 5], 5, run_tokens=[2, 1, 1, 1], mask=[True, False, True, True], max_token_staleness=2
    )
    assert by_run.stale_tokens == 2 and masked_metrics([by_run, waiting()]) == {"token_ledger/masked": 2 / 4}


def test_a_sample_that_was_not_trained_has_no_lag_and_no_metrics() -> None:
    record = waiting()
    known = {"sample_id", "group_id", "fate", "admitted_at", "prompt_tokens", "response_tokens", "custom"}
    assert {field.name for field in fields(SampleRecord) if getattr(record, field.name) is not None} == known
    assert record.response_tokens == 0
    with pytest.raises(ValueError, match="no trained sample"):
        staleness_metrics([waiting()])
    with pytest.raises(ValueError, match="have no reward"):
        reward_metrics([trained_record([0], 0, reward=None)])
    with pytest.raises(ValueError, match="none of the 1 trained samples could be scored"):
        reward_metrics([replace(trained_record([0], 0, reward=None), reward_failed=True)])
    assert SCHEMA.names == COLUMNS and [field.name for field in fields(SampleRecord)] == [*COLUMNS, "custom"]


def test_staleness_and_reward_metrics_count_every_trained_sample_once_and_no_other() -> None:
    records = [trained_record([0, 0, 0, 2], 2), trained_record([1], 2), waiting()]
    assert staleness_metrics(records, steps_per_version=3) == {
        "staleness/mean": (1.5 + 1.0) / 2,
        "staleness/max": 2.0,
        "staleness/steps_mean": 3 * (1.5 + 1.0) / 2,
        "staleness/steps_max": 6.0,
        "staleness/in_flight_mean": 1.0,
        "staleness/in_queue_mean": 0.5,
        "staleness/span_max": 2.0,
        "staleness/cache_mean": 0.0,
    }
    short, long = trained_record([0] * 2, 0, reward=0.5, exact_match=False), trained_record([0] * 102, 0)
    cut = replace(long, finish_reason="length")
    failed = replace(trained_record([0], 0, reward=0.0, exact_match=False), reward_failed=True)
    assert reward_metrics([short, long, waiting()]) == {
        "reward/mean": 0.75, "reward/exact_match": 0.5, "reward/correct_and_complete": 0.5,
        "reward/failed": 0.0, "reward/same_in_group": 0.0,
    }  # fmt: skip
    assert reward_metrics([short, long, cut, waiting()])["reward/correct_and_complete"] == 1 / 3, (
        "cut off is not complete"
    )
    assert reward_metrics([failed, failed, waiting()])["reward/failed"] == 2.0
    unscored = replace(
        failed, reward=None, exact_match=None, group_id=7
    )  # in no mean, and in a group that says nothing
    assert reward_metrics([short, long, unscored, unscored]) == {
        "reward/mean": 0.75, "reward/exact_match": 0.5, "reward/correct_and_complete": 0.25,
        "reward/failed": 2.0, "reward/same_in_group": 0.5,
    }  # fmt: skip
    assert length_metrics([short, long, waiting()]) == {"response_length/mean": 52.0, "response_length/p99": 101.0}
    rewards = [(0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0), (2, 0.0), (2, 0.0), (3, 0.25)]
    records = [replace(trained_record([0], 0, reward=reward), group_id=group) for group, reward in rewards]
    records[2] = replace(records[2], finish_reason="length")
    assert reward_metrics([*records, waiting()])["reward/same_in_group"] == 3 / 4
    assert truncation_metrics([*records, waiting()]) == {"response_length/truncated": 1 / 7}


def test_parquet_gives_back_the_rows_by_sample_and_of_none_the_columns(tmp_path: Path) -> None:
    records = [waiting(i, fate) for i, fate in enumerate(get_args(Fate)[1:])]
    records.append(trained_record([1, 2], 3, sample_id=9))
    path = tmp_path / "samples.parquet"
    write_samples(path, records[::-1])
    table = read_samples(path)
    assert [record_of(row) for row in table.to_pylist()] == records
    assert table.schema.equals(FILE_SCHEMA)
    assert [file.name for file in tmp_path.iterdir()] == ["samples.parquet"]
    write_samples(tmp_path / "samples.parquet", [])
    assert read_samples(tmp_path / "samples.parquet").column_names == FILE_SCHEMA.names
    empty = np.zeros(0, np.int64)
    none = TrainedSamples(*[empty] * (len(fields(TrainedSamples)) - 1))
    assert trained_records(none, 3, 2) == []


def test_extra_values_of_scores_are_columns_and_means_over_the_samples_that_have_them(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    extra = {"copied": np.array([1.0, np.nan, 0.5]), "style/caps": np.array([2.0, 4.0, 0.0])}
    records = [*trained_records(many(3), 3, 2, [1.0] * 3, [True] * 3, extra), waiting()]
    assert custom_metrics(records) == {"custom/copied": 0.75, "custom/style/caps": 2.0}
    write_samples(path, records)
    table = read_samples(path)
    assert table.column_names == [*FILE_SCHEMA.names, "custom/copied", "custom/style/caps"]
    assert table["custom/copied"].to_pylist() == [None, 1.0, None, 0.5]  # by sample id: the first is in flight
    assert sorted(map(record_of, table.to_pylist()), key=lambda r: -r.sample_id) == sorted(
        records, key=lambda r: -r.sample_id
    )


def test_optional_columns_may_be_missing_and_required_ones_may_not(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    write_samples(path, [trained_record([0], 1, sample_id=7)])
    whole = read_samples(path)
    pq.write_table(whole.drop_columns(["span"]).append_column("later", pa.array(["kept"])), path)
    read = read_samples(path)
    assert read.column_names == [*FILE_SCHEMA.names, "later"] and read["later"].to_pylist() == ["kept"]
    assert read["span"].to_pylist() == [None] and record_of(read.to_pylist()[0]).sample_id == 7
    pq.write_table(whole.drop_columns(["fate"]), path)
    with pytest.raises(ValueError, match="column fate .string. is missing"):
        read_samples(path)
    pq.write_table(whole.set_column(0, "sample_id", pa.array(["7"])), path)
    with pytest.raises(ValueError, match="column sample_id .int64. is missing or of another type"):
        read_samples(path)


def many(count: int, **changes: object) -> TrainedSamples:
    """Some samples, the first three of 2, 1 and 3 runs."""
    columns = {
        "sample_id": 4 + np.arange(count),
        "engine": np.arange(count) % 2,
        "versions": np.array([0, 2, 1, 1, 1, 2], np.int32),
        "runs": np.array([2, 1, 3]),
        "run_tokens": np.array([10, 30, 7, 1, 2, 3]),
        "mask": np.ones(6, np.bool_),
        "finish_reason": np.zeros(count, np.int8),
        "turns": np.ones(count, np.int32),
        "prompt_tokens": 5 + np.arange(count),
    }
    times = {
        name: np.arange(count) + 1.0
        for name in ("admitted_at", "started_at", "first_token_at", "finished_at", "trained_at")
    }
    return TrainedSamples(**(columns | times | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": np.array([2, 1, 1, 1, 1, 2])}, "sample 4 has token versions that decrease"),
        ({"versions": np.array([0, 2, -1, 1, 1, 2])}, "sample 5 has a negative token version"),
        ({"versions": np.array([0, 2, 1, 1, 1, 4])}, "sample 6 has a token newer than version 3"),
        ({"runs": np.array([3, 0, 3])}, "sample 5 was trained but has no token"),
    ],
)
def test_of_many_samples_the_first_that_is_off_is_named(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained_records(many(3, **changes), 3, 2)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"engine": pa.DictionaryArray.from_arrays(np.zeros(1_100_000, np.int32), ["x" * 1000])}, "would take 1,1"),
        ({"sample_id": np.zeros(140_000_000, np.int64)}, "would take 1,1"),
        ({"engine": [["x"]]}, "engine.list.element holds neither numbers nor texts"),
        ({"engine": pa.array([b"x" * 99], pa.binary(99))}, "engine holds neither numbers nor texts"),
    ],
    ids=["one long text in many rows", "one number in many rows", "texts within lists", "bytes of one length"],
)
def test_a_table_that_is_small_on_the_disk_alone_is_refused_before_it_is_in_memory(
    table: dict[str, object], why: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(table), tmp_path / "samples.parquet", store_schema=False)
    assert (tmp_path / "samples.parquet").stat().st_size < 1 << 20
    with pytest.raises(ValueError, match=why):
        read_columns(tmp_path / "samples.parquet")


def test_a_table_with_any_byte_of_its_end_changed_is_read_or_refused(tmp_path: Path) -> None:
    """In a process of its own, which pyarrow ends where it is asked about what contradicts itself."""
    path = tmp_path / "samples.parquet"
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", None]}), path, store_schema=False)
    program = f"""
from pathlib import Path
from harness.metrics.parquet import read_columns
path = Path({str(path)!r})
whole, refused = path.read_bytes(), 0
for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole)):
    for byte in (0, 2, 18, whole[at] ^ 8, 255):
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        try:
            read_columns(path)
        except (ValueError, OSError):
            refused += 1
print(refused)
"""
    done = python("-c", program)
    assert done.returncode == 0 and int(done.stdout) > 100, done.stderr[-2000:]


def test_a_pipe_is_no_table_and_not_waited_for(tmp_path: Path) -> None:
    for name, read in {"samples.parquet": read_columns, "samples.arrows": read_growing}.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match="is no file"):
            read(tmp_path / name)


def record(number: int, *, engine: int = 0, first: float = 1.5, tokens: int = 5) -> SampleRecord:
    return trained_record(
        [0] * tokens, 0, sample_id=number, engine=engine, times=(0.25, 1.0, 2.5, 3.0), first_token_at=first
    )


def test_a_request_is_parted_at_slot_first_and_last_token_and_what_is_unknown_is_left_out() -> None:
    found = latency_metrics([record(0), untrained_record(1, "in_flight", group_id=0, admitted_at=0.0, prompt_tokens=5)])
    expected = dict(zip(LATENCIES, (0.75, 0.5, 1.0 / 4, 1.5), strict=True))
    assert found == {f"latency/{part}_p{n}_s": value for part, value in expected.items() for n in (50, 99)}
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
