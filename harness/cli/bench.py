"""`make bench`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console

from harness.runtime.fork_server import ForkServer


def run(arguments: Sequence[str], results: Path, console: Console, server: ForkServer | None = None) -> int:
    """Run one configuration over its seeds, and say what came out. CADENCE_FOLDERS names a file that gets the folders
    of the runs, a line each. server: forks the workers, by default one for all seeds."""
    from harness.config.checks.job import plan_job
    from harness.config.compose import compose_job, make_schedule
    from harness.config.machine import this_machine
    from harness.cost_model.job_cost import check_given
    from harness.driver.build import PRELOAD
    from harness.driver.progress import print_banner
    from harness.driver.run import run_directory, run_seed
    from harness.report.summary import print_summary
    from harness.runtime.local_runtime import launch_server
    from harness.studies.planner.automatic import with_plan

    machine = this_machine()
    planned = with_plan(compose_job(arguments), arguments, machine)
    config = planned.config
    plan = plan_job(config, make_schedule(config), machine)
    config = dataclasses.replace(config, backend=plan.backend)  # what it is names its folder, not what was asked
    if plan.backend != "real":
        check_given(config)
        print_banner(plan, console)
    for line in planned.messages:
        console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
    folders = []
    with ExitStack() as stack:
        for seed in config.seed_list:
            folder = run_directory(config, seed, results)
            folders.append(folder.path)
            if folder.done and not config.force:
                console.print(f"seed {seed} is done already; FORCE=1 runs it again", style="yellow")
                continue
            if server is None and plan.backend != "virtual" and "RAY_ADDRESS" not in os.environ:
                server = stack.enter_context(closing(launch_server(PRELOAD)))
            run_seed(config, plan, seed, results, console, server)
    print_summary(folders, console)
    if "CADENCE_FOLDERS" in os.environ:
        Path(os.environ["CADENCE_FOLDERS"]).write_text("\n".join(map(str, folders)), encoding="utf-8")
    return 0
