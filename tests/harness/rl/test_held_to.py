"""docs/algorithms.md says of every function that can be named what it is held to."""

from __future__ import annotations

import re
from pathlib import Path

from harness.config.registries import ADVANTAGES, AGGREGATIONS, CORRECTIONS, FILTERS, KL_ESTIMATORS, REJECTIONS, SHAPING

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
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
    section = (
        DOCUMENT.read_text(encoding="utf-8").partition("## What each function is held to")[2].partition("\n## ")[0]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    told = {kind: [name for row in rows if row[0] == kind for name in re.findall("`(.+?)`", row[1])] for kind in KINDS}
    assert {kind: sorted(names) for kind, names in told.items()} == {kind: sorted(of) for kind, of in KINDS.items()}
