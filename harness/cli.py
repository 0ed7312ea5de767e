"""The verbs. Exit codes: 0 done, 1 failed, 2 a setting that cannot work, 130 interrupted."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))


def bench(arguments: Sequence[str], console: Console) -> int:
    """Run one configuration over its seeds, and say what came out."""
    from harness.planner.automatic import with_plan
    from harness.report.summary import print_summary
    from harness.runner.checks import plan_job
    from harness.runner.compose import compose_job, make_schedule
    from harness.runner.machine import this_machine
    from harness.runner.progress import print_banner
    from harness.runner.run import run_directory, run_seed
    from harness.runner.simulated_cost import check_given

    machine = this_machine()
    planned = with_plan(compose_job(arguments), arguments, machine)
    config = planned.config
    plan = plan_job(config, make_schedule(config), machine)
    config = dataclasses.replace(config, backend=plan.backend)  # what it is names its folder, not what was asked
    if plan.backend != "real":
        check_given(config)
        print_banner(plan, console)
    for line in planned.said:
        console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
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


def calibrate(arguments: Sequence[str], console: Console) -> int:
    """Fit costs to finished real runs, and write them as a file of settings."""
    from harness.runner.calibrate import base_job, calibrate_runs
    from harness.simulator.cost_file import explained, write_costs

    own, settings = _own(arguments, "run", "name")
    if not own["run"]:
        raise ConfigError('which run? RUN=results/bench/<cell>/seed=0, or several: RUN="one another"')
    fitted = calibrate_runs([Path(run) for run in own["run"]], base_job(settings), *own["name"][-1:])
    path = write_costs(RESULTS / "costs", fitted, [f"Fitted to {' and '.join(own['run'])}."])
    _print_costs(path, explained(fitted), console)
    return 0


def profile(arguments: Sequence[str], console: Console) -> int:
    """Time the embedded engines on this machine's device, or read times from a file, and fit costs to them."""
    from harness.profile.record import record
    from harness.profile.rows import read_profile, write_profile
    from harness.runner.compose import compose_job
    from harness.runner.profile import about, base_of, fitted_costs, this_device, told_shares
    from harness.simulator.cost_file import explained, write_costs

    own, settings = _own(arguments, "name", "profile")
    job = compose_job(settings)
    name = own["name"][-1] if own["name"] else f"{job.model.name}_profile"
    path = Path(own["profile"][-1]) if own["profile"] else RESULTS / "profiles" / f"{name}.json"
    if own["profile"]:
        found = read_profile(path)
    else:
        with console.status("timing") as status:
            found = record(
                job.model,
                job.training,
                device=this_device(job),
                told=lambda row: status.update(f"timing {row.phase}: {row.samples} x {row.length}"),
            )
        write_profile(path, found)
        console.print(f"{path}", highlight=False, soft_wrap=True)
    fitted = fitted_costs(found, base_of(found, settings), name)
    shares = told_shares(found, fitted.cost)
    written = write_costs(RESULTS / "costs", fitted, [*about(found), *shares])
    _print_costs(written, [*about(found), *explained(fitted), *shares], console)
    return 0


def predict(arguments: Sequence[str], console: Console) -> int:
    """Calibrate on the synchronous rows of a published table, predict the others, and say how far off that is."""
    from harness.predict.page import draw, print_fits, print_predictions, write_csv
    from harness.predict.phases import check_given
    from harness.predict.run import predict_table

    own, settings = _own(arguments, "table", "given")
    if not own["table"]:
        raise ConfigError("which table? TABLE=experiments/papers/verl_fully_async.csv")
    path, given = Path(own["table"][-1]), check_given(own["given"][-1] if own["given"] else "train")
    with console.status("reading") as status:
        predicted = predict_table(path, given, settings, processes=2, progress=status.update)
    print_fits(predicted.fits, console)
    print_predictions(predicted.predictions, given, console)
    folder = RESULTS / "predict"
    folder.mkdir(parents=True, exist_ok=True)
    for write, end in ((write_csv, "csv"), (partial(draw, name=path.stem), "png")):
        write(folder / f"{path.stem}-{given}.{end}", predictions=predicted.predictions, given=given)
        console.print(f"{folder / f'{path.stem}-{given}.{end}'}", highlight=False, soft_wrap=True)
    return 0


def _own(arguments: Sequence[str], *names: str) -> tuple[dict[str, list[str]], list[str]]:
    """A verb's own arguments, `name=value`, by name; and the others."""
    own: dict[str, list[str]] = {name: [] for name in names}
    others = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in own:
            own[name].append(value)
        else:
            others.append(argument)
    return own, others


def _print_costs(path: Path, explained: Sequence[str], console: Console) -> None:
    for line in explained:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"\n{path}\nmake bench BACKEND=virtual COST={path}", highlight=False, soft_wrap=True, markup=False)


def plan(arguments: Sequence[str], console: Console) -> int:
    """Search splits and layouts of every schedule, or of one, for the fastest."""
    from harness.planner.verb import plan_command

    plan_command(arguments, RESULTS, console)
    return 0


def scaling(arguments: Sequence[str], console: Console) -> int:
    """Plan every schedule for 32 to 1,024 devices, and write docs/scaling.md."""
    from harness.planner.scaling import write_study

    if arguments:
        raise ConfigError(f"{arguments[0]} changes nothing: `make scaling` has no settings")
    with console.status("planning") as status:
        path = write_study(RESULTS, lambda said: status.update(f"planning: done with {said}"))
    console.print(f"{path}", highlight=False)
    return 0


VERBS: dict[str, Callable[[Sequence[str], Console], int]] = {
    "bench": bench,
    "list": show_choices,
    "doctor": doctor,
    "ui": ui,
    "table": table,
    "plan": plan,
    "scaling": scaling,
    "calibrate": calibrate,
    "profile": profile,
    "predict": predict,
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
