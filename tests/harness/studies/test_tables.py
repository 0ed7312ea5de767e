"""Pages of `make table`, from made-up figures."""

from __future__ import annotations

import csv
from dataclasses import replace

from harness.studies.schedule_table import ScheduleFigures, as_csv, page
from harness.studies.tool_latency import page as latency_page

SLOW = ScheduleFigures(
    samples_per_s=10.0, lag_mean=0.5, lag_worst=1.0, rollout_idle=0.25, training_idle=-1e-17, exposed_s=0.1
)
FAST = replace(SLOW, samples_per_s=20.0, lag_mean=1.0)
STUDY = {"both balance, light tail, fast transfer": {"half_step": SLOW, "delayed_update": FAST}}
AGAIN = STUDY | {"both balance, light tail, slow transfer": {"half_step": FAST, "delayed_update": FAST}}


def test_a_page_says_what_each_schedule_reaches_of_the_best_and_what_half_a_step_costs() -> None:
    text = page("what was compared", AGAIN)
    assert "| half_step | 50% to 100% |" in text and "| delayed_update | 100% to 100% |" in text
    assert "keeps 50% to 100% where both balance." in text and "1.00 instead of 0.50" in text
    assert "| half_step | 10.00 | 200% |" in latency_page(
        {"no latency": {"half_step": SLOW}, "1 s": {"half_step": FAST}}
    )


def test_all_figures_stand_in_the_csv_by_condition_and_schedule() -> None:
    first, second = csv.DictReader(as_csv("bottleneck,tail,transfer", STUDY).splitlines())
    assert first["schedule"] == "half_step" and second["transfer"] == "fast transfer"
    assert float(first["rollout_idle"]) == 0.25 and second["samples_per_s"] == "20"
