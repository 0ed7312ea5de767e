"""Columns and frames: what a put packs is what an assignment unpacks; what cannot be is refused by name."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from harness.transfer_queue import Batch, Column, ColumnSpec, Ragged
from harness.transfer_queue.rows.frames import BatchAssignment, Buffer, Frame, Part, assemble, pack, unpack
from harness.transfer_queue.storage.inline import LocalStorage

ROWS = [np.array([1, 2, 3]), np.array([], np.int64), np.array([4]), np.array([5, 6])]


def same(ragged: Ragged, rows: list[np.ndarray]) -> bool:
    return [row.tolist() for row in ragged.rows()] == [row.tolist() for row in rows]


def test_ragged_rows_are_packed_taken_in_order_and_refused_where_lengths_do_not_fit() -> None:
    ragged = Ragged.from_rows(ROWS)
    assert ragged.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert ragged.offsets.tolist() == [0, 3, 3, 4, 6]
    assert [ragged.row(i).tolist() for i in range(4)] == [row.tolist() for row in ROWS]
    assert same(ragged, ROWS)
    ragged = Ragged.from_rows(ROWS)
    order = [3, 1, 2, 0, 3, 2]
    assert same(ragged.take(order), [ROWS[i] for i in order])
    assert len(ragged.take([])) == 0 and ragged.take([]).values.dtype == np.int64
    with pytest.raises(ValueError, match="lengths sum to 5"):
        Ragged(np.zeros(4), np.array([2, 3]))


def test_a_batch_becomes_tensors_without_a_copy() -> None:
    columns: dict[str, Column] = {"r": Ragged.from_rows(ROWS), "d": np.ones((4, 2), np.float32)}
    batch = Batch("p", np.arange(4), columns, lease=0)
    batch.torch("d")[0, 0] = 7
    batch.torch("r")[0] = 8
    assert batch.dense("d")[0, 0] == 7 and batch.ragged("r").row(0)[0] == 8
    with pytest.raises(TypeError, match="'r' is ragged"):
        batch.dense("r")
    with pytest.raises(TypeError, match="'d' is dense"):
        batch.ragged("d")


SPECS = {"r": ColumnSpec("int64", ragged=True), "d": ColumnSpec("float32", shape=(2,))}
FRAME_ROWS = [np.arange(n) + 10 * n for n in (3, 0, 5, 1)]
RAGGED = Ragged.from_rows(FRAME_ROWS)
DENSE = np.arange(8, dtype=np.float32).reshape(4, 2)


def buffer(column: Column) -> Buffer:
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in pack(column)])


def assignment(frames: Sequence[Frame], runs: tuple[tuple[int, int, int], ...]) -> BatchAssignment:
    rows = sum(stop - start for _, start, stop in runs)
    return BatchAssignment(0, "p", np.arange(rows), tuple(frames), (Part(("r", "d"), runs),))


def check(read: Mapping[str, Column], rows: Sequence[int]) -> None:
    ragged = read["r"]
    assert isinstance(ragged, Ragged)
    assert [row.tolist() for row in ragged.rows()] == [FRAME_ROWS[i].tolist() for i in rows]
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


def test_rows_are_gathered_over_frames_and_one_stretch_is_a_view() -> None:
    runs = ((1, 1, 2), (0, 0, 1), (1, 0, 1), (0, 1, 2))
    columns = [{"r": RAGGED.take([0, 1]), "d": DENSE[[0, 1]]}, {"r": RAGGED.take([2, 3]), "d": DENSE[[2, 3]]}]
    storage = LocalStorage()
    frames = [storage.write("p", column) for column in columns]
    check(storage.read(assignment(frames, runs), SPECS), [3, 0, 2, 1])
    buffers = {(f, name): buffer(column) for f, own in enumerate(columns) for name, column in own.items()}
    check(assemble(assignment(frames, runs), buffers, SPECS), [3, 0, 2, 1])
    frame = LocalStorage().write("p", {"r": RAGGED, "d": DENSE})
    read = LocalStorage().read(assignment([frame], ()), SPECS)
    assert len(read["r"]) == 0 and read["d"].shape == (0, 2)  # type: ignore[union-attr]
    buffers = {(0, "r"): buffer(RAGGED), (0, "d"): buffer(DENSE)}
    frame = Frame(4, {name: buffers[0, name].size for name in SPECS}, (0, 0))
    read = assemble(assignment([frame], ((0, 1, 3),)), buffers, SPECS)
    check(read, [1, 2])
    read["d"][0, 0] = 99  # type: ignore[index]
    assert buffers[0, "d"].view(np.float32)[2] == 99


def test_stores_give_buffers_and_every_reader_arrays_of_its_own() -> None:
    storage = LocalStorage()
    frame = storage.write("p", {"r": RAGGED, "d": DENSE})
    for _ in range(2):
        read = storage.read(assignment([frame], ((0, 0, 4),)), SPECS)
        check(read, [0, 1, 2, 3])
        read["d"][:] = -1  # type: ignore[index]
    packed = buffer(RAGGED)
    packed.view(np.int64)[3] += 1
    with pytest.raises(ValueError, match="lengths sum to 10"):
        unpack(packed, SPECS["r"], 4)
    code = "import sys, harness.transfer_queue; print([m for m in ('torch', 'ray') if m in sys.modules])"
    described = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert described.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("sizes", "place", "message"),
    [
        ({"x": 8}, (0, 0), "column 'x' is unknown"),
        ({"d": 31}, (0, 0), "column 'd': 31 bytes cannot hold 4 rows"),
        ({"r": 39}, (0, 0), "column 'r': 39 bytes cannot hold 4 rows"),
        ({"r": 44}, (0, 0), "column 'r': 44 bytes cannot hold 4 rows"),
        ({"d": 32}, b"short", "a frame of 32 bytes came with 5"),
        ({"d": -32}, b"", "column 'd'"),
        ({"d": 32}, (0, -64), "a frame lies at -64"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(sizes: dict[str, int], place: tuple[int, int] | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Frame(4, sizes, place).check(SPECS)
