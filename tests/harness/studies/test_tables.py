"""Pages of `make table`, from made-up figures."""

from __future__ import annotations

import csv
from dataclasses import replace

from harness.studies.schedule_table import AGENTS, CONDITIONS, SIZES, ScheduleFigures, as_csv, page

SLOW = ScheduleFigures(
    samples_per_s=10.0, lag_mean=0.5, lag_worst=1.0, rollout_idle=0.25, training_idle=-1e-17, exposed_s=0.1
)
FAST = replace(SLOW, samples_per_s=20.0, lag_mean=1.0)
STUDY = {each: {"half_step": SLOW, "delayed_update": FAST} for each in (*CONDITIONS, *AGENTS, *SIZES)}
LAST = {"half_step": replace(SLOW, samples_per_s=5.0), "delayed_update": FAST}


def test_a_page_says_what_each_schedule_reaches_of_the_best_and_what_tools_and_devices_leave() -> None:
    slow_transfer = {"half_step": FAST, "delayed_update": FAST}
    text = page(STUDY | {CONDITIONS[1]: slow_transfer, AGENTS[1]: LAST, SIZES[-1]: LAST}, minutes=7.2)
    assert "in 7 minutes of one core" in text.replace("\n", " ")
    assert "| half_step | 50% to 100% | 50% to 50% | 50% to 50% |" in text
    assert "keeps 50% to 100% where training is the bottleneck" in text and "1.00 instead of 0.50" in text
    assert "| half_step | 10.00 | 5.00 | 50% | 25% | 0.50 |" in text
    assert "| half_step | 0.312 | 0.039 | 0.005 | 2% | 0.50 |" in text


def test_all_figures_stand_in_the_csv_by_condition_and_schedule() -> None:
    first, second, *_ = csv.DictReader(as_csv(STUDY).splitlines())
    assert first["schedule"] == "half_step" and second["transfer"] == "fast transfer"
    assert (first["tools"], first["devices"]) == ("no tools", "16")
    assert float(first["rollout_idle"]) == 0.25 and second["samples_per_s"] == "20"
