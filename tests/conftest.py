"""For all tests: one thread for torch in every process, and how hard Hypothesis tries.

Two threads on two busy cores wait for each other in loops: some tests took fifty times their work.

Profiles of Hypothesis, chosen with `--hypothesis-profile`:

- `default`: small, for every push.
- `search`: 1,000 examples, drawn anew each time. For looking for unknown faults, by hand and by night:
  `make tests ARGS="-m 'not cluster' --hypothesis-profile=search"`.

The first is deterministic: a test that turns red was turned red by the change at hand, on every machine alike, and a
fault that was found once is found again. Its examples are kept in no database, for the same reason; more of them would
find nothing in code that has not changed.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "default",
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real runs first: they take longest, and among several processes short tests fill what time is left."""
    items.sort(key=lambda item: "tests/integration/" not in item.nodeid)
