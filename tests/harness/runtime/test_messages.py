"""What travels between the driver and its workers arrives as it was, or is refused by name."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from harness.protocols import EngineDied, Span
from harness.runtime import messages as m
from harness.runtime.runtime import WorkerDied
from harness.weight_sync.plan import Bucket, TensorSpec, TransferError, TransferPlan
from harness.workers.readers import Deadlines
from harness.workers.training import TrainedRows, TrainReport

SMALL = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8)
NUMBER = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | SMALL | NUMBER | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ARRAY = arrays.arrays(arrays.scalar_dtypes(), SHAPES, fill=st.nothing())
SPANS = st.lists(st.builds(Span, TEXT, TEXT, TEXT, NUMBER, NUMBER, SMALL, SMALL), max_size=3)
SHAPE = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
SPECS = st.lists(st.builds(TensorSpec, TEXT, SHAPE, DTYPE, st.integers(0, 99)), max_size=3).map(tuple)
BUCKETS = st.lists(st.builds(Bucket, SPECS, st.integers(0, 99)), max_size=2).map(tuple)
PLANS = st.builds(TransferPlan, BUCKETS, st.booleans())


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    assert m.decode(m.encode(value), Any) == value


@given(st.tuples(SPANS, PLANS, st.lists(st.tuples(SMALL, SMALL)), st.none() | SMALL))
def test_records_arrive_as_they_were(values: tuple[Any, ...]) -> None:
    assert m.decode(m.encode(values), tuple[list[Span], TransferPlan, Deadlines, int | None]) == values


@given(ARRAY)
def test_arrays_of_any_dtype_arrive_as_they_were_and_belong_to_the_reader(array: np.ndarray) -> None:
    same = m.decode(m.encode(array), np.ndarray)
    assert (same.dtype, same.shape, same.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert same.flags.writeable and same.flags.owndata


def test_tensors_and_paths_arrive_as_they_were() -> None:
    for tensor in (torch.randn(2, 3).bfloat16(), torch.tensor(True), torch.empty(0, 4), torch.arange(6).view(2, 3).T):
        same = m.decode(m.encode(tensor), torch.Tensor)
        assert same.dtype == tensor.dtype and torch.equal(same, tensor)
    assert m.decode(m.encode(Path("a/b")), Path) == Path("a/b")


@given(SPANS)
def test_a_training_report_arrives_as_it_was(spans: list[Span]) -> None:
    rows = TrainedRows(np.arange(3), np.arange(3) + 8, np.zeros(3, np.float32), 1.5)
    sent = TrainReport([rows], {"loss": np.float64(0.5), "scored": 1}, [{"grad_norm": 2.0}], spans)
    got = m.decode(m.encode(sent), TrainReport)
    assert (got.sums, got.steps, got.spans) == (sent.sums, sent.steps, sent.spans)
    (arrived,) = got.trained
    np.testing.assert_array_equal(arrived.rows, rows.rows)
    np.testing.assert_array_equal(arrived.samples, rows.samples)
    assert arrived.rewards.dtype == np.float32 and arrived.at == 1.5


@given(st.binary(max_size=40), st.sampled_from([Span, TransferPlan, list[int], np.ndarray, TrainReport, int | None]))
def test_other_bytes_are_a_value_error(data: bytes, wanted: Any) -> None:
    try:
        m.decode(data, wanted)
    except ValueError:
        pass


@pytest.mark.parametrize("value", [object(), lambda: 1, {"a": [object()]}, np.array([object()]), 2**80, 1j])
def test_what_cannot_travel_is_refused(value: Any) -> None:
    with pytest.raises(m.CannotTravel):
        m.encode(value)


# -- methods


class First(msgspec.Struct, frozen=True, tag=True):
    number: int


class Second(msgspec.Struct, frozen=True, tag=True):
    number: int


class Unsaid(Protocol):
    number: int


@dataclass
class Role:
    async def join(self, offer: First | Second, deadlines: Sequence[int] = ()) -> Unsaid:
        raise NotImplementedError

    async def untyped(self, value) -> None: ...  # type: ignore[no-untyped-def]

    async def unsaid(self, value: int): ...  # type: ignore[no-untyped-def]

    async def many(self, *values: int) -> None: ...

    def plain(self) -> None: ...


def test_one_of_several_classes_arrives_as_the_one_that_was_sent() -> None:
    types = m.method_types(Role.join)
    for offer in (First(1), Second(2)):
        assert m.decode(m.encode(types.bind((offer,), {})), types.arguments) == (offer, [])
    with pytest.raises(ValueError, match="annotate a type with fields"):
        m.decode(m.encode(First(1)), types.answer)
    with pytest.raises(TypeError, match="offer"):
        types.bind((), {})


@pytest.mark.parametrize("method", [Role.untyped, Role.unsaid, Role.many, Role.plain])
def test_a_method_that_cannot_be_called_from_afar_is_refused_by_name(method: Any) -> None:
    with pytest.raises(m.CannotTravel, match=method.__qualname__):
        m.method_types(method)


# -- errors


class OfTwo(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def travelled(error: BaseException, where: str | None = None) -> Exception:
    return m.error_of(m.decode(m.encode(m.failure_of(error, where)), m.Failure))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("name"),
        FileNotFoundError(2, "gone"),
        TransferError("half"),
        EngineDied("e"),
        WorkerDied("w"),
        TimeoutError(),
        OfTwo("a", "b"),
        RuntimeError("two", 2),
        ExceptionGroup("several", [ValueError("a"), ExceptionGroup("deeper", [TransferError("b")])]),
    ],
)
def test_errors_arrive_as_themselves(error: Exception) -> None:
    same = travelled(error)
    assert type(same) is type(error) and str(same) == str(error)
    if isinstance(error, ExceptionGroup):
        assert repr(same) == repr(error)


def test_an_unknown_error_arrives_as_its_nearest_base_and_says_where_it_came_from() -> None:
    novel = type("Novel", (TimeoutError,), {"__module__": "elsewhere"})
    assert repr(travelled(novel("late"))) == "TimeoutError('Novel: late')"
    strange = type("Strange", (Exception,), {"__module__": "elsewhere"})
    assert repr(travelled(strange("odd"))) == "RuntimeError('Strange: odd')"
    assert repr(travelled(asyncio.CancelledError())) == "RuntimeError('CancelledError: ')"
    try:
        raise ValueError("no")
    except ValueError as error:
        error.add_note("mind the gap")
        notes = travelled(error, "actor[0].train").__notes__
    assert notes[0] == "mind the gap"
    assert notes[1].startswith("in actor[0].train:\n") and "test_messages.py" in notes[1]


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ValueError("no \ud800"), ValueError("no \\ud800")),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "not allowed"), UnicodeError("UnicodeEncodeError: 'utf-8' codec")),
        (RuntimeError("large", 2**70), RuntimeError(f"('large', {2**70})")),
        (ExceptionGroup("\ud800", [ValueError()]), ExceptionGroup("\\ud800", [ValueError()])),
    ],
)
def test_an_error_that_no_message_can_hold_arrives_with_its_text(error: Exception, arrives: Exception) -> None:
    same = travelled(error, "here")
    assert type(same) is type(arrives) and str(same).startswith(str(arrives))
