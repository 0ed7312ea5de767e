"""A job that does again what was recorded of a run (`replay`): which can be, and that the record is of this job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.checks.earlier_run import config_of, manifest_of, refuse_missing, refuse_other, run_of_seed
from harness.config import Backend, ConfigError, JobConfig
from harness.config.job import flatten
from schedules import Schedule

_REPEAT_THEMSELVES = ("colocate_sync", "separated_sync", "one_step_off", "k_step_off", "delayed_update")
"""Built-in schedules under which order of arrival decides nothing."""
_BESIDE = ("replay", "cluster.on_lost_engine", "cluster.serve_membership", "cluster.oversubscribe")
"""Settings that both need not have alike, nor limits of time; nor what is simulated, where the run is real."""


def run_to_replay(config: JobConfig, seed: int) -> Path | None:
    """The folder of the recorded run of this seed; None where the job is no replay."""
    return run_of_seed(config.replay, seed)


def check_replay(config: JobConfig, schedule: Schedule, backend: Backend, gpu: bool) -> None:
    """Raises ConfigError for a job that cannot be a replay, and unless for every seed a finished run of this job is
    there."""
    told = f"replay={config.replay}"
    if why := why_not_replayed(config, schedule, backend, gpu):
        raise ConfigError(f"{told}: {why}")
    for seed in config.seed_list:
        folder = run_to_replay(config, seed)
        assert folder is not None, "asked where there is one"
        refuse_missing(folder, ("config.yaml", "manifest.json", "DONE"), f"{told} has no finished run of seed {seed}")
        _check_same(told, folder, config, backend)


def _check_same(told: str, folder: Path, config: JobConfig, backend: Backend) -> None:
    from harness.config.compose import NOT_IN_CELL, plain  # with Hydra, which other checks need not load

    def same(one: JobConfig) -> dict[str, Any]:
        left_out = (*NOT_IN_CELL, "cost", "device") if backend == "real" else NOT_IN_CELL
        tree = {name: value for name, value in plain(one).items() if name not in left_out}
        return {
            name: value
            for name, value in flatten(tree).items()
            if name not in _BESIDE and not name.endswith("_timeout_s")
        }

    manifest = manifest_of(folder)
    if manifest.get("backend") != backend:
        raise ConfigError(f"{told} is of a run with backend={manifest.get('backend')}, and this one has {backend}")
    if "begun_with" in manifest:
        raise ConfigError(f"{told} began with a checkpoint of other devices, whose engines are not there; leave it out")
    there, here = (same(one) for one in (config_of(folder), config))
    refuse_other(told, there, here)


def why_not_replayed(config: JobConfig, schedule: Schedule, backend: Backend, gpu: bool) -> str | None:
    """What of a job keeps it from being replayed, and the fix; None: nothing. gpu: it computes on some."""
    algorithm = config.algorithm
    real = backend == "real"
    refused = {
        f"under schedule={config.schedule.name} order of arrival decides nothing: the same command without replay "
        "gives the same bits": config.schedule.name in _REPEAT_THEMSELVES,
        f"schedule={config.schedule.name} generates batch by batch on the devices of training; only schedules whose "
        "engines stream can be replayed": schedule.colocated,
        f"engine={config.engine.name}: what it samples depends on which samples are beside; replay runs of "
        "engine=torch": real and config.engine.name != "torch",
        "on GPUs what an engine samples depends on which samples are beside (docs/equivalence.md); set "
        "cluster.kind=cpu": gpu,
        "engine.keep_cache=true: keys and values of older weights are not recorded; replay runs with false": (
            config.engine.keep_cache
        ),
        f"algorithm.advantage={algorithm.advantage}: which version of the critic a value is of is not recorded": (
            algorithm.has_critic
        ),
        f"algorithm.correction={algorithm.correction} and algorithm.advantage={algorithm.advantage} learn from what "
        "actor_fwd computes, and by which version is not recorded": algorithm.learns_from_actor_fwd,
        f"algorithm.advantage={algorithm.advantage}: by which versions greedy responses were sampled is not recorded": (
            algorithm.has_greedy_baseline
        ),
        f"engine.sample_limit_s={config.engine.sample_limit_s}: where it cut samples off is not recorded": (
            config.engine.sample_limit_s is not None
        ),
        f"algorithm.filter={algorithm.filter}: in which order groups were refused is not recorded": algorithm.filters,
        f"schedule.order={schedule.order} and algorithm.kl_coef={algorithm.kl_coef}: in which micro-batches the "
        "reference scored is not recorded": schedule.order != "fifo" and algorithm.kl_coef > 0,
        f"task.buffer={config.task.buffer}: when it was told of rewards is not recorded": (
            config.task.buffer is not None
        ),
        f"task={config.task.name}: samples of several turns are not replayed": _several_turns(config, real),
        f"eval.every={config.eval.every}: set it to 0, a replay learns what the recorded run did": (
            config.eval.every > 0
        ),
        f"checkpoint.every={config.checkpoint.every}: set it to 0, a replay is begun again from its beginning": (
            config.checkpoint.every > 0 or config.checkpoint.begin_with is not None
        ),
        "cluster.on_lost_engine=go_on: set it to end, others cannot do what was recorded of an engine": (
            config.cluster.on_lost_engine == "go_on"
        ),
    }
    return next((why for why, is_so in refused.items() if is_so), None)


def _several_turns(config: JobConfig, real: bool) -> bool:
    from harness.tasks import environment_of, make_task

    return environment_of(make_task(config)) is not None if real else config.cost.turns is not None
