"""What reads a setting: every one says it, what a job does not read changes nothing of it, and is refused by name."""

import inspect
from contextlib import closing, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.acceptance.chaos.jobs import random_job
from harness.checks.settle import settle
from harness.comparison.equivalence import differences
from harness.config import ConfigError, JobConfig
from harness.config.compose import EXPERIMENTS, cell_name, compose_job, refuse_unread
from harness.config.machine import Machine
from harness.config.plugins import defaults
from harness.config.readers import (
    STD_ADVANTAGES,
    described_engine,
    naming_settings,
    options_readers,
    readers,
    settings_of,
)
from harness.config.registries import ADVANTAGES, ENGINES, REGISTRIES, SCHEDULES, TASKS, find
from harness.driver import PRELOAD
from harness.driver.run import run_seed
from harness.driver.session import simulate
from harness.planner.automatic import plan_split
from harness.runtime.interrupts import LeaveRequest
from harness.runtime.local_runtime import launch_server
from tests.support.real_runs import SMALL


@cache
def groups_of(kind: type, above: str = "") -> dict[str, Any]:
    """The annotated type of every setting, by its path; groups are not settings."""
    found, plain = {}, get_type_hints(kind)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inside = [one for one in (plain[name], *get_args(plain[name])) if is_dataclass(one) and isinstance(one, type)]
        found |= {f"{above}{name}": hint}
        for one in inside if name not in ("transfers",) else ():
            found |= groups_of(one, f"{above}{name}.")
    return found


def test_every_setting_says_what_reads_it() -> None:
    assert [path for path, hint in groups_of(JobConfig).items() if not readers(hint)] == []
    of_options = {f"schedule={name}": find("schedule", name) for name in SCHEDULES}
    of_options |= {f"task={name}": find("task", name) for name in TASKS}
    of_options |= {f"engine={name}": getattr(described_engine(name), "Options", None) for name in ENGINES}
    for what, cls in of_options.items():
        own = {} if cls is None else defaults(cls, what, what)
        assert own.keys() - {"name"} <= options_readers(cls).keys(), what
    options = {name: inspect.signature(find("algorithm.advantage", name)).parameters for name in ADVANTAGES}
    assert {name for name in options if "divide_by_std" in options[name]} | {"gae"} == set(STD_ADVANTAGES)
    machine = Machine(cores=2, gpus=0, gpu_bytes=0)
    job = settle(["training.optimizer_offload=always", "model.warm_start=false"], machine, plan_split)
    assert job.messages == ("No effect here: training.optimizer_offload=always, read only where devices are GPUs",)


def with_setting(config: Any, path: str, value: Any) -> Any:
    first, _, rest = path.partition(".")
    options = getattr(config, "options", None)
    if first not in [own.name for own in fields(config)] and options is not None:
        return replace(config, options=options | {first: value})
    now = getattr(config, first)
    if not rest:
        return replace(config, **{first: value})
    new = now | {rest: value} if isinstance(now, dict) else with_setting(now, rest, value)
    return replace(config, **{first: new})


def with_another(config: JobConfig, path: str, value: Any, kind: Any) -> JobConfig:
    """The job with another value of a setting, by its annotated type; itself where none comes to mind."""
    choices = [one for part in (kind, *get_args(kind)) for one in get_args(part) if isinstance(one, str)]
    tries: list[Any] = []
    if isinstance(value, bool):
        tries = [not value]
    elif isinstance(value, str):
        tries = [one for one in REGISTRIES.get(path, choices) if one != value][:1]
    elif isinstance(value, int | float):
        tries = [value + 1] if isinstance(value, int) else [value / 2 + 0.25, value * 2]
    for other in tries:
        with suppress(ValueError):
            return with_setting(config, path, other)
    return config


_REFUSED = ("algorithm.over_sampling", "cost.observation", "schedule.split")
"""Settings that are refused with other values, where they are not read."""


def told(config: JobConfig) -> tuple[Any, ...]:
    recorder = simulate(config, 3)
    timeline = recorder.timeline
    return recorder.samples(), timeline.spans, timeline.iteration_ends, recorder.ledger.to_json()


def inert_changed(job: JobConfig) -> JobConfig:
    """The job with other values of all that it does not read."""
    now, kinds = settings_of(job), groups_of(JobConfig)
    other = job
    for path, one in now.items():
        if one.unread is not None and not path.startswith(_REFUSED):
            other = with_another(other, path, one.value, kinds.get(path))
    changed = [path for path, one in settings_of(other).items() if one.value != now[path].value]
    assert len(changed) > 20 and naming_settings(other) == naming_settings(job)
    assert cell_name(other) == cell_name(job)
    return other


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["colocate_sync", "half_step", "fully_async"])
@settings(max_examples=2)
@given(data=st.data())
def test_what_a_job_does_not_read_changes_no_byte_of_it_and_names_no_cell(schedule: str, data: st.DataObject) -> None:
    job = random_job(schedule, lambda values: data.draw(st.sampled_from(values)))
    job = replace(job, model=replace(job.model, experts=8, active_experts=2))
    assert told(inert_changed(job)) == told(job)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what MLflow loads has some
@pytest.mark.parametrize(
    "asked", ["schedule=colocate_sync cluster.devices=1", "schedule=separated_sync algorithm=ppo task=copy"]
)
def test_what_a_real_run_does_not_read_changes_no_byte_of_it(asked: str, tmp_path: Path) -> None:
    job = settle([*SMALL.split(), "iterations=2", *asked.split()], Machine(cores=8, gpus=0, gpu_bytes=0), plan_split)
    with closing(launch_server(PRELOAD)) as server:
        folders = [
            run_seed(config, job.plan, 0, tmp_path / name, Console(quiet=True), LeaveRequest(), server)
            for name, config in (("as it is", job.config), ("other", inert_changed(job.config)))
        ]
    assert differences(*folders) == []


JOBS = [
    "backend=real",
    "backend=virtual",
    "backend=real algorithm=ppo algorithm.kl_coef=0.1 algorithm.filter=zero_variance checkpoint.every=1",
    "backend=real schedule=fully_async schedule.order=completion algorithm.correction=tis task=lookup",
]


@settings(max_examples=20)
@given(data=st.data())
def test_what_a_job_reads_names_its_cell(data: st.DataObject) -> None:
    job, kinds = compose_job(data.draw(st.sampled_from(JOBS)).split()), groups_of(JobConfig)
    now = settings_of(job)
    live = [path for path, one in now.items() if one.unread is None and one.names_cell and "." in path]
    path = data.draw(st.sampled_from(live))
    other = with_another(job, path, now[path].value, kinds.get(path))
    assert (naming_settings(other) != naming_settings(job)) == (other != job)


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        (["algorithm.kl=k1"], "algorithm.kl=k1 has no effect: it is read only where algorithm.kl_coef is above 0"),
        (["algorithm.kl_coef=0.1", "algorithm.reference=true"], "algorithm.reference=true has no effect: it is re"),
        (["algorithm.options.cap=2"], "algorithm.options.cap=2 has no effect: it is read only where loss, advantage, "),
        (["schedule.split.critic=1"], "schedule.split.critic=1 has no effect: it is read only where there is a crit"),
        (["schedule.on_stale=drop"], "schedule.on_stale=drop has no effect: it is read only where schedule.order is"),
        (["device=h200", "backend=real"], "device=h200 has no effect: it is read only where the job is simulated by"),
        (["task=copy", "backend=virtual"], "task=copy has no effect: it is read only where the job runs for real; "),
        (["cost.lengths.values=[3]", "backend=virtual"], "cost.lengths.values=[3] has no effect: it is read only wh"),
        (["task.reward_options.digits=2"], "task.reward_options.digits=2 has no effect: it is read only where task.r"),
        (["engine.keep_cache=true", "schedule=one_step_off"], "engine.keep_cache=true has no effect: it is read only"),
    ],
)
def test_a_setting_that_was_given_and_is_not_read_is_refused_by_name(given_settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_unread(given_settings, compose_job(given_settings))
    assert str(refused.value).startswith(message)


def test_of_a_file_of_the_users_only_what_it_changes_is_given(tmp_path: Any) -> None:
    preset = (EXPERIMENTS / "algorithm" / "grpo.yaml").read_text()
    (tmp_path / "same.yaml").write_text(preset)
    (tmp_path / "other.yaml").write_text(preset.replace("value_clip: 0.5", "value_clip: 0.2"))
    same, other = ([f"algorithm={tmp_path / name}.yaml"] for name in ("same", "other"))
    refuse_unread(same, compose_job(same))
    with pytest.raises(ConfigError, match="^algorithm.value_clip=0.2 has no effect: it is read only where there is a"):
        refuse_unread(other, compose_job(other))
