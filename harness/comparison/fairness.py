"""Whether runs may be compared: everything that differs must differ on purpose."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from harness.comparison.runs import Run
from harness.config import ConfigError, JobConfig
from harness.config.inputs import SHOWN, digests
from harness.config.job import flatten, job_config, trained_in_iteration
from harness.config.readers import live_settings, settings_of

_LAYOUT = frozenset(
    {
        "schedule.split",
        "engine.tensor_parallel",
        "training.tensor_parallel",
        "training.pipeline_parallel",
        "training.expert_parallel",
        "training.recompute_activations",
        "algorithm.micro_batch_groups",
    }
)
"""How a job lies on its devices: the user's choice or the planner's, one per cell. It stands in the table instead."""

_CLUSTER = ("devices", "kind", "threads_per_device", "oversubscribe", "queue", "queue_options")
"""Settings of the cluster that decide how fast a run can be; the others are limits on waiting."""

_CONTENT = ".content"

_ALONE = ("backend", "seeds", "samples", "warmup_iterations", "max_tokens", *(f"cluster.{name}" for name in _CLUSTER))
_WHOLE = ("schedule", "model", "engine", "task", "algorithm", "training", "cost", "device")


def fairness_key(config: Mapping[str, Any], seeds: Sequence[int], axes: Iterable[str] = ()) -> dict[str, Any]:
    """Settings that have to be equal in two cells, by path: schedule, model, engine, task, algorithm with its sampling
    parameters, training, devices in all, samples, seeds, backend; without the axes, which differ on purpose.

    config: config.yaml, or `plain(config)`. An axis is a setting's path, or a group: `schedule` is all of its options.
    How a job is laid out over its devices is not in the key, nor is what it does not read, such as costs where nothing
    is simulated. Raises ConfigError for a run that an earlier version made."""
    missing = [group for group in _WHOLE if group not in config]
    if missing:
        raise ConfigError(f"a run says nothing of {', '.join(missing)}: an earlier version made it; run it again")
    try:
        key = live_settings(job_config(config))
    except ConfigError:  # of another version's, or changed by hand: in doubt a setting is read
        key = flatten(config)
    key["seeds"] = sorted(seeds)
    key["samples"] = config["iterations"] * trained_in_iteration(config["algorithm"])
    return {name: value for name, value in key.items() if _has_to_agree(name, axes)}


def shared_settings(job: JobConfig, axes: Iterable[str]) -> dict[str, Any]:
    """Settings that cells along these axes have in common and that are not the default, whether this one reads them or
    another: those of the key, by which their experiment is named."""
    told = {name: one.value for name, one in settings_of(job).items() if one.value != one.default}
    told["samples"] = job.iterations * job.algorithm.trained_samples
    return {name: value for name, value in told.items() if _has_to_agree(name, axes)}


def _has_to_agree(name: str, axes: Iterable[str]) -> bool:
    """Whether cells along these axes have to have a setting alike."""
    free = {*_LAYOUT, *axes} | ({"samples"} if "iterations" in axes else set())
    return (name.partition(".")[0] in _WHOLE or name in _ALONE) and not any(_within(name, axis) for axis in free)


def run_key(run: Run, seeds: Sequence[int], axes: Iterable[str] = ()) -> dict[str, Any]:
    """`fairness_key` of a finished run, and what was in the files that its settings name, as `<setting>.content`."""
    contents = contents_of(run)
    free = {name for name in contents for axis in axes if _within(name, axis)}
    return fairness_key(run.config, seeds, axes) | {name: contents[name] for name in contents.keys() - free}


def contents_of(run: Run) -> dict[str, str]:
    """Digests of the files that the run's settings name, as `<setting>.content`."""
    return {f"{setting}{_CONTENT}": digest[:SHOWN] for setting, digest in digests(run.manifest).items()}


def refuse_unfair(cells: Mapping[str, Sequence[Run]], axes: Iterable[str] = ()) -> None:
    """Raise ConfigError, naming both cells, the setting and its two values, where these cells may not be compared.
    cells: runs by the label of their cell. Runs of a cell may differ in nothing but their seed."""
    for label, runs in cells.items():
        smoke = next((run for run in runs if run.identity.smoke), None)
        if smoke is not None:
            raise ConfigError(f"{label}: {smoke.path} is a smoke run, which is no result; run it without smoke=true")
        keys = [(str(run.path), run_key(run, ())) for run in runs]
        for other in keys[1:]:
            refuse_unequal(dict((keys[0], other)))
    seeds = {label: [run.identity.seed for run in runs] for label, runs in cells.items()}
    refuse_unequal({label: run_key(runs[0], seeds[label], axes) for label, runs in cells.items() if runs})


def refuse_unequal(keys: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError where two of these fairness keys, by the label of their cell, differ."""
    for (first, key), (other, other_key) in combinations(keys.items(), 2):
        differing = first_difference(key, other_key)
        if differing is not None:
            name, here, there = differing
            values = f"{name}={here} in the first, {there} in the second"
            raise ConfigError(f"{first} and {other} cannot be compared: {values}; {_fix(name)}")


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The most informative setting that both read and that two fairness keys differ in, and its two values; None where
    there is none. What only one reads follows from another setting."""
    for name in sorted(one.keys() & other.keys(), key=_importance):
        if one[name] != other[name]:
            return name, setting_text(one[name]), setting_text(other[name])
    return None


def _importance(name: str) -> tuple[int, str]:
    """The backend and names first: two models say more than their hidden sizes. What follows from others comes last."""
    if name in ("seeds", "samples"):
        return 3, name
    return 0 if name == "backend" else 1 if name.endswith(".name") else 2, name


def _fix(name: str) -> str:
    if name == "seeds":
        return "run both with the same seeds"
    if name.endswith(_CONTENT):
        return f"what {name.removesuffix(_CONTENT)} names has changed in between; run both again with force=true"
    if name == "samples":
        return "make iterations x algorithm.batch_groups x algorithm.group_size the same in both"
    return f"run both with the same {name}, or compare along it with `cadence sweep`"


def setting_text(value: Any) -> str:
    """A setting's value as it is shown."""
    return value if isinstance(value, str) else json.dumps(value)


def _within(name: str, axis: str) -> bool:
    return name == axis or name.startswith(f"{axis}.")
