"""What is printed is spelt as whoever called does: options in a shell, variables by make."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.acceptance import DEFAULTS
from harness.cli.commands import COMMANDS
from harness.cli.front import settings_of
from harness.cli.spelling import BY_MAKE, Spelling
from harness.config.compose import compose_job, plain
from harness.config.job import flatten
from harness.planner.plan import DEFAULTS as PLANNED
from tests.support.project import ROOT

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
