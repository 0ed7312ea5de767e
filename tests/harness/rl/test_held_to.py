"""docs/held_to.csv says of every function that can be named what it is held to."""

from __future__ import annotations

import csv
from pathlib import Path

from harness.config.registries import ADVANTAGES, AGGREGATIONS, CORRECTIONS, FILTERS, KL_ESTIMATORS, REJECTIONS, SHAPING

DOCUMENT = Path(__file__).parents[3] / "docs" / "held_to.csv"
KINDS = {
    "loss": CORRECTIONS,
    "advantage": ADVANTAGES,
    "KL": KL_ESTIMATORS,
    "rejection": REJECTIONS,
    "aggregation": AGGREGATIONS,
    "shaping": SHAPING,
    "filter": set(FILTERS) - {"none"},
}


def test_every_function_that_can_be_named_stands_in_the_table_of_what_it_is_held_to() -> None:
    rows = list(csv.DictReader(DOCUMENT.read_text(encoding="utf-8").splitlines()))
    assert all(row["held to"] for row in rows)
    told = {kind: [name for row in rows if row["kind"] == kind for name in row["names"].split()] for kind in KINDS}
    assert {kind: sorted(names) for kind, names in told.items()} == {kind: sorted(of) for kind, of in KINDS.items()}
