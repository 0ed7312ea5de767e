"""Shared memory: what a writer writes a reader reads, nothing of it has a name, and no writer is believed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.transfer_queue import Column, ColumnSpec, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment, Frame, Part
from harness.transfer_queue.storage.protocol import QueueSession
from harness.transfer_queue.storage.shm import ShmBackend, ShmStorage, ShmStore, stretches
from tests.support.examples import examples
from tests.support.remote_queue import descriptors

SPECS = {
    "tokens": ColumnSpec("int64", ragged=True),
    "mask": ColumnSpec("uint8", ragged=True),
    "log_probs": ColumnSpec("float32", ragged=True),
    "image": ColumnSpec("float32", shape=(3, 5)),
    "reward": ColumnSpec("float32"),
}


def columns(rows: int, seed: int, longest: int = 40) -> dict[str, Column]:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest + 1, rows)
    total = int(lengths.sum())
    return {
        "tokens": Ragged(random.integers(0, 1 << 40, total), lengths),
        "mask": Ragged(random.integers(0, 2, total).astype(np.uint8), lengths),
        "log_probs": Ragged(random.random(total).astype(np.float32), lengths),
        "image": random.random((rows, 3, 5)).astype(np.float32),
        "reward": random.random(rows).astype(np.float32),
    }


@contextmanager
def pair(inline_bytes: int = 0, mapped_bytes: int = 1 << 20) -> Iterator[tuple[ShmStorage, ShmStore]]:
    """A writer, and the server's side; every descriptor is closed in the end."""
    before = descriptors()
    backend = ShmBackend(inline_bytes, mapped_bytes)
    storage, store = backend.storage(QueueSession("queue", 1)), backend.store("queue")
    yield storage, store
    storage.close()
    store.close()
    assert descriptors() == before


def write(storage: ShmStorage, store: ShmStore, partition: str, described: dict[str, Column]) -> Frame:
    frame = storage.write(partition, described)
    segment = storage.unannounced(partition)
    if segment is not None:
        store.open(1, partition, segment.unit, segment.descriptor)
    store.check(1, partition, frame)
    return frame


def read(storage: ShmStorage, store: ShmStore, frames: list[Frame], parts: list[Part]) -> dict[str, Column]:
    rows = np.arange(sum(stop - start for _, start, stop in parts[0].runs))
    assignment = BatchAssignment(0, "p", rows, tuple(frames), tuple(parts))
    placed, passed = store.placed(assignment)
    here = [f._replace(place=(passed[f.place[0]], f.place[1])) if isinstance(f.place, tuple) else f for f in placed]
    return storage.read(BatchAssignment(0, "p", rows, tuple(here), tuple(parts)), SPECS)


def same(got: Column, wanted: Column) -> bool:
    if isinstance(wanted, Ragged):
        assert isinstance(got, Ragged)
        return np.array_equal(got.values, wanted.values) and np.array_equal(got.lengths, wanted.lengths)
    return np.array_equal(got, wanted)


def part_of(column: Column, start: int, stop: int) -> Column:
    return Ragged.from_rows(column.rows()[start:stop]) if isinstance(column, Ragged) else column[start:stop]


def joined(pieces: list[Column]) -> Column:
    if isinstance(pieces[0], Ragged):
        return Ragged.from_rows([row for piece in pieces for row in piece.rows()])  # type: ignore[union-attr]
    return np.concatenate(pieces)  # type: ignore[arg-type]


@settings(max_examples=examples(60))
@given(
    st.sampled_from([0, 4096]),
    st.sampled_from([0, 1 << 20]),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.sets(st.sampled_from(sorted(SPECS)), min_size=1),
    st.data(),
)
def test_any_rows_of_any_columns_are_read_as_they_were_written(
    inline_bytes: int, mapped_bytes: int, sizes: list[int], names: set[str], data: st.DataObject
) -> None:
    with pair(inline_bytes, mapped_bytes) as (storage, store):
        described = [columns(rows, seed) for seed, rows in enumerate(sizes)]
        frames = [write(storage, store, "p", one) for one in described]
        runs = []
        for f in data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=12)):
            start = data.draw(st.integers(0, sizes[f] - 1))
            runs.append((f, start, data.draw(st.integers(start + 1, sizes[f]))))
        got = read(storage, store, frames, [Part(tuple(sorted(names)), tuple(runs))])
        for name in names:
            assert same(got[name], joined([part_of(described[f][name], start, stop) for f, start, stop in runs]))


@pytest.mark.parametrize("mapped_bytes", [0, 1 << 30])
@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
def test_arrays_are_the_readers_own_aligned_and_outlive_the_partition(inline_bytes: int, mapped_bytes: int) -> None:
    with pair(inline_bytes, mapped_bytes) as (storage, store):
        described = columns(50, 0)
        frame = write(storage, store, "p", described)
        first, second = (read(storage, store, [frame], [Part(tuple(SPECS), ((0, 0, 50),))]) for _ in range(2))
        store.drop("p")
        storage.forget("p")
        for name, column in first.items():
            values = column.values if isinstance(column, Ragged) else column
            assert values.flags.writeable and values.flags.aligned
            values[:] = 0
            assert same(second[name], described[name])
        del first, second, column, values


def test_small_frames_need_no_segment_and_a_writer_may_go_on_changing_its_arrays() -> None:
    with pair() as (storage, store):
        described = {"reward": np.ones(2000, np.float32)}
        frame = write(storage, store, "p", described)
        described["reward"][:] = 7
        assert (read(storage, store, [frame], [Part(("reward",), ((0, 0, 2000),))])["reward"] == 1).all()
    with pair(inline_bytes=4096) as (storage, store):
        frame = write(storage, store, "p", {"reward": np.ones(1024, np.float32)})
        assert isinstance(frame.place, bytes) and storage.unannounced("p") is None
        assert not isinstance(write(storage, store, "p", {"reward": np.ones(1025, np.float32)}).place, bytes)
    with pair() as (storage, store):
        write(storage, store, "p", columns(5, 0))
        refused = storage.write("p", columns(9, 1))
        storage.discard("p", refused)
        assert storage.write("p", columns(9, 2)).place == refused.place


@pytest.mark.parametrize("most", [1, 7, 100])
def test_what_one_system_call_cannot_write_the_next_ones_do(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwritev

    def some(descriptor: int, pieces: list[memoryview | bytes], at: int) -> int:
        left = next(memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes)
        return whole(descriptor, [left[:most]], at)

    monkeypatch.setattr(os, "pwritev", some)
    with pair() as (storage, store):
        described = columns(5, 0) | {"mask": Ragged(np.empty(0, np.uint8), np.zeros(5, np.int64))}
        frame = write(storage, store, "p", described)
        got = read(storage, store, [frame], [Part(tuple(described), ((0, 0, 5),))])
        assert all(same(got[name], described[name]) for name in described)


def test_a_frame_of_many_short_runs_is_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, read_from = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: calls.append(arguments) or read_from(*arguments))
    with pair() as (storage, store):
        described = columns(40, 0)
        frame = write(storage, store, "p", described)
        runs = tuple((0, row, row + 1) for row in range(0, 40, 3))
        got = read(storage, store, [frame], [Part(tuple(described), runs)])
        assert len(calls) == 1
        assert all(same(got[name], joined([part_of(c, a, b) for _, a, b in runs])) for name, c in described.items())


def test_a_segment_that_is_none_or_anothers_is_refused() -> None:
    with pair() as (_, store), open(os.devnull) as file:
        with pytest.raises(ValueError, match="not shared memory"):
            store.open(1, "p", 1 << 32, file.fileno())
    with pair() as (storage, store):
        write(storage, store, "p", columns(5, 0))
        with pytest.raises(ValueError, match="not one that writer 2 may open"):
            store.open(2, "p", 1 << 32, 0)
        with pytest.raises(ValueError, match="not one that writer 1 may open"):
            store.open(1, "p", 1 << 32, 0)
        with pytest.raises(ValueError, match="writer 1 has a segment in partition 'p' already"):
            store.open(1, "p", 1 << 32 | 1, 0)


def test_a_frame_outside_its_own_segment_is_refused() -> None:
    with pair() as (storage, store):
        frame = write(storage, store, "p", columns(50, 0))
        assert isinstance(frame.place, tuple)
        unit, start = frame.place
        with pytest.raises(ValueError, match="writer 2 has no segment"):
            store.check(2, "p", frame)
        with pytest.raises(ValueError, match="no segment .* in partition 'q'"):
            store.check(1, "q", frame)
        for place in ((unit, start + 64), (unit, 1 << 60), (unit, 1)):
            with pytest.raises(ValueError, match="does not fit into segment"):
                store.check(1, "p", Frame(frame.rows, frame.sizes, place))
        with pytest.raises(ValueError, match="no segment"):
            store.check(1, "p", Frame(frame.rows, frame.sizes, (unit + 1, start)))


def test_partitions_tell_who_has_segments_and_neighbouring_columns_are_read_at_once() -> None:
    with pair() as (storage, store):
        described: list[tuple[str, set[int]]] = []
        store.dropped = lambda partition, writers: described.append((partition, writers))
        write(storage, store, "p", columns(5, 0))
        store.drop("p")
        store.drop("q")
        assert described == [("p", {1})]
    sizes = {"a": 10, "b": 64, "c": 65, "d": 1}
    assert stretches(sizes, ["b", "c"]) == [(["b", "c"], 64, 129)]
    assert stretches(sizes, ["a", "c", "d"]) == [(["a"], 0, 10), (["c", "d"], 128, 129)]


@contextmanager
def memory(flags: int) -> Iterator[int]:
    descriptor = os.memfd_create("test", flags)
    yield descriptor
    os.close(descriptor)
