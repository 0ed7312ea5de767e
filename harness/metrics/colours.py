"""Colours of schedules, which people with any colour vision can tell apart: in pages, pictures and MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from harness.config.registries import SCHEDULES

CELLS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#8C6BB1")
"""Colours of cells that are not a schedule each, in their order, again from the first where there are more. Okabe and
Ito (2008), without the yellow that vanishes on white; the last two are of equal distance to the others."""

MORE = (
    *("#882255", "#999933", "#332288", "#117733", "#AA4499"),
    *("#CC6677", "#44AA99", "#661100", "#6699CC", "#AA7744", "#777711", "#771155"),
)
"""Further colours, of Paul Tol's muted and other qualitative schemes."""

_IN_ORDER = (CELLS[0], *MORE[:4], *CELLS[1:6], MORE[4], CELLS[7], CELLS[6], *MORE[5:])
OWN = dict(zip(SCHEDULES, _IN_ORDER, strict=False))
"""A built-in schedule has one colour on every page and in every picture, and those that are compared most the ones that
differ most; those of the user's get what is left."""
_OTHERS = _IN_ORDER[len(OWN) :]


def of_schedules(names: Sequence[str]) -> dict[str, str]:
    """Colours of schedules by name."""
    others = cycle(_OTHERS)
    return {name: OWN[name] if name in OWN else next(others) for name in names}
