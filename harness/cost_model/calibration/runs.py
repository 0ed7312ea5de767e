"""Costs from finished runs: reads their folders and fits. `make calibrate` is a line over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from harness.config import ConfigError, CostConfig, JobConfig, ModelConfig, first_line
from harness.config.compose import compose_job
from harness.config.fields import Name
from harness.cost_model import shape
from harness.cost_model.calibration.costs import Measured, calibrate, together
from harness.cost_model.calibration.fitting import Fitted
from harness.cost_model.calibration.recorded import measured
from harness.cost_model.roofline import Layout, roofline
from harness.metrics.run_files import is_done, load_manifest, load_samples, load_timeline

WARMUP = 4
"""Iterations that are left out, a quarter of a short run: the first ones allocate memory and fill caches."""


@dataclass(frozen=True)
class Recorded:
    """A finished run: what it did, with which model."""

    measured: Measured
    model: ModelConfig
    cell: str


def read_run(folder: Path) -> Recorded:
    """Raises ConfigError for a folder that is no finished real run of a synchronous schedule."""
    if not is_done(folder):
        raise ConfigError(f"run={folder} is no finished run; give a folder such as results/bench/<cell>/seed=0")
    manifest = load_manifest(folder)
    if manifest["backend"] != "real":
        raise ConfigError(f"run={folder} is {manifest['backend']}: its times were simulated; give a run that was real")
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    algorithm = config["algorithm"]
    try:
        model = TypeAdapter(ModelConfig).validate_python(config["model"])
    except ValidationError as error:
        raise ConfigError(f"run={folder}: {first_line(error, 'model.')}") from error
    timeline = load_timeline(folder)
    try:
        found = measured(
            timeline,
            load_samples(folder).to_pandas(),
            slots=config["engine"]["slots"],
            micro_batch=algorithm["micro_batch_groups"] * algorithm["group_size"],
            warmup=min(WARMUP, len(timeline.iteration_ends) // 4),
        )
    except ValueError as error:
        raise ConfigError(f"run={folder}: {error}") from error
    return Recorded(found, model, manifest["cell"])


def calibrate_runs(folders: Sequence[Path], base: JobConfig, name: str | None = None) -> Fitted:
    """Costs called `name` (by default as the first run's cell), fitted to all of these runs at once.

    base: the job whose costs stand for what no run shows. Raises ConfigError as `read_run`, and for runs of different
    models.
    """
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if replace(run.model, checkpoint=None) != replace(runs[0].model, checkpoint=None):
            raise ConfigError(
                f"run={folder} has model={run.model.name}, {folders[0]} {runs[0].model.name}; give runs of one"
            )
    costs = replace(base_costs(base, runs[0].model), name=checked_name(name or runs[0].cell))
    return replace(calibrate(together([run.measured for run in runs]), costs), base=base.cost.name)


def checked_name(name: str) -> str:
    """Raises ConfigError for a name that cannot name a file."""
    try:
        return TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise ConfigError(
            f"name={name} cannot name a file of costs; use letters, digits and . _ - such as mine"
        ) from None


def base_costs(job: JobConfig, model: ModelConfig) -> CostConfig:
    """The costs of one device that holds all of `model`, as `job` has them or its roofline gives them."""
    cost = job.cost if isinstance(job.cost, CostConfig) else roofline(model, job.device, job.cost, Layout())
    return replace(cost, weight_bytes=shape.weight_bytes(model))


def base_job(settings: Sequence[str]) -> JobConfig:
    """The job whose costs stand for what was not measured: `cost=tiny_cpu` unless the settings name others."""
    given = any(setting.startswith("cost=") for setting in settings)
    return compose_job(settings if given else ["cost=tiny_cpu", *settings])
