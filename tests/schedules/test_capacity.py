"""The two rules that bound staleness, as properties of group numbers."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.capacity import Capacity

batches = st.integers(1, 512)
versions = st.integers(0, 10_000)
etas = (
    st.integers(0, 8).map(float) | st.floats(0, 8).map(lambda eta: round(eta, 3)) | st.sampled_from([0.1, 0.3, 1 / 3])
)


def exact_limit(batch: int, eta: float, version: int) -> int:
    """The same formula over fractions: eta as people write it, so 0.1 is a tenth."""
    written = Fraction(eta).limit_denominator(1000)
    return math.ceil((version + 1 + written) * batch)


@given(batches, etas, versions)
def test_the_limit_is_the_first_group_beyond_the_formula(batch: int, eta: float, version: int) -> None:
    assert Capacity(batch, eta).limit(version) == exact_limit(batch, eta, version)


@given(batches, etas, versions, st.data())
def test_a_group_that_is_let_in_lags_within_bounds(batch: int, eta: float, version: int, data: st.DataObject) -> None:
    """N < (u + 1 + eta) B  =>  N // B - u <= ceil(eta): group N, started by version u, is trained at version N // B."""
    capacity = Capacity(batch, eta)
    group = data.draw(st.integers(0, capacity.limit(version) - 1))
    assert group // batch - version <= capacity.worst_lag == math.ceil(eta)


@given(batches, etas.filter(lambda eta: eta > 0), versions)
def test_the_bound_is_reached(batch: int, eta: float, version: int) -> None:
    """So it could not be smaller: the last allowed group, trained on time, lags by exactly the bound."""
    capacity = Capacity(batch, eta)
    assert (capacity.limit(version) - 1) // batch - version == capacity.worst_lag


@given(batches, versions)
def test_at_staleness_0_a_version_samples_its_own_batch_and_no_other(batch: int, version: int) -> None:
    capacity = Capacity(batch, 0.0)
    assert (capacity.limit(version), capacity.worst_lag) == ((version + 1) * batch, 0)


@given(batches, etas, versions)
def test_what_a_version_may_start_can_be_trained_before_it_lags_too_much(batch: int, eta: float, version: int) -> None:
    """Iterations 0 to version + worst lag train so many groups: there is room for all that it may have begun."""
    capacity = Capacity(batch, eta)
    assert capacity.limit(version) <= (version + 1 + capacity.worst_lag) * batch


@given(batches, versions)
def test_half_a_step_ahead_is_the_first_half_of_a_batch_and_no_group_more(batch: int, version: int) -> None:
    """So ceil(batch / 2) groups of a batch lag at most: their mean is at most 1/2 where the batch is even."""
    assert Capacity(batch, 0.5).limit(version) - (version + 1) * batch == math.ceil(batch / 2)


@pytest.mark.parametrize(
    ("batch", "eta", "version", "limit"),
    [
        (16, 0.5, 0, 24),
        (16, 0.5, 3, 72),
        (10, 0.1, 0, 11),
        (10, 0.3, 0, 13),
        (3, 0.5, 0, 5),
        (3, 1 / 3, 0, 4),
        (1, 0.5, 0, 2),
    ],
)
def test_a_fraction_allows_that_part_of_a_batch(batch: int, eta: float, version: int, limit: int) -> None:
    assert Capacity(batch, eta).limit(version) == limit


def test_rounding_errors_let_no_group_slip_in() -> None:
    """(1 + 1 + 0.2) * 25 is 55.00000000000001 in floating point: without care, its ceiling would be 56."""
    assert math.ceil((1 + 1 + 0.2) * 25) == 56
    assert Capacity(25, 0.2).limit(1) == 55
