"""One run: a configuration and a seed, from an empty folder to DONE."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness.config import JobConfig, ModelConfig
from harness.metrics.manifest import RunIdentity, build_manifest
from harness.metrics.run_files import RunDirectory
from harness.metrics.safe_files import replacing
from harness.report.titles import HOW_TIMED
from harness.runner.backends import Wanted, clock_of, event_loop
from harness.runner.build import make_task
from harness.runner.checks import Plan
from harness.runner.compose import cell_name, make_schedule, plain
from harness.runner.initial_weights import initial_model
from harness.runner.progress import ProgressDisplay
from harness.runner.session import Session
from harness.runtime.handles import Handle, call_all

if TYPE_CHECKING:
    from harness.metrics.tracking import Tracker

WEIGHTS = "weights.safetensors"
MEMBERSHIP = "membership.json"


def run_directory(config: JobConfig, seed: int, results: Path) -> RunDirectory:
    """The folder of this configuration and seed."""
    return RunDirectory(results, config.experiment, cell_name(config), seed)


def run_seed(config: JobConfig, plan: Plan, seed: int, results: Path, console: Console) -> Path:
    """Run one seed and return its folder. Whatever ends it early leaves no DONE, no lock and no process."""
    identity = RunIdentity(
        experiment=config.experiment,
        cell=cell_name(config),
        seed=seed,
        schedule=config.schedule.name,
        model=config.model.name,
        engine=config.engine.name,
        backend=plan.backend,
        smoke=config.smoke,
    )
    with run_directory(config, seed, results) as folder, ExitStack() as stack:
        manifest = build_manifest(identity, {"run": seed, "warm_start": 0, "weights": 0})
        folder.write_config(plain(config))
        folder.write_manifest(manifest)
        wanted = Wanted(config, make_schedule(config), plan, _initial_model(config, plan, results, console), seed)
        runner = stack.enter_context(event_loop(plan))
        session = Session(wanted, clock_of(plan, runner.get_loop()))
        session.recorder.listeners.append(folder.append_metrics)
        session.told_where = partial(_tell_where, folder)
        tracker = _start(stack, runner, session, identity, manifest, results, console)
        session.recorder.listeners.append(tracker.log)
        with ProgressDisplay(console, _title(identity, config), config.iterations) as display:
            session.recorder.listeners.append(display.iteration)
            session.recorder.on_doing = display.doing
            runner.run(session.measure())
        with console.status("writing results"):
            if config.save_weights and plan.backend == "real":
                runner.run(_save_weights(session.trainers, folder))
            session.recorder.write(folder)
            tracker.finish(artifacts=_draw(folder))
        folder.finish()
    return folder.path


@contextmanager
def _tell_where(folder: RunDirectory, url: str, token: str) -> Iterator[None]:
    """Where the engines of this run are served: for its owner's eyes, and as long as they are."""
    path = folder.path / MEMBERSHIP
    try:
        path.touch(mode=0o600)
        path.write_text(json.dumps({"url": url, "token": token}))
        yield
    finally:
        path.unlink()


def _title(identity: RunIdentity, config: JobConfig) -> str:
    parts = [identity.schedule, identity.model, config.task.name, f"seed {identity.seed}"]
    return " | ".join([*parts, HOW_TIMED[identity.backend]])


def _initial_model(config: JobConfig, plan: Plan, results: Path, console: Console) -> ModelConfig:
    """Only a real run starts from weights."""
    if plan.backend != "real":
        return config.model
    with console.status("making the warm start (once per model and task, about 20 s)"):
        return initial_model(config.model, make_task(config), results)


def _start(
    stack: ExitStack,
    runner: asyncio.Runner,
    session: Session,
    identity: RunIdentity,
    manifest: dict[str, Any],
    results: Path,
    console: Console,
) -> Tracker:
    """Bring everything up. MLflow takes seconds to load and to make its database: the roles start meanwhile."""
    with console.status("starting the roles"), ThreadPoolExecutor(1) as background:
        config = session.wanted.config
        tracking = background.submit(_open_tracker, results, identity, config, manifest)
        session.start(stack)
        runner.run(session.connect())
        return stack.enter_context(tracking.result())


def _open_tracker(results: Path, identity: RunIdentity, config: JobConfig, manifest: dict[str, Any]) -> Tracker:
    from harness.metrics.tracking import Tracker

    return Tracker(results, identity, plain(config), (manifest["git"] or {}).get("commit"))


async def _save_weights(trainers: Sequence[Handle], folder: RunDirectory) -> None:
    from safetensors.torch import save_file

    weights = await call_all(trainers, "full_weights")
    with replacing(folder.path / WEIGHTS) as path:
        save_file(weights[0], path)


def _draw(folder: RunDirectory) -> list[Path]:
    """Plots, and with them everything that MLflow gets as a file."""
    from harness.report.plots import draw_run

    draw_run(folder.path)
    files = sorted(path for path in folder.path.iterdir() if path.is_file())
    return [path for path in files if path.name != WEIGHTS and not path.name.startswith(".")]
