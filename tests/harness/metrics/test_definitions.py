"""Metrics are declared once, and what counts something that went wrong is read: no counter is without a reader."""

import ast
import json
import re
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics.definitions import DEFINITIONS, METRIC_NAMES, OF_LEDGER, Metric, found_faults
from harness.metrics.ledger import Ledger, LedgerError
from harness.metrics.samples import Fate
from harness.metrics.schemas import LedgerFile
from tests.support.project import ROOT

FAMILIES = {name.partition("/")[0] for name in METRIC_NAMES} - {"queue"}
OTHER_TEXTS = {"turns/given", "ledger/dropped"}
"""Texts that look like metrics, and beginnings of their names; the queue names its own by its columns and tasks."""
FAULTS = [metric for metric in DEFINITIONS if metric.fault is not None]
WRONG = re.compile(
    "fail|skip|drop|lost|lose|stale|cut|trunc|timeout|time_out|late|retr|restart|reject|refus|abort|error|missing|invalid"
    "|could not|too long|one reward|expire|crash|kill|died"
)
NO_FAULTS = {
    "filter/refused": "as algorithm.filter says",
    "filter/share": "the same",
    "ledger/dropped_filtered": "the same",
    "ledger/dropped_baseline": "as algorithm.advantage=remax says",
    "ledger/dropped_spare": "as algorithm.over_sampling says",
    "ledger/dropped_straggler": "said by straggler/dropped",
    "policy/cut": "as the correction says; a measure",
    "policy/rejected": "as algorithm.rejection says",
}
"""What goes by such words, and is what the user asked for."""


def test_every_metric_that_is_written_is_declared_once_with_a_title_of_its_own() -> None:
    assert len(METRIC_NAMES) == len(DEFINITIONS)
    titles = [(metric.title, metric.unit) for metric in DEFINITIONS]
    assert len(set(titles)) == len(titles) and all(title and title[0] != " " for title, _ in titles)
    # Every text in the product that looks like the name of one; those that are put together are held as they are
    # written (`check_names`).
    looks_like_one = re.compile(rf"({'|'.join(FAMILIES)})/[a-z][a-z0-9_]*")
    unknown: dict[str, set[str]] = {}
    foreign = {
        ROOT / "harness/prediction/logs",
        ROOT / "harness/prediction/table.py",
    }  # names of others, which are read
    for path in sorted(path for path in (ROOT / "harness").rglob("*.py") if not foreign & {path, *path.parents}):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and looks_like_one.fullmatch(node.value):
                if node.value not in METRIC_NAMES | OTHER_TEXTS:
                    unknown.setdefault(str(path.relative_to(ROOT)), set()).add(node.value)
    assert not unknown
    assert Ledger().metrics().keys() <= METRIC_NAMES
    assert {f"ledger/{fate}" for fate in get_args(Fate)} <= METRIC_NAMES


@pytest.mark.parametrize("metric", DEFINITIONS, ids=lambda metric: metric.name)
def test_what_counts_something_that_went_wrong_is_read_by_the_warnings(metric: Metric) -> None:
    if WRONG.search(f"{metric.name} {metric.title}".replace("staleness", "").replace("latency", "")):
        assert (metric.fault is None) == (metric.name in NO_FAULTS), "declare its fault, or say here why it is none"
    else:
        assert metric.name not in NO_FAULTS


def test_every_list_of_events_in_a_ledger_is_read_by_the_warnings() -> None:
    lists = {field.name for field in msgspec.structs.fields(LedgerFile) if str(field.type).startswith("list[harness")}
    assert lists == OF_LEDGER.keys()
    ledger = {"engines": [{"what": "lost"}, {"what": "works"}], "restarts": [{}, {}]}
    texts = [fault.text for fault in found_faults([], ledger, [], {})]
    assert texts == [
        "once a rollout engine was lost (engines)",
        "2 times roles died and were started again: its times include that (restarts)",
    ]


def lines(metric: Metric, value: float) -> list[dict[str, float]]:
    """Two iterations with this value of a metric."""
    return [{"samples": 100.0 * n, "ledger/admitted": 100.0 * n} | {metric.name: value} for n in (1, 2)]


@pytest.mark.parametrize("metric", FAULTS, ids=lambda metric: metric.name)
def test_a_fault_is_said_above_its_bound_and_forbids_a_verdict_as_set(metric: Metric) -> None:
    evaluations = [{"problems": 5, "k": 3, "failed": 2}] if metric.name == "eval/failed" else []
    quiet = lines(metric, metric.fault.bound if metric.counted == "mean" else 0.0)
    assert found_faults(quiet, {}, [], {"task": {}}) == []
    (found,) = found_faults(lines(metric, 50.0), {}, evaluations, {"task": {}})
    assert found.name == metric.name and f"({metric.name})" in found.text and "{" not in found.text
    assert found.forbids == (metric.fault.forbids is not None)
    for allowed in ({"failed_bound": 0.9}, {"failure_reward": 0.0}):
        (found,) = found_faults(lines(metric, 50.0), {}, evaluations, {"task": allowed})
        assert not found.forbids


def test_the_number_of_a_run_is_told_as_a_count_and_as_a_share() -> None:
    def text(name: str, value: float) -> str:
        metric = next(metric for metric in FAULTS if metric.name == name)
        return found_faults(lines(metric, value), {}, [], {})[0].text

    assert text("reward/failed", 3) == "6 of the trained samples (3 %) could not be scored (reward/failed)"
    assert text("train/skipped_steps", 3).startswith("3 optimizer steps were skipped")
    assert text("turns/failed", 0.125).startswith("the environment, agent loop or tool of 12 % of the trained samples")
    flat = "flat rewards: in 100 % of the groups all rewards are equal"
    assert text("reward/same_in_group", 1.0).startswith(flat)


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
