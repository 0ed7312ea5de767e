"""The ledger: every sample admitted is trained once, dropped for a reason, or in flight."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics.ledger import Ledger, LedgerError


def filled() -> Ledger:
    """0-9 admitted; 0-3 trained in 1, 4 and 5 in 2, 6 stale, 7 filtered, 8 and 9 in flight."""
    ledger = Ledger()
    ledger.admit(range(10))
    ledger.trained(range(4), iteration=1)
    ledger.trained([5, 4], iteration=2)
    ledger.dropped([6], "stale")
    ledger.dropped([7], "filtered")
    return ledger


def test_counts_and_the_json_say_where_every_sample_is() -> None:
    ledger = filled()
    ledger.check()
    told = {fate: count for fate, count in ledger.counts().items() if count}
    assert told == {"admitted": 10, "trained": 6, "dropped_stale": 1, "dropped_filtered": 1, "in_flight": 2}
    assert ledger.in_flight == {8, 9}
    assert ledger.metrics()["ledger/dropped_stale"] == 1.0
    assert json.loads(json.dumps(filled().to_json())) == {
        **filled().counts(),
        "trained_by_iteration": {"1": 4, "2": 2},
        "in_flight_ids": [8, 9],
        "dropped_ids": {"stale": [6], "filtered": [7], "baseline": [], "straggler": [], "failed": [], "spare": []},
    }
    ledger = Ledger()
    ledger.admit(np.arange(3))
    assert json.loads(json.dumps(ledger.to_json()))["in_flight_ids"] == [0, 1, 2]


@pytest.mark.parametrize(("sample", "fate"), [(8, "in flight"), (0, "trained in iteration 1"), (6, "dropped as stale")])
def test_a_sample_is_admitted_once(sample: int, fate: str) -> None:
    with pytest.raises(LedgerError, match=f"sample {sample} is admitted a second time: it is {fate}"):
        filled().admit([sample])


@pytest.mark.parametrize(("sample", "fate"), [(10, "not admitted"), (0, "trained in iteration 1"), (7, "dropped as f")])
def test_only_a_sample_in_flight_is_trained_or_dropped(sample: int, fate: str) -> None:
    with pytest.raises(LedgerError, match=f"sample {sample} cannot be trained in iteration 3: it is {fate}"):
        filled().trained([sample], iteration=3)
    with pytest.raises(LedgerError, match=f"sample {sample} cannot be dropped as stale: it is {fate}"):
        filled().dropped([sample], "stale")


def test_a_sample_is_admitted_once_and_ends_once_or_nothing_changes() -> None:
    with pytest.raises(LedgerError, match=r"trained in iteration 3 twice in one call: \[8\]"):
        filled().trained([8, 9, 8], iteration=3)
    ledger = filled()
    for refused in (
        lambda: ledger.admit([20, 8]),
        lambda: ledger.trained([8, 20], iteration=3),
        lambda: ledger.dropped([9, 0], "stale"),
    ):
        with pytest.raises(LedgerError):
            refused()
    assert ledger.to_json() == filled().to_json()
    with pytest.raises(ValueError, match="unknown drop reason 'late'"):
        filled().dropped([8], "late")  # type: ignore[arg-type]


def test_a_ledger_that_does_not_close_says_its_numbers_and_what_is_lost() -> None:
    with pytest.raises(LedgerError, match=r"1 lost \[9\], 1 held but not in flight \[3\]"):
        filled().check(held=[8, 3])
    filled().check(held=[9, 8])
    ledger = filled()
    ledger._in_flight.discard(8)
    with pytest.raises(LedgerError, match="admitted 10, accounted 9"):
        ledger.check()


@given(st.lists(st.sampled_from(["admit", "train", "stale", "filter"]), max_size=60), st.data())
def test_the_ledger_closes_after_any_history(history: list[str], data: st.DataObject) -> None:
    ledger, admitted = Ledger(), 0
    for iteration, event in enumerate(history):
        if event == "admit":
            ledger.admit(range(admitted, admitted + 3))
            admitted += 3
            continue
        some = data.draw(st.sets(st.sampled_from(sorted(ledger.in_flight)))) if ledger.in_flight else set()
        if event == "train":
            ledger.trained(some, iteration)
        else:
            ledger.dropped(some, "stale" if event == "stale" else "filtered")
        assert not some & ledger.in_flight
    ledger.check(held=ledger.in_flight)
    assert ledger.counts()["admitted"] == admitted
