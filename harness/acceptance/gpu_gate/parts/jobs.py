"""Whole jobs, as `make bench` runs them: every schedule that fits on what is there, with random weights."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.results import Check
from harness.checks.job import plan_job
from harness.config import ConfigError
from harness.config.machine import this_machine
from harness.config.registries import SCHEDULES
from harness.metrics.samples import FATES

_SMALL = (
    *("model=tiny", "model.warm_start=false", "algorithm.batch_groups=4", "algorithm.micro_batch_groups=1"),
    *("algorithm.group_size=2", "engine.slots=8"),
)
_LARGE = (
    *(
        "model.checkpoint=null",
        "model.vocabulary=32768",
        "training.recompute_activations=true",
        "training.layout=packed",
    ),
    *("algorithm.batch_groups=8", "algorithm.micro_batch_groups=1", "algorithm.group_size=4", "engine.slots=32"),
)
_ALWAYS = ("iterations=3", "backend=real", "smoke=true", "save_weights=false", "force=true", "warmup_iterations=1")


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks of jobs on all GPUs, with qwen0.5b and qwen7b; on cores with tiny, as if there were four: so training has
    two ranks."""
    from harness.driver import PRELOAD
    from harness.runtime.local_runtime import launch_server

    models = [("model=qwen0.5b", *_LARGE), ("model=qwen7b", *_LARGE)] if setting.gpu else [_SMALL]
    server = launch_server(PRELOAD, setting.folder / "jobs_server.log")
    try:
        for model in models:
            for schedule in SCHEDULES:
                yield _job(schedule, model, setting, server)
    finally:
        server.close()


def _job(schedule: str, model: tuple[str, ...], setting: GateSetting, server: object) -> Check:
    from harness.config.compose import compose_job, make_schedule
    from harness.driver.run import run_seed
    from harness.runtime.interrupts import leaving_when_asked

    devices = torch.cuda.device_count() if setting.gpu else 4
    where = ("cluster.kind=gpu",) if setting.gpu else ("cluster.kind=cpu", "cluster.oversubscribe=true")
    name = f"{schedule}, {model[0].partition('=')[2]}"
    settings = [f"schedule={schedule}", f"cluster.devices={devices}", "experiment=gate", *model, *where, *_ALWAYS]
    try:
        config = compose_job(settings)
        plan = plan_job(config, make_schedule(config), this_machine())
    except ConfigError as error:
        return Check(name, f"left out: {error}")
    with leaving_when_asked(at_once=True) as leave:
        folder = run_seed(config, plan, 0, setting.folder / "jobs", Console(file=io.StringIO()), leave, server)  # type: ignore[arg-type]
    return _found(name, devices, folder, config.iterations)


def _found(name: str, devices: int, folder: Path, iterations: int) -> Check:
    """The run's own files are asked: each iteration has its line, and the ledger accounts for every sample."""
    from harness.metrics.run_files import load_ledger, load_metrics

    metrics, ledger = load_metrics(folder), load_ledger(folder)
    kept = sum(ledger[fate] for fate in FATES)
    speed = metrics[-1].get("throughput/samples_per_s", float("nan"))
    said = f"{devices} devices, {len(metrics)} iterations, {ledger['trained']} samples trained, {speed:.3g} samples/s"
    return Check(name, said, (folder / "DONE").exists() and len(metrics) == iterations and kept == ledger["admitted"])
