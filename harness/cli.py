"""The verbs. Exit codes: 0 done, 1 failed, 2 a setting that cannot work, 130 interrupted."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))


def bench(arguments: Sequence[str], console: Console) -> int:
    """Run one configuration over its seeds, and say what came out."""
    from harness.report.summary import print_summary
    from harness.runner.checks import plan_job
    from harness.runner.compose import compose_job, make_schedule
    from harness.runner.machine import this_machine
    from harness.runner.progress import print_banner
    from harness.runner.run import run_directory, run_seed

    config = compose_job(arguments)
    plan = plan_job(config, make_schedule(config), this_machine())
    config = dataclasses.replace(config, backend=plan.backend)  # what it is names its folder, not what was asked
    if plan.backend != "real":
        print_banner(plan, console)
    folders = []
    for seed in config.seed_list:
        folder = run_directory(config, seed, RESULTS)
        if folder.done and not config.force:
            console.print(f"seed {seed} is done already; FORCE=1 runs it again", style="yellow")
            folders.append(folder.path)
        else:
            folders.append(run_seed(config, plan, seed, RESULTS, console))
    print_summary(folders, console)
    return 0


def show_choices(arguments: Sequence[str], console: Console) -> int:
    """Every choice of every group, with the first line of its file."""
    from harness.runner.compose import EXPERIMENTS, GROUPS, choices

    for group in GROUPS:
        console.print(f"{group}=", style="bold")
        for name in choices(group):
            path = EXPERIMENTS / group / f"{name}.yaml"
            first = path.read_text(encoding="utf-8").splitlines()[0]
            console.print(f"  {name:<16}{first.lstrip('# ')}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"\nSettings of each stand in {EXPERIMENTS.name}/<group>/<name>.yaml; change them with ARGS=, such as",
        soft_wrap=True,
    )
    console.print('  make bench ARGS="schedule.max_staleness=1 algorithm.correction=tis"', highlight=False)
    return 0


def doctor(arguments: Sequence[str], console: Console) -> int:
    """Look at this machine and say what each missing thing means. Exit code 1 if the main job cannot run."""
    from harness.runner.doctor import examine

    findings = examine(RESULTS)
    for finding in findings:
        mark, style = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("missing", "red")}[finding.grade]
        console.print(f"[{style}]{mark:>8}[/]  {finding.what}: {finding.found}", highlight=False)
        if finding.meaning:
            console.print(f"          {finding.meaning}", style="dim", highlight=False, soft_wrap=True)
    return 1 if any(finding.grade == "bad" for finding in findings) else 0


def ui(arguments: Sequence[str], console: Console) -> int:
    """Serve MLflow on what was written, on loopback, until interrupted."""
    database = (RESULTS / "mlflow.db").resolve()
    if not database.exists():
        raise ConfigError(f"{database} is not there yet; run `make bench` first")
    port = arguments[0].removeprefix("port=") if arguments else "5000"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"port={port} is no port; use a number such as PORT=5001")
    console.print(f"MLflow on http://127.0.0.1:{port} (Ctrl-C ends it)")
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", port]
    os.execv(sys.executable, [*command, "--backend-store-uri", f"sqlite:///{database}"])


def table(arguments: Sequence[str], console: Console) -> int:
    """Simulate every schedule under twelve conditions, and write docs/schedule_table.md."""
    from harness.runner.table import write_page

    if arguments:
        raise ConfigError(f"{arguments[0]} changes nothing: `make table` has no settings")
    with console.status("simulating") as status:
        path = write_page(lambda said: status.update(f"simulating: {said}"))
    console.print(f"{path}", highlight=False)
    return 0


VERBS: dict[str, Callable[[Sequence[str], Console], int]] = {
    "bench": bench,
    "list": show_choices,
    "doctor": doctor,
    "ui": ui,
    "table": table,
}


def main(arguments: Sequence[str]) -> int:
    console, errors = Console(), Console(stderr=True)
    if not arguments or arguments[0] not in VERBS:
        given = f"{arguments[0]} is no verb; " if arguments else ""
        usage = f"{given}use python -m harness {'|'.join(VERBS)} [setting=value ...]"
        errors.print(usage, style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    try:
        return VERBS[arguments[0]](arguments[1:], console)
    except ConfigError as error:
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BlockingIOError as error:  # another process writes this folder
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except BaseExceptionGroup as failures:
        raise _first(failures) from None  # the rest was cancelled because of it
    except KeyboardInterrupt:
        errors.print("interrupted; nothing is marked as done, the same command starts this seed again", style="yellow")
        return 130


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
