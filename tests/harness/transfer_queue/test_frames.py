"""Frames: what a put packs is what a assignment unpacks, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from harness.transfer_queue import Column, ColumnSpec, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame, Part, assemble, pack, unpack
from harness.transfer_queue.storage.inline import LocalStorage

SPECS = {"r": ColumnSpec("int64", ragged=True), "d": ColumnSpec("float32", shape=(2,))}
ROWS = [np.arange(n) + 10 * n for n in (3, 0, 5, 1)]
RAGGED = Ragged.from_rows(ROWS)
DENSE = np.arange(8, dtype=np.float32).reshape(4, 2)


def buffer(column: Column) -> Buffer:
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in pack(column)])


def assignment(frames: Sequence[Frame], runs: tuple[tuple[int, int, int], ...]) -> BatchAssignment:
    rows = sum(stop - start for _, start, stop in runs)
    return BatchAssignment(0, "p", np.arange(rows), tuple(frames), (Part(("r", "d"), runs),))


def check(read: Mapping[str, Column], rows: Sequence[int]) -> None:
    ragged = read["r"]
    assert isinstance(ragged, Ragged)
    assert [row.tolist() for row in ragged.rows()] == [ROWS[i].tolist() for i in rows]
    assert np.array_equal(read["d"], DENSE[list(rows)])  # type: ignore[arg-type]


@pytest.mark.parametrize("column", [RAGGED, DENSE, RAGGED.take([]), DENSE[:0]])
def test_what_was_packed_is_unpacked(column: Column) -> None:
    spec = SPECS["r" if isinstance(column, Ragged) else "d"]
    spec.check_size("x", len(column), buffer(column).size)
    got = unpack(buffer(column), spec, len(column))
    if isinstance(column, Ragged):
        assert isinstance(got, Ragged)
        assert got.lengths.tolist() == column.lengths.tolist() and got.values.tolist() == column.values.tolist()
    else:
        assert np.array_equal(got, column)  # type: ignore[arg-type]


def test_rows_are_gathered_over_frames_in_the_order_asked_for() -> None:
    runs = ((1, 1, 2), (0, 0, 1), (1, 0, 1), (0, 1, 2))
    columns = [
        {"r": RAGGED.take([0, 1]), "d": DENSE[[0, 1]]},
        {"r": RAGGED.take([2, 3]), "d": DENSE[[2, 3]]},
    ]
    storage = LocalStorage()
    frames = [storage.write("p", column) for column in columns]
    check(storage.read(assignment(frames, runs), SPECS), [3, 0, 2, 1])
    buffers = {(f, name): buffer(column) for f, own in enumerate(columns) for name, column in own.items()}
    check(assemble(assignment(frames, runs), buffers, SPECS), [3, 0, 2, 1])


def test_a_handout_of_no_rows_has_empty_columns() -> None:
    frame = LocalStorage().write("p", {"r": RAGGED, "d": DENSE})
    read = LocalStorage().read(assignment([frame], ()), SPECS)
    assert len(read["r"]) == 0 and read["d"].shape == (0, 2)  # type: ignore[union-attr]


def test_one_stretch_of_one_frame_is_a_view_of_its_buffer() -> None:
    buffers = {(0, "r"): buffer(RAGGED), (0, "d"): buffer(DENSE)}
    frame = Frame(4, {name: buffers[0, name].size for name in SPECS}, (0, 0))
    read = assemble(assignment([frame], ((0, 1, 3),)), buffers, SPECS)
    check(read, [1, 2])
    read["d"][0, 0] = 99  # type: ignore[index]
    assert buffers[0, "d"].view(np.float32)[2] == 99


def test_the_local_storage_gives_every_reader_arrays_of_its_own() -> None:
    storage = LocalStorage()
    frame = storage.write("p", {"r": RAGGED, "d": DENSE})
    for _ in range(2):
        read = storage.read(assignment([frame], ((0, 0, 4),)), SPECS)
        check(read, [0, 1, 2, 3])
        read["d"][:] = -1  # type: ignore[index]


async def test_a_keeper_gives_the_buffers_of_a_frame() -> None:
    storage = LocalStorage()
    frame = storage.write("p", {"r": RAGGED, "d": DENSE})
    fetched = await storage.fetch("p", frame)
    check(assemble(assignment([frame], ((0, 0, 4),)), {(0, name): b for name, b in fetched.items()}, SPECS), range(4))


@pytest.mark.parametrize(
    ("sizes", "place", "message"),
    [
        ({"x": 8}, (0, 0), "column 'x' is unknown"),
        ({"d": 31}, (0, 0), "column 'd': 31 bytes cannot hold 4 rows"),
        ({"r": 39}, (0, 0), "column 'r': 39 bytes cannot hold 4 rows"),
        ({"r": 44}, (0, 0), "column 'r': 44 bytes cannot hold 4 rows"),
        ({"d": 32}, b"short", "a frame of 32 bytes came with 5"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(sizes: dict[str, int], place: tuple[int, int] | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Frame(4, sizes, place).check(SPECS)


def test_offsets_that_lie_are_refused() -> None:
    packed = buffer(RAGGED)
    packed.view(np.int64)[4] += 1
    with pytest.raises(ValueError, match="offsets from 0 to 10"):
        unpack(packed, SPECS["r"], 4)
