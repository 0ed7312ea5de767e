"""How busy the machine was with other things."""

from __future__ import annotations

import pytest

from harness.metrics import system
from harness.metrics.system import LoadWatch


def test_own_work_is_no_load_and_the_work_of_others_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, busy, own = [100.0], [1000.0], [50.0]
    monkeypatch.setattr(system.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(system, "_busy_seconds", lambda: busy[0])
    monkeypatch.setattr(system, "_own_seconds", lambda: own[0])
    monkeypatch.setattr(system, "_cores", lambda: [0, 1])
    watch = LoadWatch()
    now[0], busy[0], own[0] = 110.0, 1016.0, 62.0  # of 20 seconds on two cores: 12 its own, 4 of others, 4 idle
    assert watch.so_far()["others"] == pytest.approx(0.2)
    own[0] = 90.0
    assert watch.so_far()["others"] == 0.0


def test_this_machine_answers() -> None:
    told = LoadWatch().so_far()
    assert set(told) == {"average_at_start", "average_at_end", "others"}
    assert 0.0 <= told["others"] <= 1.0 and told["average_at_start"] >= 0.0
