"""The table of names: every path stands for code, and every name that is none is refused in one form."""

from __future__ import annotations

import pytest

from harness.config import ConfigError
from harness.config.compose import compose_job, make_schedule
from harness.config.registries import ENGINES, REGISTRIES, check_name, find

LOADED = [(setting, name) for setting, names in REGISTRIES.items() for name in names if names is not ENGINES]


@pytest.mark.parametrize(("setting", "name"), LOADED)
def test_every_name_stands_for_code_that_can_be_called(setting: str, name: str) -> None:
    assert callable(find(setting, name))


@pytest.mark.parametrize("setting", REGISTRIES)
def test_a_name_of_nothing_is_refused_with_those_that_there_are(setting: str) -> None:
    given = {"algorithm.shaping": "algorithm.shaping=[nope]", "algorithm.rejection": "algorithm.rejection.nope=[0,1]"}
    typed = {"schedule": "schedule.name", "engine": "engine.name", "task": "task.name"}.get(setting, setting)
    with pytest.raises(ConfigError) as refused:
        if setting == "schedule.transport":  # which a schedule's class names
            check_name(setting, "nope")
        make_schedule(compose_job(["schedule=fully_async", given.get(setting, f"{typed}=nope")]))
    choices = ", ".join(REGISTRIES[setting])
    assert str(refused.value) == (
        f"{setting}=nope is unknown; choose one of {choices}, or `package.module:Name` of your own"
    )


def test_every_built_in_name_is_accepted() -> None:
    for setting in ("correction", "advantage", "aggregation", "kl", "filter"):
        for name in REGISTRIES[f"algorithm.{setting}"]:
            assert (f"algorithm.{setting}", name) in compose_job([f"algorithm.{setting}={name}"]).named
