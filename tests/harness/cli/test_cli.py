"""The commands, as a user sees them: one line for what cannot work, exit code 2, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from cadence import __version__
from harness.cli import main as cli
from harness.cli.commands import COMMANDS, Option
from harness.cli.commands import GROUPS as COMMAND_GROUPS
from harness.cli.completion import completion
from harness.cli.console import OUTPUT_CLOSED, ValuesConsole
from harness.cli.front import SHELLS, settings_of
from harness.cli.steps import StepsBar
from harness.config import ConfigError
from harness.config.compose import GROUPS, choices
from harness.config.files import found_below
from harness.config.registries import CORRECTIONS
from harness.driver.checkpointing import LeftAtCheckpoint
from harness.driver.progress import ProgressDisplay
from harness.metrics.definitions import DEFINITIONS
from harness.studies.papers.experiment import names
from tests.support.project import ROOT

FILE_KINDS = ("FILE", "CSV", "JSON", "PEM", "FOLDER")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder that is not there yet; running anything is a failure."""

    def run_nothing(*arguments: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr("harness.driver.run.run_seed", run_nothing)
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["schedule=nope"], f"schedule=nope is unknown; choose one of {', '.join(choices('schedule'))}\n"),
        (["schedule.nonsense=1"], "schedule.nonsense is no setting; those of --schedule fully"),
        (["iterations=abc"], "iterations=abc is no whole number"),
        (["iterations"], "iterations cannot be read; write setting=value"),
        (["schedule.max_staleness=-1"], "schedule.max_staleness=-1.0 is out of bounds; use 0 to 1000000"),
        (["backend=real", "cluster.kind=cpu", "cluster.devices=4096"], "the job needs 4096 devices, this machine has "),
        (
            ["schedule.split.rollout=5"],
            "schedule.split needs 6 devices (rollout 5 + actor 1), the job has 2; set --devices 6",
        ),
        (["cluster.devices=50000000"], "cluster.devices=50000000 is too large; use at most 65536"),
        (["schedule.split.rollout=1000000000"], "schedule.split.rollout=1000000000 is more than any job has; use at "),
        (
            ["schedule.split.rollout=65536", "schedule.split.actor=65536"],
            "schedule.split needs 131072 devices (rollout",
        ),
        ([f"schedule.split.rollout={'9' * 5000}%"], "schedule.split.rollout=999"),
        (["model.layers=999999000001", "training.pipeline_parallel=7"], "training.pipeline_parallel=7 does not divide"),
        (["seeds=1000000000"], "seeds=1000000000 is more than anybody waits for"),
        (["iterations=1000000000000000"], "iterations=1000000000000000 is too large; use at most 1000000000000"),
        (["experiment=prüfung"], "experiment=prüfung cannot name a folder; use letters a to z"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(
    settings: list[str], message: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *settings]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(message) and err.count("\n") == 1 and err.endswith("\n")
    assert not out and not results.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["sweep", "--devices", "9" * 5000], "--devices 999"), (["calibrate", f"--run={'x' * 3000}", "--name=a"], "xxx")],
)
def test_a_word_longer_than_any_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1 and len(err) < 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"a: &a [{'x,' * 9}]\nb: &b [{'*a,' * 9}]\nc: [{'*b,' * 9}]\n", "it refers to parts of itself"),
        ("[" * 5000, "it is nested deeper than 32 levels"),
        (f"a: [{'1,' * 30_000}]", "it has more than 20,000 values"),
        (f"a: {'x' * (1 << 20)}", "it has more than 262,144 bytes"),
        ("!!python/object/apply:os.getcwd []", "it has a tag"),
    ],
)
def test_a_file_of_settings_that_would_fill_the_memory_is_one_line(
    text: str, why: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    for arguments in (["bench", f"cost={file}"], ["predict", f"table={table_beside(file)}"]):
        assert cli.main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"{file} cannot be read as YAML: ") and why in err and err.count("\n") == 1


def table_beside(file: Path) -> Path:
    """A published table, whose settings are this file."""
    table = file.with_suffix(".csv")
    table.write_text("mode,engine,total_gpus,rollout_gpus,train_gpus,step_s\ncolocate_sync,e,8,,,10\n")
    return table


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "name=../../x"],
        ["profile", "name=/tmp/x", "profile=there.json"],
        ["mlflow-sync", "experiment=../x"],
        ["compare", "experiment=../x", "schedules=one_step_off,k_step_off"],
        ["bench", "experiment=.x"],
        ["bench", f"experiment={'x' * 300}"],
    ],
)
def test_no_name_leaves_its_folder(arguments: list[str], results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    setting = arguments[1].partition("=")[0]
    assert err.startswith(f"{setting}=") and err.count("\n") == 1 and not out and not results.exists()
    assert "cannot name a folder" in err or "is too long for a name" in err


@pytest.mark.parametrize("arguments", [[], ["benhc"]])
def test_an_unknown_command_names_those_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{arguments[0]} is no command; use cadence" if arguments else "use cadence")
    assert [line.split()[0] for line in lines[1:] if line.startswith("  ")] == list(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--schedul", "half_step"], "cadence bench: unknown option --schedul; cadence bench --help lists"),
        (["bench", "--schedule"], "cadence bench: argument --schedule: expected one argument; "),
        (["list", "--seeds", "3"], "cadence list: unknown option --seeds; "),
        (["table", "x=1"], "table does not take x=1; it takes --of"),
        (["mlflow-sync", "iterations=3"], "mlflow-sync does not take iterations=3; it takes --experiment"),
        (["--vresion"], "cadence: "),
        (["bench", "--schedule", "nope"], "--schedule nope is unknown; choose one of "),
        (["bench", "--device", "nope"], "--device nope is unknown; choose one of a100"),
        (["bench", "--device", "h100", "backend=real"], "--device h100 has no effect: it is read only where the job "),
        (["paper"], "which? --paper all, or one of april"),
        (["doctor", "--model", "nope"], "--model nope is unknown; choose one of "),
        (["bench", "--schedule", "my_lab.k_steps"], "--schedule my_lab.k_steps is a module; name what is meant in it"),
        (["compare", "--schedules", "my_lab.k_steps"], "--schedules my_lab.k_steps is a module; "),
        (["bench", "--iterations", "3,4"], "--iterations 3,4 are several values; a list is --iterations [3,4], and "),
        (["compare", "--fail-if", "fast"], "--fail-if fast cannot be read; write a measure, "),
        (
            ["compare", "--schedules", "half_step,", "fully_async"],
            "half_step, fully_async: a list has no blanks; write ",
        ),
    ],
)
def test_an_option_that_is_none_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1 and not results.exists()


FILES = [(name, one) for name, command in COMMANDS.items() for one in command.options if one.value in FILE_KINDS]


@pytest.mark.parametrize("given", ["missing", "folder", "bytes.csv", "list.yaml"])
@pytest.mark.parametrize(("command", "option"), FILES, ids=[f"{command}-{option.flag}" for command, option in FILES])
def test_a_file_that_is_not_what_an_option_names_is_one_line_and_a_fix(
    command: str,
    option: Option,
    given: str,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CADENCE_TOKEN", "0" * 32)
    Path("folder").mkdir()
    Path("bytes.csv").write_bytes(bytes(range(256)))
    Path("list.yaml").write_text("- 1\n")
    if command == "sample" and given in ("missing", "folder"):
        pytest.skip("it writes there")
    others = ["--certificate", given, "--key", given] if command == "serve" else []
    assert cli.main([command, f"--{option.flag}", given, *others]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and given.partition(".")[0] in err and len(err) < 500 and not results.exists()


def test_help_names_every_command_and_a_commands_help_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    for group, commands in COMMAND_GROUPS.items():
        assert all(f"\n  {name} " in told[told.index(f"\n{group}:\n") :] for name in commands)
    assert cli.main(["compare", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--schedules NAMES" in told and "--dry-run" in told and "--schedule NAME" not in told
    assert "(default: all)" in told and "For example: cadence compare --schedules colocate_sync," in " ".join(
        told.split()
    )
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cadence {__version__}\n"


def test_options_and_settings_stand_beside_each_other_in_any_order() -> None:
    given = ["iterations=3", "--seeds", "2", "--force", "schedule.max_staleness=1", "--devices=4"]
    assert settings_of("bench", given) == [
        *("seeds=2", "cluster.devices=4", "force=true"),
        *("iterations=3", "schedule.max_staleness=1"),
    ]


def test_a_dry_run_says_every_setting_and_leaves_nothing(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule", "half_step", "--seeds", "2", "--dry-run", "backend=virtual", "iterations=7"]
    assert cli.main(["bench", *arguments]) == 0
    told = capsys.readouterr().out
    assert told.count("would be run") == 2 and not results.exists()
    settings = yaml.safe_load(told[told.index("\nexperiment:") :])
    assert (settings["schedule"]["name"], settings["iterations"], settings["backend"]) == ("half_step", 7, "virtual")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("ui", "serve")])
def test_a_pipe_gets_the_results_of_a_command_alone_and_under_json_one_document(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(settings: list[str], results: Path, console: Console) -> int:
        with StepsBar("working", console) as steps, ProgressDisplay(console, "a job", 2) as display:
            steps.done(1, 2, "a step")
            display.quiet("nothing happens")
        console.print("a result")
        if isinstance(console, ValuesConsole):
            print("a library's line")
        return 3

    monkeypatch.setattr(cli, "command", lambda _: work)
    assert cli.main([name]) == 3
    said = capsys.readouterr()
    assert said.out == "a result\n" and all(line in said.err for line in ("a job", "a step", "nothing happens"))
    assert cli.main([name, "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out) == {"command": name, "status": 3, "tables": [], "lines": ["a result"]}
    assert all(line in said.err for line in ("a job", "a step", "nothing happens", "library"))


@pytest.mark.parametrize("words", [("report", "--experiment"), ("show", "--run"), ("plan", "--log")])
def test_no_command_looks_for_results_deeper_than_they_lie(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or it would walk the whole disk, asked for those in /."""
    deep = tmp_path / "a/b/c/d/seed=0"
    deep.mkdir(parents=True)
    for name in ("DONE", "config.yaml", "events.out.tfevents.1"):
        (deep / name).touch()
    assert cli.main([*words, str(tmp_path)]) == 2
    assert "three folders down or less" in capsys.readouterr().err
    assert found_below(tmp_path / "a", "seed=*/DONE") == [deep / "DONE"]


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_dry_run_is_asked_for_or_not(command: str, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "dry=1"]) == 2
    assert capsys.readouterr().err == "dry=1 is neither true nor false\n" and not results.exists()


ASKED = {
    "bash": """source {script}; COMP_WORDS=(cadence {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    $(complete -p cadence | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); echo "${{COMPREPLY[@]}}" """,
    "fish": """source {script}; complete -C "cadence {typed}" """,
    "zsh": r"""zmodload zsh/zpty; zpty z zsh -f -i
    zpty -w z "autoload -Uz compinit; compinit -u -D; eval \"\$(cat {script})\"; stty -echo; PROMPT=READY"
    zpty -r z said '*READY*READY*'; zpty -w -n z "cadence {typed}"$'\t'; zpty -r z said "*{whole}*"; echo {whole}""",
}
"""What has a shell complete what is typed, and print it."""


@pytest.mark.parametrize("shell", ASKED)
@pytest.mark.parametrize(
    ("typed", "whole"),
    [
        ("comp", "compare"),
        ("bench --sche", "--schedule"),
        ("bench --schedule half", "half_step"),
        ("compare --schedules fully_async,half", "fully_async,half_step"),
        ("report --experiment mon", "monday"),
        ("bench --seeds 2 schedule.max_st", "schedule.max_staleness="),
        ("bench schedule.coh", "schedule.cohorts="),
    ],
)
def test_shells_complete_commands_options_and_settings(shell: str, typed: str, whole: str, tmp_path: Path) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"no {shell} here: apt-get install {shell}")
    (tmp_path / "results" / "monday").mkdir(parents=True)
    script = tmp_path / "completion"
    script.write_text(completion(shell))
    ask = ASKED[shell].format(script=script, typed=typed, whole=whole)
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"}
    done = subprocess.run([program, "-c", ask], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60)
    assert whole in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_completion_for_every_shell(shell: str) -> None:
    assert "half_step" in completion(shell)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_file_that_says_what_it_does(name: str) -> None:
    assert cli.command(name).__doc__


@pytest.mark.parametrize(
    ("words", "by_make", "status"),
    [
        (["list"], False, OUTPUT_CLOSED),
        (["list"], True, 0),
        (["bench", "--help"], False, OUTPUT_CLOSED),
        (["--print-completion", "bash"], False, OUTPUT_CLOSED),
        (["no-command"], False, OUTPUT_CLOSED),
    ],
)
def test_a_command_whose_output_is_closed_ends_without_a_word(words: list[str], by_make: bool, status: int) -> None:
    """As in `cadence list | head -1`. Make would print a line for another status than 0."""
    nobody_reads, output = os.pipe()
    os.close(nobody_reads)
    errors = output if words == ["no-command"] else subprocess.PIPE
    outside = {name: value for name, value in os.environ.items() if name != "MAKELEVEL"}
    environment = outside | ({"MAKELEVEL": "1"} if by_make else {})
    command = [sys.executable, "-m", "harness", *words]
    done = subprocess.run(command, stdout=output, stderr=errors, env=environment, timeout=120, check=False)
    os.close(output)
    assert (done.returncode, done.stderr or b"") == (status, b"")


def test_metrics_and_list_name_all_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{metric.name} " in printed and metric.title in printed for metric in DEFINITIONS)
    assert "largest over pools" in printed and re.search(r"idle/<role>\s+-\s+1 - busy / window", printed)
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for path in (path for group in GROUPS for path in (ROOT / "experiments" / group).glob("*.yaml")):
        assert f"{path.parent.name}=" in out and f"\n{path.stem} " in out
    for name in names():
        assert f"\n{name} " in out
    assert cli.main(["list", "--of", "algorithm.correction"]) == 0
    printed = capsys.readouterr().out
    assert "  dual_clip  clip_low=0.2 clip_high=0.2 most=3.0\n" in printed and "arXiv 1912.09729" in printed
    assert set(CORRECTIONS) == set(re.findall(r"^  (\S+)", printed, re.MULTILINE))
    assert cli.main(["list", "--of", "nope"]) == 2
    assert "--of nope has no names to explain; choose one of schedule, engine, " in capsys.readouterr().err
    assert cli.main(["list", "--of="]) == 0 and "schedule=" in capsys.readouterr().out


def test_what_ran_is_shown(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[list[Path]] = []
    monkeypatch.setattr("harness.report.summary.print_summary", lambda folders, console: shown.append(folders))
    monkeypatch.setattr(
        "harness.checks.settle.plan_job", lambda *_: SimpleNamespace(backend="real", gpu=False, trial=False)
    )
    from harness.config.compose import compose_job
    from harness.metrics.manifest import RunIdentity, build_manifest
    from harness.metrics.run_files import run_directory

    with run_directory(compose_job(["backend=real"]), 0, results) as folder:
        identity = RunIdentity("bench", folder.path.parent.name, 0, "fully_async", "tiny", "torch", "real")
        folder.write_manifest(build_manifest(identity, {"run": 0}))
        folder.finish()
    assert cli.main(["bench"]) == 0
    assert shown == [[folder.path]]
    assert "seed 0 is done already; --force runs it again" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="the run was started"):
        cli.main(["bench", "force=true"])


def failing_bench(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(arguments: object, results: object, console: object) -> int:
        raise error

    monkeypatch.setattr("harness.cli.bench.run", fail)


def test_an_interrupt_a_folder_in_use_and_a_long_message_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_bench(monkeypatch, KeyboardInterrupt())
    assert cli.main(["bench"]) == 130
    assert "the same command starts this seed again" in capsys.readouterr().err
    failing_bench(monkeypatch, BlockingIOError("seed=0: this cell and seed is being run by another process"))
    assert cli.main(["bench"]) == 1
    assert capsys.readouterr().err == "seed=0: this cell and seed is being run by another process\n"
    failing_bench(monkeypatch, ConfigError("[red]long[/] " * 40))
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "[red]long[/] " * 40 + "\n"


def test_the_first_failure_of_a_run_is_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = OSError("disk full")
    failing_bench(monkeypatch, BaseExceptionGroup("loops", [BaseExceptionGroup("roles", [cause]), ValueError("later")]))
    with pytest.raises(OSError, match="disk full") as caught:
        cli.main(["bench"])
    assert caught.value is cause


def test_a_port_that_is_taken_is_said_before_mlflow_starts(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.mkdir()
    (results / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["ui", "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(
        f"--port {port} cannot be had (Address already in use); use another, such as --port 5001"
    )


@pytest.mark.parametrize("port", ["port=http", "port=0", "port=65536", "port="])
def test_a_port_that_is_none_is_refused(port: str, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.mkdir()
    (results / "mlflow.db").touch()
    assert cli.main(["ui", port]) == 2
    assert capsys.readouterr().err == f"{port} is no port; use a number such as port=5001\n"


def test_ui_says_where(results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["ui"]) == 2
    assert "is not there yet; run `cadence bench` first" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert cli.main(["ui"]) == 0
    assert "http://127.0.0.1:5000 (MLFLOW_TRACKING_URI)" in capsys.readouterr().out


def test_a_run_that_left_with_a_checkpoint_says_so_in_one_line_and_has_an_exit_code_of_its_own() -> None:
    def leave() -> int:
        raise ExceptionGroup("the job", [LeftAtCheckpoint(40)])

    told = StringIO()
    assert cli.answered(leave, Console(file=told)) == cli.LEFT_AT_CHECKPOINT == 75
    assert told.getvalue() == "left, as SIGTERM asked, with a checkpoint of version 40: the same command goes on\n"


def test_a_seed_that_sigterm_came_too_late_for_is_the_last_one(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[int] = []

    def run_to_its_end(config: object, plan: object, seed: int, *others: object) -> None:
        begun.append(seed)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("harness.driver.run.run_seed", run_to_its_end)
    assert cli.main(["bench", "backend=virtual", "seeds=3", "checkpoint.every=10"]) == cli.LEFT_AT_CHECKPOINT
    assert begun == [0]
    assert capsys.readouterr().err == "left, as SIGTERM asked, before seed 1: the same command goes on\n"
