"""One run: a configuration and a seed, from an empty folder to DONE."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness.config import JobConfig
from harness.metrics.manifest import RunIdentity, build_manifest
from harness.metrics.run_files import RunDirectory
from harness.metrics.safe_files import replacing
from harness.metrics.timeline import Timeline
from harness.runner.build import make_task
from harness.runner.checks import Plan
from harness.runner.compose import cell_name, make_schedule, plain
from harness.runner.initial_weights import initial_model
from harness.runner.progress import ProgressDisplay
from harness.runner.recorder import Recorder, places
from harness.runtime.clock import RealClock
from harness.runtime.handles import call_all

if TYPE_CHECKING:
    from harness.metrics.tracking import Tracker
    from harness.runner.assemble import Assembly

WEIGHTS = "weights.safetensors"


def run_directory(config: JobConfig, seed: int, results: Path) -> RunDirectory:
    """The folder of this configuration and seed."""
    return RunDirectory(results, config.experiment, cell_name(config), seed)


def run_seed(config: JobConfig, plan: Plan, seed: int, results: Path, console: Console) -> Path:
    """Run one seed for real and return its folder. Whatever ends it early leaves no DONE, no lock and no process."""
    identity = RunIdentity(
        experiment=config.experiment,
        cell=cell_name(config),
        seed=seed,
        schedule=config.schedule.name,
        model=config.model.name,
        engine=config.engine.name,
        backend="real",
        smoke=config.smoke,
    )
    with run_directory(config, seed, results) as folder, ExitStack() as stack:
        manifest = build_manifest(identity, {"run": seed, "warm_start": 0, "weights": 0})
        folder.write_config(plain(config))
        folder.write_manifest(manifest)
        runner = stack.enter_context(asyncio.Runner())
        clock = RealClock.starting_now()
        timeline = Timeline(places(plan.placement), warmup=config.warmup_iterations)
        recorder = Recorder(
            folder, timeline, clock, group_size=config.algorithm.group_size, devices=plan.placement.total
        )
        assembly, tracker = _start(stack, runner, config, plan, identity, manifest, results, recorder, console)
        recorder.listeners.append(tracker.log)
        with ProgressDisplay(console, _title(config, seed), config.iterations) as display:
            recorder.listeners.append(display.iteration)
            recorder.on_doing = display.doing
            runner.run(_measure(config, assembly, clock))
        with console.status("writing results"):
            runner.run(_save_weights(config, assembly, folder))
            recorder.write()
            tracker.finish(artifacts=_draw(folder))
        folder.finish()
    return folder.path


def _title(config: JobConfig, seed: int) -> str:
    return f"{config.schedule.name} | {config.model.name} | {config.task.name} | seed {seed} | measured on this machine"


def _start(
    stack: ExitStack,
    runner: asyncio.Runner,
    config: JobConfig,
    plan: Plan,
    identity: RunIdentity,
    manifest: dict[str, Any],
    results: Path,
    recorder: Recorder,
    console: Console,
) -> tuple[Assembly, Tracker]:
    """Bring everything up. MLflow takes seconds to load and to make its database: the roles start meanwhile."""
    with console.status("making the warm start (once per model and task, about 20 s)"):
        model = initial_model(config.model, make_task(config), results)
    with console.status("starting Ray and the roles"), ThreadPoolExecutor(1) as background:
        tracking = background.submit(_open_tracker, results, identity, config, manifest)

        from harness.runner.assemble import assemble
        from harness.runtime.ray_runtime import RayRuntime

        runtime = stack.enter_context(
            RayRuntime(
                plan.placement,
                gpu=plan.gpu,
                start_timeout_s=config.cluster.wait_timeout_s,
                call_timeout_s=config.cluster.call_timeout_s,
            )
        )
        assembly = assemble(
            config,
            model,
            make_schedule(config),
            identity.seed,
            placement=plan.placement,
            runtime=runtime,
            clock=recorder.clock,
            observer=recorder,
        )
        runner.run(assembly.coordinator.connect())
        return assembly, stack.enter_context(tracking.result())


def _open_tracker(results: Path, identity: RunIdentity, config: JobConfig, manifest: dict[str, Any]) -> Tracker:
    from harness.metrics.tracking import Tracker

    return Tracker(results, identity, plain(config), (manifest["git"] or {}).get("commit"))


async def _measure(config: JobConfig, assembly: Assembly, clock: RealClock) -> None:
    """The schedule, from time 0."""
    clock.restart()
    await call_all(assembly.workers, "begin", clock.origin)
    try:
        await make_schedule(config).run(assembly.job)
    except Exception as failure:
        # A death shows first in whoever was talking to the dead: say who it was, not only who noticed.
        gone = await asyncio.gather(*(worker.is_dead() for worker in assembly.workers))
        dead = [worker.name for worker, is_dead in zip(assembly.workers, gone, strict=True) if is_dead]
        if dead:
            raise RuntimeError(f"{', '.join(dead)} died; its own last words are in Ray's logs") from failure
        raise


async def _save_weights(config: JobConfig, assembly: Assembly, folder: RunDirectory) -> None:
    if not config.save_weights:
        return
    from safetensors.torch import save_file

    weights = await call_all(assembly.trainers, "full_weights")
    with replacing(folder.path / WEIGHTS) as path:
        save_file(weights[0], path)


def _draw(folder: RunDirectory) -> list[Path]:
    """Plots, and with them everything that MLflow gets as a file."""
    from harness.report.plots import draw_run

    draw_run(folder.path)
    files = sorted(path for path in folder.path.iterdir() if path.is_file())
    return [path for path in files if path.name != WEIGHTS and not path.name.startswith(".")]
