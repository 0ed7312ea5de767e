"""Which schedules the tests of every schedule look at."""

import pytest

from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from tests.support.every_schedule import EVERY_SCHEDULE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedule", metavar="NAME", help="one schedule, or module:Class of your own")


def pytest_configure(config: pytest.Config) -> None:
    if chosen := config.getoption("--schedule", default=None):
        try:
            make_schedule(compose_job([f"schedule={chosen}"]))
        except ConfigError as wrong:
            raise pytest.UsageError(f"--schedule: {wrong}") from wrong


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" in metafunc.fixturenames and metafunc.module.__name__.endswith("test_every_schedule"):
        chosen = metafunc.config.getoption("--schedule", default=None)
        metafunc.parametrize("schedule", [chosen] if chosen else EVERY_SCHEDULE)
