"""Whole jobs, as `make bench` runs them: every schedule that fits on what is there, with random weights.

On one GPU schedules whose roles have devices of their own run as trials: their processes share it, and weights travel
over Gloo. A trial shows that the code runs, and measures nothing of its schedule."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.results import Check
from harness.checks.settle import SettledJob, settle_cell
from harness.config import ConfigError
from harness.config.machine import this_machine
from harness.config.registries import SCHEDULES
from harness.metrics.samples import FATES
from harness.planner.automatic import plan_split

if TYPE_CHECKING:
    from harness.runtime.fork_server import ForkServer

_FIRST_S = 60.0  # a job is begun where that much time is left, and the longest so far
_TINY = (
    *("model=tiny", "model.warm_start=false", "algorithm.batch_groups=4", "algorithm.micro_batch_groups=1"),
    *("algorithm.group_size=2", "engine.slots=8"),
)
_QWEN = ("model.checkpoint=null", "model.vocabulary=32768", "algorithm.batch_groups=8", "algorithm.group_size=4")
_ALWAYS = ("iterations=3", "backend=real", "smoke=true", "save_weights=false", "force=true", "warmup_iterations=1")
_SHARED = ("cluster.oversubscribe=true",)
_APART = {"half_step": ("cluster.devices=3", "schedule.split.rollout=2")}
"""The fewest devices of a schedule, where they are not two."""


def run(setting: GateSetting) -> Iterator[Check]:
    """Jobs on all GPUs: qwen0.5b under every schedule; with an engine that fills the device beside its trainer; and
    qwen7b. What is not given is chosen as `bench` chooses it. On cores tiny: `colocate_sync` on four, so that training
    has several ranks, and trials."""
    from harness.driver import PRELOAD
    from harness.runtime.local_runtime import launch_server

    server, longest = launch_server(PRELOAD, setting.folder / "jobs_server.log"), _FIRST_S
    try:
        for name, settings in _jobs(setting):
            if name in setting.kept:
                continue
            setting.require_time(longest)
            began = time.monotonic()
            yield _job(name, settings, setting, server)
            longest = max(longest, time.monotonic() - began)
    finally:
        server.close()


def _jobs(setting: GateSetting) -> Iterator[tuple[str, tuple[str, ...]]]:
    gpus = torch.cuda.device_count() if setting.gpu else 0
    models = [("model=qwen0.5b", *_QWEN), ("model=qwen7b", *_QWEN)] if gpus else [_TINY]
    for model in models:
        for schedule in SCHEDULES:
            name = f"{schedule}, {model[0].partition('=')[2]}"
            alone = schedule == "colocate_sync"
            if gpus > 1 or alone:
                yield name, (*model, f"schedule={schedule}", f"cluster.devices={gpus or 4}", *_SHARED * (not gpus))
            if gpus < 2 and not alone:
                fewest = _APART.get(schedule, ("cluster.devices=2",))
                yield f"trial of {name}", (*model, f"schedule={schedule}", *fewest, *_SHARED)
        if model is models[0]:
            devices = f"cluster.devices={max(1, gpus)}"
            yield _FILLED, (*model, "schedule=colocate_sync", devices)


_FILLED = "colocate_sync, an engine that fills what the trainer leaves"


def _job(name: str, settings: tuple[str, ...], setting: GateSetting, server: ForkServer) -> Check:
    from harness.driver.run import run_seed
    from harness.runtime.interrupts import leaving_when_asked

    kind = f"cluster.kind={'gpu' if setting.gpu else 'cpu'}"
    try:
        job = _settled((*settings, "experiment=gate", kind, *_ALWAYS))
        if name == _FILLED:
            job = _filled(job, (*settings, "experiment=gate", kind, *_ALWAYS))
    except ConfigError as error:
        return Check(name, str(error), left_out=True)
    with leaving_when_asked(at_once=True) as leave:
        console = Console(file=io.StringIO())
        folder = run_seed(job.config, job.plan, 0, setting.folder / "jobs", console, leave, server)
    return _found(name, job, folder)


def _settled(arguments: tuple[str, ...]) -> SettledJob:
    return settle_cell(arguments, this_machine(), plan_split)


def _filled(job: SettledJob, arguments: tuple[str, ...]) -> SettledJob:
    """The job with as many slots as the plan leaves its engine room for; on cores with twice its own."""
    share = job.plan.shares["rollout"]
    slots = job.config.engine.slots
    room = int(share.cache / (share.token * job.config.model.max_length)) if share.gpu else 2 * slots
    return _settled((*arguments, f"engine.slots={max(slots, room)}"))


def _found(name: str, job: SettledJob, folder: Path) -> Check:
    """The run's own files are asked: each iteration has its line, and the ledger accounts for every sample."""
    from harness.metrics.run_files import load_ledger, load_metrics

    metrics, ledger = load_metrics(folder), load_ledger(folder)
    kept = sum(ledger[fate] for fate in FATES)
    said = [f"{job.plan.placement.total} devices, {len(metrics)} iterations, {ledger['trained']} samples trained"]
    if name.startswith("trial"):
        said.append("of processes that share a device: no measurement of the schedule")
    else:
        said.append(f"{metrics[-1].get('throughput/samples_per_s', float('nan')):.3g} samples/s")
    whole = (folder / "DONE").exists() and len(metrics) == job.config.iterations and kept == ledger["admitted"]
    return Check(name, ", ".join([*said, *job.messages]), whole)
