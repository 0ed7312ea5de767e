"""`make bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from harness.cli.arguments import is_asked_for, own_arguments
from harness.metrics.formatting import say

if TYPE_CHECKING:
    from harness.checks.settle import SettledJob
    from harness.runtime.fork_server import ForkServer


def run(arguments: Sequence[str], results: Path, console: Console, server: ForkServer | None = None) -> int:
    """Run one configuration over its seeds, and say what came out. CADENCE_FOLDERS names a file that gets the folders
    of the runs, a line each. server: forks the workers of a run of a comparison, whose cells need not read all that is
    set for all of them; by default one for all seeds. `dry=true`: say which runs these would be, with every setting,
    and run none."""
    from harness.checks.settle import settle, settle_cell
    from harness.metrics.run_files import refuse_changed_inputs, run_directory
    from harness.planner.automatic import plan_split
    from harness.runtime.interrupts import leaving_when_asked
    from harness.runtime.runtime import cluster_address, machine_of_runs

    own, settings = own_arguments(arguments, "dry")
    dry = is_asked_for("dry", own)
    job = (settle if server is None else settle_cell)(settings, machine_of_runs(), plan_split)
    config, plan = job.config, job.plan
    directories = {seed: run_directory(config, seed, results) for seed in config.seed_list}
    if not config.force:
        refuse_changed_inputs(config, [directory.path for directory in directories.values()])
    to_do = [seed for seed, directory in directories.items() if config.force or not directory.done]
    if dry:
        _say_what_would_run(
            job, {str(directory.path): seed in to_do for seed, directory in directories.items()}, console
        )
        return 0
    with ExitStack() as stack:
        if server is None and to_do and plan.backend != "virtual" and cluster_address() is None:
            from harness.driver import PRELOAD
            from harness.runtime.local_runtime import launch_server

            server = stack.enter_context(closing(launch_server(PRELOAD)))  # it imports while this process does
        with console.status("loading torch, and what workers need beside it"):
            from harness.driver.checkpointing import Left
            from harness.driver.progress import print_banner
            from harness.driver.run import run_seed
            from harness.report.summary import print_summary
        if plan.backend != "real" or plan.trial:
            print_banner(plan, console)
        for line in job.messages:
            say(console, line, "yellow")
        leave = stack.enter_context(leaving_when_asked(at_once=not config.checkpoint.every))
        for seed in directories:
            if seed not in to_do:
                console.print(f"seed {seed} is done already; force=true runs it again", style="yellow")
            elif leave.asked:
                raise Left(f"before seed {seed}")
            else:
                run_seed(config, plan, seed, results, console, leave, server)
    folders = [directory.path for directory in directories.values()]
    print_summary(folders, console)
    if "CADENCE_FOLDERS" in os.environ:
        Path(os.environ["CADENCE_FOLDERS"]).write_text("\n".join(map(str, folders)), encoding="utf-8")
    return 0


def _say_what_would_run(job: SettledJob, runs: Mapping[str, bool], console: Console) -> None:
    """runs: whether each would be, by folder."""
    from harness.config.compose import plain
    from harness.config.files import yaml_text
    from harness.driver.progress import print_banner

    if job.plan.backend != "real" or job.plan.trial:
        print_banner(job.plan, console)
    for line in job.messages:
        say(console, line, "yellow")
    for folder, to_do in runs.items():
        say(console, f"# {folder}: {'would be run' if to_do else 'is done already'}")
    say(console, yaml_text(plain(job.config)).rstrip())
