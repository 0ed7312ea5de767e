"""Columns: packed rows, the schema check at the door, and what a batch gives its reader."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from harness.transfer_queue import Batch, Column, ColumnSpec, Ragged

ROWS = [np.array([1, 2, 3]), np.array([], np.int64), np.array([4]), np.array([5, 6])]


def same(ragged: Ragged, rows: list[np.ndarray]) -> bool:
    return [row.tolist() for row in ragged.rows()] == [row.tolist() for row in rows]


def test_ragged_rows_are_packed_without_padding() -> None:
    ragged = Ragged.from_rows(ROWS)
    assert ragged.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert ragged.offsets.tolist() == [0, 3, 3, 4, 6]
    assert [ragged.row(i).tolist() for i in range(4)] == [row.tolist() for row in ROWS]
    assert same(ragged, ROWS)


def test_ragged_rows_are_taken_in_the_order_asked_for() -> None:
    ragged = Ragged.from_rows(ROWS)
    order = [3, 1, 2, 0, 3, 2]
    assert same(ragged.take(order), [ROWS[i] for i in order])
    assert len(ragged.take([])) == 0 and ragged.take([]).values.dtype == np.int64


def test_lengths_that_do_not_fit_the_values_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths sum to 5"):
        Ragged(np.zeros(4), np.array([2, 3]))


@pytest.mark.parametrize(
    ("spec", "column", "message"),
    [
        (ColumnSpec("float32"), np.zeros(3, np.float64), "holds float32, not float64"),
        (ColumnSpec("float32"), np.zeros(2, np.float32), r"must be \[3\] for 3 rows, not \[2\]"),
        (ColumnSpec("float32", shape=(4,)), np.zeros((3, 5), np.float32), r"must be \[3, 4\]"),
        (ColumnSpec("int64", ragged=True), np.zeros(3, np.int64), "takes a Ragged, not a ndarray"),
        (ColumnSpec("int64"), Ragged.from_rows(ROWS[:3]), "takes an ndarray, not a Ragged"),
        (ColumnSpec("int64"), [1, 2, 3], "takes an ndarray, not a list"),
        (ColumnSpec("int64", ragged=True), Ragged.from_rows(ROWS), "has 4 rows for 3 row ids"),
        (ColumnSpec("int32", ragged=True), Ragged.from_rows(ROWS[:3]), "holds int32, not int64"),
    ],
)
def test_a_column_that_breaks_the_schema_is_refused_by_name(spec: ColumnSpec, column: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"column 'x'.*{message}"):
        spec.check("x", 3, column)  # type: ignore[arg-type]


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


def test_the_package_imports_neither_torch_nor_ray() -> None:
    code = "import sys, harness.transfer_queue; print([m for m in ('torch', 'ray') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
