"""From the command line to a verb. Exit codes: 0 done, 1 failed, 2 a setting that cannot work, 130 interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))

Verb = Callable[[Sequence[str], Path, Console], int]
"""Takes its arguments, the results folder and where to write; returns the exit code."""

VERBS = {
    "bench": "harness.cli.bench:bench",
    "compare": "harness.cli.compare:compare_command",
    "sweep": "harness.cli.compare:sweep_command",
    "matrix": "harness.cli.matrix:matrix_command",
    "paper": "harness.cli.paper:paper_command",
    "report": "harness.cli.report:report",
    "list": "harness.cli.look:show_choices",
    "doctor": "harness.cli.look:doctor",
    "ui": "harness.cli.mlflow:ui",
    "mlflow-sync": "harness.cli.mlflow_sync:mlflow_sync",
    "table": "harness.cli.simulated:table",
    "plan": "harness.cli.simulated:plan",
    "scaling": "harness.cli.simulated:scaling",
    "predict": "harness.cli.simulated:predict",
    "calibrate": "harness.cli.costs:calibrate",
    "profile": "harness.cli.costs:profile",
}
"""Where each verb is. Its module is loaded when it is called."""


def main(arguments: Sequence[str]) -> int:
    console, errors = Console(), Console(stderr=True)
    if not arguments or arguments[0] not in VERBS:
        given = f"{arguments[0]} is no verb; " if arguments else ""
        usage = f"{given}use python -m harness {'|'.join(VERBS)} [setting=value ...]"
        errors.print(usage, style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    try:
        return _verb(arguments[0])(arguments[1:], RESULTS, console)
    except ConfigError as error:
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BlockingIOError as error:  # another process writes this folder
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except BaseExceptionGroup as failures:
        raise _first(failures) from None  # the rest was cancelled because of it
    except KeyboardInterrupt:
        errors.print(
            "interrupted; what was under way is not marked as done, the same command starts this seed again",
            style="yellow",
            soft_wrap=True,
        )
        return 130


def _verb(name: str) -> Verb:
    module, _, function = VERBS[name].partition(":")
    verb: Verb = getattr(import_module(module), function)
    return verb


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
