"""Every schedule as a test's parameters: one of each kind in all runs of the tests, the others in slow ones."""

import pytest

from harness.config.registries import SCHEDULES

_IN_ALL_RUNS = ("colocate_sync", "one_step_off", "fully_async", "partial_rollout_sync")

EVERY_SCHEDULE = [pytest.param(name, marks=() if name in _IN_ALL_RUNS else pytest.mark.slow) for name in SCHEDULES]
