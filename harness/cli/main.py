"""From the command line to a command. Exit codes: 0 done, 1 failed, 2 a setting that cannot work, 75 left with a
checkpoint, as SIGTERM asked, 130 interrupted, 143 ended by SIGTERM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from harness.cli.console import PlainTextConsole
from harness.cli.front import front
from harness.cli.options import settings_of
from harness.config import ConfigError
from harness.runtime.interrupts import Terminated

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))

LEFT_AT_CHECKPOINT = os.EX_TEMPFAIL
"""75, as schedulers know it: run the same command again."""

_AGAIN = "what was under way is not marked as done, the same command starts this seed again"

Command = Callable[[Sequence[str], Path, Console], int]
"""Takes its arguments, the results folder and where to write; returns the exit code."""

COMMANDS = {
    "bench": "run a job",
    "compare": "schedules side by side on the same devices",
    "sweep": "the same along settings with several values",
    "matrix": "staleness x off-policy correction x schedule",
    "paper": "a published experiment beside what the same schedules do here",
    "speedrun": "how soon a schedule gets a frozen job to its target: a record, and the book of all",
    "diff": "what changed from one experiment, or commit, to another, and how surely",
    "report": "one page of what an experiment found",
    "list": "what can be chosen",
    "doctor": "is this machine fit",
    "ui": "MLflow on what was written",
    "serve": "rows and weights of a job over HTTP, for a trainer and engines of your own",
    "mlflow-sync": "bring MLflow up to date from the files",
    "table": "every schedule under twelve conditions, simulated",
    "memory": "what lies on the devices of five machines under every schedule",
    "agentic": "every schedule with turns and slow tools, simulated",
    "plan": "the fastest split and layout of every schedule, simulated",
    "scaling": "every schedule planned for 32 to 1,024 devices",
    "predict": "a published table's asynchronous rows from its synchronous ones",
    "sample": "a small model with a tokenizer, and problems for it, to try text with",
    "calibrate": "costs from finished real runs",
    "profile": "costs from times of the engines on this machine's device",
    "chaos": "random faults over runs of every schedule, and what is promised of them afterwards",
    "gate-gpu": "everything that only a machine shows, part by part: kernels, groups, transports, whole jobs",
}
"""Every command: function `run` of the module of its name in this folder, which is loaded when it is called."""


def main(arguments: Sequence[str]) -> int:
    console, errors = PlainTextConsole(), PlainTextConsole(stderr=True)
    name = arguments[0] if arguments else ""
    if name.startswith("-"):
        return answered(lambda: front(arguments, COMMANDS), errors)
    if name not in COMMANDS:
        given = f"{name} is no command; " if name else ""
        lines = [f"{given}use cadence <command> [options] [setting=value ...]"]
        lines += [f"  {name:<12}{what}" for name, what in COMMANDS.items()]
        errors.print("\n".join(lines), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return answered(lambda: command(name)(settings_of(name, COMMANDS[name], arguments[1:]), RESULTS, console), errors)


def answered(work: Callable[[], int], errors: Console) -> int:
    """The exit code of a command, also where it cannot work or is interrupted."""
    try:
        return work()
    except SystemExit as told:
        if told.code:
            raise
        return 0  # --help and --version
    except ConfigError as error:
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BlockingIOError as error:  # another process writes this folder
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except Terminated:
        errors.print(f"ended by SIGTERM; {_AGAIN}; with checkpoint.every it goes on", style="yellow", soft_wrap=True)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        errors.print(f"interrupted; {_AGAIN}", style="yellow", soft_wrap=True)
        return 130
    except Exception as failure:
        from harness.driver.endings import left_in, losses_in, memory_in, storage_in
        from harness.runtime.runtime import parts_of

        parts = list(parts_of(failure))
        if (left := left_in(parts)) is not None:
            errors.print(left, style="yellow", markup=False, highlight=False, soft_wrap=True)
            return LEFT_AT_CHECKPOINT
        if settings := [part for part in parts if isinstance(part, ConfigError)]:  # what only a run could show
            errors.print(f"{settings[0]}", style="red", markup=False, highlight=False, soft_wrap=True)
            return 2
        machine = storage_in(parts, RESULTS) or memory_in(parts)
        losses = losses_in(parts) if machine is None else [machine]
        if not losses:
            raise parts[0] from None  # the rest was cancelled because of it
        errors.print("\n".join(losses), style="red", markup=False, highlight=False, soft_wrap=True)
        errors.print(_AGAIN, style="yellow", soft_wrap=True)
        return 1


def command(name: str) -> Command:
    run: Command = import_module(f"harness.cli.{name.replace('-', '_')}").run
    return run
