"""What a command prints on a terminal of 60 columns: no line is longer, no word broken, and no figure left out that a
pipe gets."""

import ast
import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli import main as cli
from harness.cli.acceptance import DEFAULTS
from harness.cli.commands import COMMANDS
from harness.cli.console import PlainTextConsole, folded
from harness.cli.front import settings_of
from harness.cli.spelling import BY_MAKE, Spelling
from harness.comparison.console import print_comparison
from harness.comparison.experiment import comparison_in
from harness.config.compose import compose_job, plain
from harness.config.files import yaml_text
from harness.config.job import flatten
from harness.planner.plan import DEFAULTS as PLANNED
from tests.support.project import ROOT

WIDTH = 60
JOB = ("backend=virtual", "cost=tiny_cpu", "iterations=3", "loggers=")


class Both(PlainTextConsole):
    """Prints into a pipe, and on a terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, file=StringIO())
        self.terminal = PlainTextConsole(
            **options, file=StringIO(), width=WIDTH, force_terminal=True, color_system=None
        )

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        self.terminal.print(*objects, **options)


def too_long(text: str) -> list[str]:
    """Lines that are neither one word, which may be a path, nor a command, to be copied."""
    return [line for line in text.splitlines() if len(line) > WIDTH and " " in line.strip() and "cadence " not in line]


def words(text: str) -> set[str]:
    return {word.strip(",") for word in text.split()} - {""}


def assert_alike(*printed: Both) -> None:
    pipe = "\n".join(console.file.getvalue() for console in printed)  # type: ignore[attr-defined]
    terminal = "\n".join(console.terminal.file.getvalue() for console in printed)  # type: ignore[attr-defined]
    assert words(pipe) and too_long(terminal) == []
    assert {word for word in words(terminal) - words(pipe) if set(word) != {"─"}} == set()
    assert {word for word in words(pipe) - words(terminal) if re.search(r"\d", word)} == set()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of two schedules, of three seeds."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "RESULTS", folder)
        patch.setattr("harness.report.plots.draw_run", lambda folder: [])
        patch.setattr("harness.report.page.document.draw_comparison", lambda *_: [])
        for schedule in ("fully_async", "delayed_update"):
            assert cli.main(["bench", f"schedule={schedule}", "seeds=3", *JOB]) == 0
        yield folder


@pytest.mark.parametrize(
    "typed",
    [
        ("bench", "schedule=fully_async", "seeds=3", *JOB), ("bench", "--dry-run"),
        ("compare", "--seeds", "3", "--dry-run", *JOB), ("sweep", "schedule.max_staleness=0,1", "--dry-run", *JOB),
        ("report", "--experiment", "bench"), ("diff", "bench", "bench"), ("show", "--run", "bench/{run}"),
        ("show", "--run", "bench/{run}", "--worst", "2"), ("metrics",), ("list",),
        ("list", "--of", "algorithm.correction"), ("list", "--of", "schedule"), ("doctor",),
        ("doctor", "--model", "qwen7b", "--device", "h100", "--devices", "8"),
        ("doctor", "--model", "qwen7b", "--device", "h100", "--devices", "8", "--schedule", "fully_async"),
        ("doctor", "--model", "qwen32b", "--device", "a100", "--devices", "2", "--schedule", "fully_async"),
        ("bench", "--schedule", "nope"), ("nope",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_terminal_of_60_columns_has_all_that_a_pipe_has(
    typed: tuple[str, ...], results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Both] = []
    monkeypatch.setattr(cli, "PlainTextConsole", lambda **options: printed.append(Both(**options)) or printed[-1])
    run = next(path.parent.relative_to(results / "bench") for path in results.rglob("seed=0"))
    cli.main([word.format(run=run / "seed=0") for word in typed])
    assert_alike(*printed)


def test_a_terminal_has_all_figures_of_a_comparison(results: Path) -> None:
    console = Both()
    print_comparison(comparison_in(results / "bench"), console)
    assert_alike(console)


def test_settings_that_a_terminal_shows_can_be_pasted() -> None:
    text = yaml_text({"task": {"data": "/folders/with blanks/train.jsonl", "of": list(range(30)), "none": {}}})
    assert too_long(shown := folded(text, 30)) == [] and yaml.safe_load(shown) == yaml.safe_load(text)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits(command: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [command, "--help"] if command else ["--help"]
    texts = []
    for columns in (WIDTH, 10_000):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        cli.main(asked)
        texts.append(capsys.readouterr().out)
    assert too_long(texts[0]) == [] and words(texts[0]) == words(texts[1])


VARIABLES = {option.variable for command in COMMANDS.values() for option in command.options} | {"ARGS"}
BY_MAKES_WORDS = re.compile(rf"\bmake ({'|'.join(COMMANDS)})\b|(?<![\w$])({'|'.join(VARIABLES)})=")
FOR_MAKE = {ROOT / "harness" / name for name in ("acceptance/gpu_gate/parts/engines.py", "cli/spelling.py")}


def texts(file: Path) -> Iterator[str]:
    """Every text of a file but what documents it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


def test_no_text_of_the_product_has_makes_words() -> None:
    files = [
        file for package in ("cadence", "harness", "engines", "schedules") for file in (ROOT / package).rglob("*.py")
    ]
    found = [
        (file, text) for file in files if file not in FOR_MAKE for text in texts(file) if BY_MAKES_WORDS.search(text)
    ]
    for file in (ROOT / "experiments").rglob("*.yaml"):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        found += [(file, first)] * bool(BY_MAKES_WORDS.search(first))
    assert found == []


@pytest.mark.parametrize(
    ("typed", "text", "in_a_shell", "by_make"),
    [
        ("bench", "set cluster.devices=4, or x=1", "set --devices 4, or x=1", "set DEVICES=4, or x=1"),
        ("bench", "force=true runs it again", "--force runs it again", "FORCE=1 runs it again"),
        ("report", "device=h100, experiment=a", "device=h100, --experiment a", "device=h100, EXPERIMENT=a"),
        ("bench device=x", "device=x is unknown", "device=x is unknown", "device=x is unknown"),
        ("bench --device=x", "device=x is unknown", "--device x is unknown", "DEVICE=x is unknown"),
        ("list", "see `cadence show run=a`", "see `cadence show --run a`", "see `make show RUN=a`"),
        ("table", "it takes of=", "it takes --of", "it takes OF="),
        ("bench", "cadence bench --help lists it", "cadence bench --help lists it", "make bench ARGS=--help lists it"),
        ("ui", "a/port=3 task.port=3", "a/port=3 task.port=3", "a/port=3 task.port=3"),
    ],
)
def test_settings_are_as_they_were_typed(
    typed: str, text: str, in_a_shell: str, by_make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BY_MAKE, "")
    assert Spelling(typed.split())(text) == in_a_shell
    monkeypatch.setenv(BY_MAKE, "1")
    assert Spelling(typed.split())(text) == by_make


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_taken_in_either_spelling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = COMMANDS[name].example
    for by_make in ("", "1"):
        monkeypatch.setenv(BY_MAKE, by_make)
        words = Spelling([name])(f"cadence {name} {example}").split()[2:]
        assert sorted(settings_of(name, words)) == sorted(example.split())


def test_defaults_that_help_shows_are_those_that_are_taken() -> None:
    shown = {name: {one.setting: one.default for one in COMMANDS[name].options} for name in COMMANDS}
    job = flatten(plain(compose_job([])))
    job |= {name: job[f"{name}.name"] for name in ("schedule", "model", "engine", "task", "cost", "device")}
    assert {name: told for name, told in shown["bench"].items() if told} == {
        name: str(job[name]) for name, told in shown["bench"].items() if told
    }
    assert {name: str(DEFAULTS[name]) for name in DEFAULTS}.items() <= shown["chaos"].items()
    planned = {name: value for name, value in PLANNED.items() if name in shown["plan"] and name != "engine"}
    assert planned.items() <= shown["plan"].items()
