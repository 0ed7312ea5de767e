"""From the command line to a command. Exit codes: 0 done, 1 failed, 2 a setting that cannot work, 130 interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from harness.config import ConfigError

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))

_AGAIN = "what was under way is not marked as done, the same command starts this seed again"

Command = Callable[[Sequence[str], Path, Console], int]
"""Takes its arguments, the results folder and where to write; returns the exit code."""

COMMANDS = {
    "bench": "run a job",
    "compare": "schedules side by side on the same devices",
    "sweep": "the same along settings with several values",
    "matrix": "staleness x off-policy correction x schedule",
    "paper": "a published experiment beside what the same schedules do here",
    "report": "one page of what an experiment found",
    "list": "what can be chosen",
    "doctor": "is this machine fit",
    "ui": "MLflow on what was written",
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
    "gate-gpu": "everything that only a machine shows, part by part: kernels, groups, transports, whole jobs",
}
"""Every command: function `run` of the module of its name in this folder, which is loaded when it is called."""


def main(arguments: Sequence[str]) -> int:
    console, errors = Console(), Console(stderr=True)
    if not arguments or arguments[0] not in COMMANDS:
        given = f"{arguments[0]} is no command; " if arguments else ""
        lines = [f"{given}use python -m harness <command> [setting=value ...]"]
        lines += [f"  {name:<12}{what}" for name, what in COMMANDS.items()]
        errors.print("\n".join(lines), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return answered(lambda: command(arguments[0])(arguments[1:], RESULTS, console), errors)


def answered(work: Callable[[], int], errors: Console) -> int:
    """The exit code of a command, also where it cannot work or is interrupted."""
    try:
        return work()
    except ConfigError as error:
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BlockingIOError as error:  # another process writes this folder
        errors.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        errors.print(f"interrupted; {_AGAIN}", style="yellow", soft_wrap=True)
        return 130
    except Exception as failure:
        from harness.runtime.runtime import parts_of

        parts = list(parts_of(failure))
        if settings := [part for part in parts if isinstance(part, ConfigError)]:  # what only a run could show
            errors.print(f"{settings[0]}", style="red", markup=False, highlight=False, soft_wrap=True)
            return 2
        if not (losses := _losses(parts)):
            raise parts[0] from None  # the rest was cancelled because of it
        # What else failed is how others met a death.
        errors.print("\n".join(losses), style="red", markup=False, highlight=False, soft_wrap=True)
        errors.print(_AGAIN, style="yellow", soft_wrap=True)
        return 1


def command(name: str) -> Command:
    run: Command = import_module(f"harness.cli.{name.replace('-', '_')}").run
    return run


def _losses(failures: Iterable[Exception]) -> list[str]:
    """What died, in the words of those who noticed: a worker, an engine, the queue behind its connection."""
    from harness.protocols import EngineDied
    from harness.runtime.runtime import WorkerDied
    from harness.weight_sync.membership import LostEngine

    losses = WorkerDied | EngineDied | LostEngine | ConnectionError
    return list(dict.fromkeys(str(part) for part in failures if isinstance(part, losses)))
