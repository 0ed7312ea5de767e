"""Every command, in groups, and what it takes: as options, `--schedule fully_async`, or as make's variables,
`SCHEDULE=fully_async`, beside settings of its job, `schedule.max_staleness=1`. All of them become settings.

Needs the standard library only, so that `make help` is answered, and a misspelt variable refused, before anything is
installed: `python -m harness.cli.commands [command VARIABLE=value ...]`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """`--flag VALUE` for `setting=VALUE`; or, of one that takes no value, `--flag` for the whole `setting`."""

    flag: str
    setting: str
    help: str
    value: str | None = None
    """Name of the value in the help."""
    group: str | None = None
    """The group of settings of which it is a choice."""
    several: bool = False
    """Whether it may be given several times: values of a variable have spaces between them."""

    @property
    def variable(self) -> str:
        """Name of make's variable for it."""
        return (self.flag if self.value is not None else self.setting.partition("=")[0]).upper().replace("-", "_")


@dataclass(frozen=True)
class Command:
    """The help and the options of a command. free: it takes settings of a job besides, or names. one_thread: its
    processes have a core each, and torch one thread in each. file: of this folder, that has it as a function of its
    name; by default that of its name, with `run`."""

    help: str
    options: tuple[Option, ...] = ()
    free: bool = False
    one_thread: bool = False
    file: str | None = None


def _plain(setting: str, help: str, value: str) -> Option:
    """A setting by its own name."""
    return Option(setting, setting, help, value)


def _choice(group: str, help: str) -> Option:
    return Option(group, group, f"of experiments/{group}/, {help}", "NAME", group)


_FORCE = Option("force", "force=true", "also what is done already")
_DRY = Option("dry-run", "dry=true", "say what would be run, and run nothing")
_CONFIG = _plain("config", "config.yaml of a run: its job again, with what else is given", "FILE")
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
_LOG = Option(
    "log", "log", "of a run, of whatever software; several files of one run may be given", "FILE", several=True
)
_SCHEDULES = _plain("schedules", "all, or names with commas", "NAMES")

GROUPS: dict[str, dict[str, Command]] = {
    "run": {
        "bench": Command("run a job", (*_JOB, _CONFIG, _DRY), free=True),
        "compare": Command(
            "schedules side by side on the same devices", (_SCHEDULES, *_OF_A_JOB, _DRY), free=True, file="compare"
        ),
        "sweep": Command("the same along settings with several values", (*_JOB, _DRY), free=True, file="compare"),
        "matrix": Command(
            "staleness x off-policy correction x schedule",
            (
                _SCHEDULES,
                _plain("staleness", "numbers with commas", "NUMBERS"),
                _plain("corrections", "names with commas, each at a rate behind @ if you like", "NAMES"),
                *_OF_A_JOB,
                _DRY,
            ),
            free=True,
            file="compare",
        ),
        "paper": Command(
            "a published experiment beside what the same schedules do here",
            (_plain("paper", "a name, or all", "NAME"),),
            one_thread=True,
        ),
        "speedrun": Command(
            "how soon a schedule gets a frozen job to its target: a record, and the book of all",
            (
                _SCHEDULE,
                _ENGINE,
                _DEVICES,
                _plain("track", "of experiments/speedrun/: the frozen job", "NAME"),
                _plain("key", "a private key of SSH's, to sign the record with", "FILE"),
                _plain("verify", "a record to check instead", "FOLDER"),
                _DRY,
            ),
            free=True,
        ),
    },
    "look at what came out": {
        "report": Command("one page of what an experiment found", (_EXPERIMENT,), file="look"),
        "show": Command(
            "samples of a run: prompt, response, reward, and what became of them",
            (
                _plain("run", "its folder, or an experiment with one; else the last that began", "NAME"),
                _plain("sample", "an id", "ID"),
                _plain("row", "of the data, train.jsonl:17, or the number of a made-up problem", "ROW"),
                _plain("worst", "so many with the lowest rewards", "N"),
                _plain("best", "so many with the highest", "N"),
                _plain("dropped", "so many that were not trained", "N"),
                Option("held-out", "held_out", "responses to held-out problems, of a version, or last", "VERSION"),
            ),
            file="look",
        ),
        "diff": Command(
            "what changed from one experiment, or commit, to another, and how surely",
            (
                _plain("before", "an experiment, a folder of runs, or a commit", "NAME"),
                _plain("after", "another", "NAME"),
            ),
            free=True,
            file="look",
        ),
        "ui": Command("MLflow on what was written", (_plain("port", "on loopback", "N"),), file="look"),
        "metrics": Command("every number that a run writes, with its unit and formula", file="list"),
        "mlflow-sync": Command("bring MLflow up to date from the files", (_EXPERIMENT,), file="look"),
    },
    "simulate and plan": {
        "plan": Command(
            "the fastest split and layout of every schedule, simulated", (_LOG, *_JOB), free=True, one_thread=True
        ),
        "predict": Command(
            "a published table's asynchronous rows from its synchronous ones",
            (
                _LOG,
                _plain("table", "a published table", "CSV"),
                _plain("given", "train, or sync: what may be read of it", "ROWS"),
                Option("score", "score=true", "score all published rows, and simulated truths, beside the last scores"),
                *_JOB,
            ),
            free=True,
        ),
        "calibrate": Command(
            "costs from finished real runs",
            (
                Option("run", "run", "folders of finished runs, or the gate's results.json", "FOLDER", several=True),
                _COSTS,
                *_JOB,
            ),
            free=True,
            file="costs",
        ),
        "profile": Command(
            "costs from times of the engines on this machine's device",
            (_COSTS, _plain("profile", "times that were measured before", "JSON"), *_JOB),
            free=True,
            file="costs",
        ),
        "table": Command(
            "every schedule, simulated or planned, as a page",
            (_plain("of", "schedules, unless given; staleness, memory, transfers or scaling", "NAME"),),
            one_thread=True,
        ),
    },
    "this machine, and what there is": {
        "list": Command(
            "what can be chosen",
            (_plain("of", "a setting whose names are explained: algorithm.correction", "SETTING"),),
        ),
        "doctor": Command("is this machine fit", (*_JOB, _CONFIG), free=True),
        "sample": Command(
            "a small model with a tokenizer, and problems for it, to try text with",
            (_plain("folder", "where to", "FOLDER"),),
        ),
        "serve": Command(
            "rows and weights of a job over HTTP, for a trainer and engines of your own",
            (
                _plain("port", "8767, unless given; 0: a free one", "N"),
                _plain("host", "an address of this machine that others reach; TLS only", "ADDRESS"),
                _plain("certificate", "of TLS", "PEM"),
                _plain("key", "of the certificate", "PEM"),
            ),
        ),
        "chaos": Command(
            "random faults over runs of every schedule, and what is promised of them afterwards",
            (
                _plain("first", "the first seed", "N"),
                _SEEDS,
                _plain("limit", "seconds", "S"),
                _plain("real", "faults of real runs", "N"),
            ),
            one_thread=True,
            file="acceptance",
        ),
        "gate-gpu": Command(
            "everything that only a machine shows, part by part: kernels, groups, transports, whole jobs",
            (
                _plain("device", "cpu or gpu", "NAME"),
                _plain("parts", "names with commas", "NAMES"),
                _FORCE,
                _plain("limit_s", "seconds of this command; the next one goes on", "N"),
            ),
            file="acceptance",
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
"""Every command; its file is loaded when it is called."""

_VARIABLE = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
_NO = ("", "0", "false", "no")


def overview() -> str:
    """Return every command with what it does, in groups."""
    width = max(map(len, COMMANDS)) + 2
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<{width}}{command.help}" for name, command in commands.items())]
    return "\n".join(lines)


def check_command(name: str) -> None:
    """Raise ValueError, which lists all, for what is no command."""
    if name not in COMMANDS:
        given = f"{name} is no command; " if name else ""
        raise ValueError(f"{given}use cadence <command> [options] [setting=value ...]\n{overview()}")


def as_options(name: str, words: Sequence[str]) -> list[str]:
    """Return the words with make's variables spelt as options: `SEEDS=3` is `--seeds=3`, and nothing where it has no
    value, or a switch is off. Raises ValueError for a variable that the command does not take."""
    known = {option.variable: option for option in COMMANDS[name].options}
    spelt: list[str] = []
    for word in words:
        given = _VARIABLE.fullmatch(word)
        if given is None:
            spelt.append(word)
            continue
        variable, value = given.groups()
        if variable not in known:
            takes = " ".join(f"{one}=" for one in (*known, "ARGS"))
            raise ValueError(f"{name} does not take {variable}=; it takes {takes} (cadence {name} --help)")
        option = known[variable]
        if option.value is None:
            spelt += [f"--{option.flag}"] * (value not in _NO)
        else:
            spelt += [f"--{option.flag}={one}" for one in (value.split() if option.several else [value]) if one]
    return spelt


if __name__ == "__main__":
    try:
        if len(sys.argv) > 1:
            check_command(sys.argv[1])
            as_options(sys.argv[1], sys.argv[2:])
        else:
            print(overview())
    except ValueError as refused:
        sys.exit(str(refused))
