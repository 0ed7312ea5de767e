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

import math
import os
import time

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support")  # else what does not hold there is not said

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.fsync = os.fdatasync = os.fstat  # what a test writes need not outlive the machine: no waiting for a disk

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--begin-slow-until",
        type=float,
        default=math.inf,
        help="seconds since 1970, after which slow tests and those of a cluster are skipped, and named: for CI's limit",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what is left to run, fast files first, for there may be no time for slow ones; of those whole runs, which take
    longest, so that no process waits for another one's at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    longest = ("tests/integration/", "tests/schedules/")
    items.sort(key=lambda item: (item.path in slow, not item.nodeid.startswith(longest)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    slow = item.get_closest_marker("slow") or item.get_closest_marker("cluster")
    if slow and time.time() > item.config.getoption("--begin-slow-until"):
        pytest.skip("no time was left to begin it (--begin-slow-until)")
