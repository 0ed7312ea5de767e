"""Every command, in groups, and what it takes: as options, `--schedule fully_async`, or as make's variables,
`SCHEDULE=fully_async`, beside settings of its job, `schedule.max_staleness=1`. All of them become settings.

Needs the standard library only, so that `make help` is answered, and a misspelt variable refused, before anything is
installed: `python -m harness.cli.commands [command VARIABLE=value ...]`."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Option:
    """`--flag VALUE` for `setting=VALUE`; or, of one that takes no value, `--flag` for the whole `setting`."""

    flag: str
    setting: str
    help: str
    value: str | None = None  # name of the value in the help
    group: str | None = None  # the group of settings of which it is a choice
    several: bool = False  # whether it may be given several times: values of a variable have spaces between them
    default: str = ""  # taken where it is not given: for the help

    @property
    def variable(self) -> str:
        """Name of make's variable for it."""
        return (self.flag if self.value is not None else self.setting.partition("=")[0]).upper().replace("-", "_")


@dataclass(frozen=True)
class Command:
    """The help and the options of a command. example: what follows its name. free: what it takes besides options.
    one_thread: its processes have a core each, and torch one thread in each. file: of this folder, that has it as a
    function of its name; by default that of its name, with `run`."""

    help: str
    options: tuple[Option, ...] = ()
    example: str = ""
    free: str = ""
    one_thread: bool = False
    file: str | None = None


def _plain(setting: str, help: str, value: str, default: str = "") -> Option:
    """A setting by its own name."""
    return Option(setting, setting, help, value, default=default)


def _choice(group: str, help: str, default: str) -> Option:
    return Option(group, group, f"of experiments/{group}/, {help}", "NAME", group, default=default)


def _with(options: tuple[Option, ...], **defaults: str) -> tuple[Option, ...]:
    """The options with other defaults, by flag."""
    return tuple(replace(one, default=defaults.get(one.flag, one.default)) for one in options)


_FORCE = Option("force", "force=true", "also what is done already")
_DRY = Option("dry-run", "dry=true", "say what would be run, and run nothing")
SETTINGS = "[setting=value ...]"
_CONFIG = _plain("config", "config.yaml of a run: its job again, with what else is given", "FILE")
_EXPERIMENT = _plain("experiment", "a folder in the results", "NAME", "bench")
_SEEDS = _plain("seeds", "how many, from 0 on, or a list: [3,4]", "N", "1")
_SCHEDULE = _choice("schedule", "or an import path of your own, my_lab.schedules:Mine", "fully_async")
_ENGINE = _choice("engine", "or an import path of your own", "torch")
_DEVICES = Option("devices", "cluster.devices", "of all roles together", "N", default="2")
_OF_A_JOB = (
    _choice("model", "or a folder, or hf:<org>/<name>", "tiny"),
    _ENGINE,
    _choice("task", "or an import path of your own", "reverse"),
    _plain("backend", "real, virtual, paced, or auto: what this machine can do", "NAME", "auto"),
    _SEEDS,
    _plain("iterations", "batches to train", "N", "120"),
    _DEVICES,
    _choice("cost", "or a file: what simulated work costs", "roofline"),
    _choice("device", "that is simulated, instead of this machine's", "h100"),
    _EXPERIMENT,
    _FORCE,
)
_JOB = (_SCHEDULE, *_OF_A_JOB)
_LOG = Option(
    "log", "log", "of a run, of whatever software; several files of one run may be given", "FILE", several=True
)
_FAIL_IF = Option(
    "fail-if", "fail_if", "exit with 3 where a cell against the baseline is: samples_per_s < 0.95", "TEST"
)
_MARGIN = _plain("margin", "a difference that does not matter, as a share", "SHARE", "0.02")
_COMPARED = (*_with(_OF_A_JOB, seeds="3", experiment="named after what is compared"), _MARGIN, _FAIL_IF)
_SCHEDULES = Option("schedules", "schedules", "all, or names with commas", "NAMES", "schedule", default="all")
_FITTED = _with(_JOB, cost="tiny_cpu")
_PLANNED = _with(
    _JOB, schedule="every one", model="qwen7b", engine="as published.yaml says", devices="16", iterations="20"
)

GROUPS: dict[str, dict[str, Command]] = {
    "run": {
        "bench": Command(
            "run a job",
            (*_JOB, _CONFIG, _DRY),
            "schedule=half_step cluster.devices=4 seeds=3 algorithm.correction=tis",
            SETTINGS,
        ),
        "compare": Command(
            "schedules side by side on the same devices",
            (_SCHEDULES, *_COMPARED, _DRY),
            "schedules=colocate_sync,fully_async@2 seeds=5",
            SETTINGS,
            file="compare",
        ),
        "sweep": Command(
            "the same along settings with several values",
            (_SCHEDULE, *_COMPARED, _DRY),
            "seeds=3 schedule.max_staleness=0,1,2",
            SETTINGS,
            file="compare",
        ),
        "matrix": Command(
            "staleness x off-policy correction x schedule",
            (
                replace(_SCHEDULES, default="fully_async,half_step,one_step_off"),
                _plain("staleness", "numbers with commas", "NUMBERS", "0,1,2,4"),
                _plain(
                    "corrections",
                    "names with commas, each at a rate behind @ if you like",
                    "NAMES",
                    "none,clip,decoupled,tis,mis",
                ),
                *_with(_COMPARED, backend="real", devices="3"),
                _DRY,
            ),
            "schedules=fully_async staleness=0,2 corrections=none,tis",
            SETTINGS,
            file="compare",
        ),
        "paper": Command(
            "a published experiment beside what the same schedules do here",
            (_plain("paper", "a name, or all", "NAME"),),
            "paper=relax",
            one_thread=True,
            file="studies",
        ),
        "speedrun": Command(
            "how soon a schedule gets a frozen job to its target: a record, and the book of all",
            (
                _SCHEDULE,
                _ENGINE,
                _DEVICES,
                _plain("track", "of experiments/speedrun/: the frozen job", "NAME", "tiny_reverse_v1"),
                _plain("key", "a private key of SSH's, to sign the record with", "FILE"),
                _plain("verify", "a record to check instead", "FOLDER"),
                _DRY,
            ),
            "schedule=delayed_update cluster.devices=2",
            SETTINGS,
        ),
    },
    "look at what came out": {
        "report": Command(
            "one page of what an experiment found",
            (replace(_EXPERIMENT, default="that of the run that ended last"), replace(_MARGIN, default="as compared")),
            "experiment=bench",
            file="look",
        ),
        "show": Command(
            "samples of a run: prompt, response, reward, and what became of them",
            (
                _plain("run", "its folder, or an experiment with one", "FOLDER", "the run that began last"),
                _plain("sample", "an id", "ID"),
                _plain("row", "of the data, train.jsonl:17, or the number of a made-up problem", "ROW"),
                _plain("worst", "so many with the lowest rewards", "N"),
                _plain("best", "so many with the highest", "N"),
                _plain("dropped", "so many that were not trained", "N"),
                Option("held-out", "held_out", "responses to held-out problems, of a version, or last", "VERSION"),
            ),
            "run=bench worst=5",
            file="look",
        ),
        "diff": Command(
            "what changed from one experiment, or commit, to another, and how surely",
            (
                _plain("before", "an experiment, a folder of runs, or a commit", "NAME"),
                _plain("after", "another", "NAME"),
                _MARGIN,
                _FAIL_IF,
            ),
            "monday tuesday",
            "<before> <after>",
            file="look",
        ),
        "ui": Command(
            "MLflow on what was written", (_plain("port", "on loopback", "N", "5000"),), "port=5001", file="look"
        ),
        "metrics": Command("every number that a run writes, with its unit and formula", file="list"),
        "mlflow-sync": Command(
            "bring MLflow up to date from the files",
            (replace(_EXPERIMENT, default="all"),),
            "experiment=bench",
            file="look",
        ),
    },
    "simulate and plan": {
        "plan": Command(
            "the fastest split and layout of every schedule, simulated",
            (_LOG, *_PLANNED),
            "model=qwen7b device=h200 cluster.devices=32",
            SETTINGS,
            one_thread=True,
        ),
        "predict": Command(
            "a published table's asynchronous rows from its synchronous ones",
            (
                _LOG,
                _plain("table", "a published table", "CSV"),
                _plain("given", "train, or sync: what may be read of it", "ROWS", "train"),
                Option("score", "score=true", "score all published rows, and simulated truths, beside the last scores"),
                *_JOB,
            ),
            "table=experiments/papers/verl_one_step_off.csv",
            SETTINGS,
        ),
        "calibrate": Command(
            "costs from finished real runs",
            (
                Option("run", "run", "folders of finished runs, or the gate's results.json", "FOLDER", several=True),
                _plain("name", "of the costs", "NAME", "as the first run's cell"),
                *_FITTED,
            ),
            "run=results/bench/<cell>/seed=0 name=mine",
            SETTINGS,
            file="costs",
        ),
        "profile": Command(
            "costs from times of the engines on this machine's device",
            (
                _plain("name", "of the costs", "NAME", "<model>_profile"),
                _plain("profile", "times that were measured before", "JSON"),
                *_FITTED,
            ),
            "model=tiny name=mine",
            SETTINGS,
            file="costs",
        ),
        "table": Command(
            "every schedule, simulated or planned, as a page",
            (_plain("of", "schedules, staleness, memory, transfers or scaling", "NAME", "schedules"),),
            "of=memory",
            one_thread=True,
            file="studies",
        ),
    },
    "this machine, and what there is": {
        "list": Command(
            "what can be chosen",
            (_plain("of", "a setting whose names are explained: algorithm.correction", "SETTING"),),
            "of=algorithm.correction",
        ),
        "doctor": Command(
            "is this machine fit; with a job: is it for that",
            (*_with(_JOB, schedule="every one"), _CONFIG),
            "model=qwen7b device=h100 cluster.devices=8",
            SETTINGS,
        ),
        "sample": Command(
            "a small model with a tokenizer, and problems for it, to try text with",
            (_plain("folder", "where to", "FOLDER"),),
            "folder=my",
            file="studies",
        ),
        "serve": Command(
            "rows and weights of a job over HTTP, for a trainer and engines of your own",
            (
                _plain("port", "0: a free one", "N", "8767"),
                _plain("host", "an address of this machine that others reach; TLS only", "ADDRESS", "127.0.0.1"),
                _plain("certificate", "of TLS", "PEM"),
                _plain("key", "of the certificate", "PEM"),
            ),
            "port=0",
        ),
        "chaos": Command(
            "random faults over runs of every schedule, and what is promised of them afterwards",
            (
                _plain("first", "the first seed", "N", "0"),
                replace(_SEEDS, help="simulated runs", default="800"),
                _plain("limit", "seconds", "S", "1800"),
                _plain("real", "faults of real runs", "N", "0"),
            ),
            "first=7 seeds=1",
            one_thread=True,
            file="acceptance",
        ),
        "gate-gpu": Command(
            "everything that only a machine shows, part by part: kernels, groups, transports, whole jobs",
            (
                _plain("device", "cpu or gpu", "NAME", "what there is"),
                _plain("parts", "names with commas", "NAMES", "all"),
                _FORCE,
                _plain("limit_s", "seconds of this command; the next one goes on", "N"),
            ),
            "device=cpu parts=engines",
            file="acceptance",
        ),
    },
}
VALUES = "json=true"
_JSON = Option("json", VALUES, "tables and lines as one JSON object, and nothing else on standard output")
_SERVERS = ("ui", "serve")  # which print where they are, and go on
COMMANDS: dict[str, Command] = {
    name: command if name in _SERVERS else replace(command, options=(*command.options, _JSON))
    for group in GROUPS.values()
    for name, command in group.items()
}
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


def takes(name: str) -> str:
    """Return a sentence on what a command takes."""
    options = [one.setting if one.value is None else f"{one.setting}=" for one in COMMANDS[name].options]
    return f"it takes {' '.join(options) or 'nothing'}{' and settings' * (COMMANDS[name].free == SETTINGS)}"


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
            raise ValueError(f"{name} does not take {variable}=; {takes(name)}")
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
        from harness.cli.spelling import BY_MAKE, Spelling

        os.environ[BY_MAKE] = "1"
        sys.exit(Spelling(sys.argv[1:])(str(refused)))
