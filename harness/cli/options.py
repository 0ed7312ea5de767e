"""What each command takes as options, `--schedule fully_async`, beside settings of its job, `schedule.max_staleness=1`.

Both become settings: an option is a short name for one, listed by `--help` and completed by the shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from harness.config import ConfigError


@dataclass(frozen=True)
class Option:
    """`--flag VALUE` for `setting=VALUE`; or, of one that takes no value, `--flag` for the whole `setting`."""

    flag: str
    setting: str
    help: str
    value: str | None = None
    """What its value is called in the help."""
    group: str | None = None
    """The group of settings of which it is a choice."""


def _plain(setting: str, help: str, value: str) -> Option:
    """A setting by its own name."""
    return Option(setting, setting, help, value)


def _choice(group: str, help: str) -> Option:
    return Option(group, group, f"of experiments/{group}/, {help}", "NAME", group)


_FORCE = Option("force", "force=true", "also what is done already")
_DRY = Option("dry-run", "dry=true", "say what would be run, and run nothing")
_EXPERIMENT = _plain("experiment", "a folder in the results", "NAME")
_SEEDS = _plain("seeds", "seeds, from 0 on", "N")
_DEVICE = _choice("device", "instead of this machine's")
_SCHEDULE = _choice("schedule", "or an import path of your own, my_lab.schedules:Mine")
_ENGINE = _choice("engine", "or an import path of your own")
_DEVICES = Option("devices", "cluster.devices", "of all roles together", "N")
_OF_A_JOB = (
    _choice("model", "or a folder, or hf:<org>/<name>"),
    _ENGINE,
    _choice("task", "or an import path of your own"),
    _plain("backend", "real, virtual or paced; by default what this machine can do", "NAME"),
    _SEEDS,
    _plain("iterations", "batches to train", "N"),
    _DEVICES,
    _choice("cost", "or a file: what simulated work costs"),
    _DEVICE,
    _EXPERIMENT,
    _FORCE,
)
_JOB = (_SCHEDULE, *_OF_A_JOB)
_COSTS = _plain("name", "of the costs", "NAME")
_SCHEDULES = _plain("schedules", "all, or names with commas", "NAMES")

OPTIONS: dict[str, tuple[Option, ...]] = {
    "bench": (*_JOB, _DRY),
    "compare": (*_OF_A_JOB, _SCHEDULES, _DRY),
    "sweep": (*_JOB, _DRY),
    "matrix": (
        *_OF_A_JOB,
        _SCHEDULES,
        _plain("staleness", "numbers with commas", "NUMBERS"),
        _plain("corrections", "names with commas, each at a rate behind @ if you like", "NAMES"),
        _DRY,
    ),
    "speedrun": (
        _SCHEDULE,
        _ENGINE,
        _DEVICES,
        _plain("track", "of experiments/speedrun/: the frozen job", "NAME"),
        _plain("key", "a private key of SSH's, to sign the record with", "FILE"),
        _plain("verify", "a record to check instead", "FOLDER"),
        _DRY,
    ),
    "paper": (_plain("paper", "a name, or all", "NAME"),),
    "report": (_EXPERIMENT,),
    "mlflow-sync": (_EXPERIMENT,),
    "doctor": _JOB,
    "plan": _JOB,
    "predict": (
        *_JOB,
        _plain("table", "a published table", "CSV"),
        _plain("given", "train, or sync: what may be read of it", "ROWS"),
    ),
    "calibrate": (
        *_JOB,
        _plain("run", "the folder of a finished run; may be given several times", "FOLDER"),
        _COSTS,
    ),
    "profile": (
        *_JOB,
        _COSTS,
        _plain("profile", "times that were measured before", "JSON"),
    ),
    "gate-gpu": (
        _plain("device", "cpu or gpu", "NAME"),
        _plain("parts", "names with commas", "NAMES"),
        _FORCE,
        _plain("minutes", "that each part may take", "N"),
    ),
    "chaos": (
        _plain("first", "the first seed", "N"),
        _SEEDS,
        _plain("limit", "seconds", "S"),
        _plain("real", "faults of real runs", "N"),
    ),
    "sample": (_plain("folder", "where to", "FOLDER"),),
    "ui": (_plain("port", "on loopback", "N"),),
    "serve": (
        _plain("port", "8767, unless given; 0: a free one", "N"),
        _plain("host", "an address of this machine that others reach; TLS only", "ADDRESS"),
        _plain("certificate", "of TLS", "PEM"),
        _plain("key", "of the certificate", "PEM"),
    ),
}
"""By command; of the others none."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where others end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help lists what it takes")


def add_options(parser: argparse.ArgumentParser, command: str, complete: Callable[[str], object] | None = None) -> None:
    """complete: how a shell completes the choices of a group, as shtab has it."""
    for option in OPTIONS.get(command, ()):
        if option.value is None:
            parser.add_argument(f"--{option.flag}", action="store_true", help=option.help)
            continue
        action = parser.add_argument(f"--{option.flag}", action="append", metavar=option.value, help=option.help)
        if complete is not None and option.group is not None:
            action.complete = complete(option.group)  # type: ignore[attr-defined]


def settings_of(command: str, what: str, arguments: Sequence[str]) -> list[str]:
    """The settings that these options and settings are, in the order of `OPTIONS`, then as they were given. what: the
    command does. Raises ConfigError for an option that it does not take, SystemExit after its help."""
    parser = Parser(
        prog=f"cadence {command}",
        description=f"{what[0].upper()}{what[1:]}.",
        usage=f"cadence {command} [options] [setting=value ...]",
        allow_abbrev=False,
    )
    add_options(parser, command)
    given, settings = parser.parse_known_args(arguments)
    for unknown in settings:
        if unknown.startswith("-"):
            parser.error(f"unknown option {unknown}")
    found = []
    for option in OPTIONS.get(command, ()):
        value = getattr(given, option.flag.replace("-", "_"))
        if option.value is None:
            found += [option.setting] * bool(value)
        else:
            found += [f"{option.setting}={each}" for each in value or ()]
    return found + settings
