"""Runs the command that was typed. Exit codes: 0 done, 1 failed, 2 a setting that cannot work, 3 a comparison beyond a
threshold, 75 left with a checkpoint, as SIGTERM asked, 130 interrupted, 143 ended by SIGTERM."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from rich.console import Console

from harness.cli.commands import COMMANDS, VALUES, check_command
from harness.cli.console import PlainTextConsole, ValuesConsole, write
from harness.cli.front import front, settings_of
from harness.cli.spelling import Spelling
from harness.config import ConfigError
from harness.metrics.formatting import say
from harness.runtime.interrupts import Terminated, leaving_when_asked

RESULTS = Path(os.environ.get("CADENCE_RESULTS", "results"))

LEFT_AT_CHECKPOINT = os.EX_TEMPFAIL  # 75, as schedulers know it: run the same command again
_AGAIN = "what was under way is not marked as done, the same command starts this seed again"

Command = Callable[[Sequence[str], Path, Console], int]
"""Takes its arguments, the results folder and where to write; returns the exit code."""


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    spelling = Spelling(arguments)
    errors = PlainTextConsole(spelling=spelling, stderr=True)
    console = PlainTextConsole(spelling=spelling, beside=errors)
    name = arguments[0] if arguments else ""
    if name.startswith("-"):
        return answered(lambda: front(arguments), errors)
    try:
        check_command(name)
    except ValueError as refused:
        say(errors, str(refused), "red")
        return 2

    def run() -> int:
        settings = settings_of(name, arguments[1:])
        if VALUES not in settings:
            return command(name)(settings, RESULTS, console)
        values = ValuesConsole(errors, spelling=spelling)
        with redirect_stdout(sys.stderr):  # of whatever prints by itself, such as a library
            status = command(name)([setting for setting in settings if setting != VALUES], RESULTS, values)
        said = {"command": name, "status": status, "tables": values.tables, "lines": values.lines}
        write(json.dumps(said, ensure_ascii=False, indent=1) + "\n")
        return status

    return answered(run, errors)


def answered(work: Callable[[], int], errors: Console) -> int:
    """The exit code of a command, also where it cannot work or is interrupted."""
    try:
        with leaving_when_asked(at_once=True):
            return work()
    except SystemExit as told:
        if told.code:
            raise
        return 0  # --help and --version
    except ConfigError as error:
        say(errors, error, "red")
        return 2
    except BlockingIOError as error:  # another process writes this folder
        say(errors, error, "red")
        return 1
    except Terminated:
        errors.print(f"ended by SIGTERM; {_AGAIN}; with checkpoint.every it goes on", style="yellow", soft_wrap=True)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        errors.print(f"interrupted; {_AGAIN}", style="yellow", soft_wrap=True)
        return 130
    except Exception as failure:
        from harness.driver.endings import NothingScored, left_in, losses_in, memory_in, storage_in, waits_in
        from harness.runtime.runtime import parts_of

        parts = list(parts_of(failure))
        if isinstance(failure, OSError) and failure.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            say(errors, f"{str(failure.filename)[:60]}... is no path: {failure.strerror}", "red")
            return 2
        if (left := left_in(parts)) is not None:
            say(errors, left, "yellow")
            return LEFT_AT_CHECKPOINT
        if settings := [part for part in parts if isinstance(part, ConfigError)]:  # what only a run could show
            say(errors, settings[0], "red")
            return 2
        if unscored := [part for part in parts if isinstance(part, NothingScored)]:
            say(errors, unscored[0], "red")
            return 1
        machine = storage_in(parts, RESULTS) or memory_in(parts)
        losses = [machine] if machine is not None else losses_in(parts) or waits_in(parts)
        if not losses:
            raise parts[0] from None  # the rest was cancelled because of it
        say(errors, "\n".join(losses), "red")
        errors.print(_AGAIN, style="yellow", soft_wrap=True)
        return 1


def command(name: str) -> Command:
    """The function that runs a command."""
    function, file = name.replace("-", "_"), COMMANDS[name].file
    found: Command = getattr(import_module(f"harness.cli.{file or function}"), function if file else "run")
    return found
