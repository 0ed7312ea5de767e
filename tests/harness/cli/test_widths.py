"""What a command prints on a terminal of 60 columns: no line is longer, no word broken, and no figure left out that a
pipe gets."""

import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli import main as cli
from harness.cli.commands import COMMANDS
from harness.cli.console import PlainTextConsole, folded
from harness.comparison.console import print_comparison
from harness.comparison.experiment import comparison_in
from harness.config.files import yaml_text

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
        for schedule in ("fully_async", "delayed_update"):
            assert cli.main(["bench", f"schedule={schedule}", "seeds=3", *JOB]) == 0
        yield folder


@pytest.mark.parametrize(
    "typed",
    [
        ("bench", "schedule=fully_async", "seeds=3", *JOB),
        ("bench", "--dry-run"),
        ("compare", "--seeds", "3", "--dry-run", *JOB),
        ("sweep", "schedule.max_staleness=0,1", "--dry-run", *JOB),
        ("report", "--experiment", "bench"),
        ("diff", "bench", "bench"),
        ("show", "--run", "bench/{run}"),
        ("show", "--run", "bench/{run}", "--worst", "2"),
        ("metrics",),
        ("list",),
        ("list", "--of", "algorithm.correction"),
        ("list", "--of", "schedule"),
        ("doctor",),
        ("doctor", "--model", "qwen7b", "--device", "h100", "--devices", "8"),
        ("doctor", "--model", "qwen7b", "--device", "h100", "--devices", "8", "--schedule", "fully_async"),
        ("doctor", "--model", "qwen32b", "--device", "a100", "--devices", "2", "--schedule", "fully_async"),
        ("bench", "--schedule", "nope"),
        ("nope",),
    ],
    ids=" ".join,
)
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
def test_the_help_of_a_command_fits(
    command: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [command, "--help"] if command else ["--help"]
    texts = []
    for columns in (WIDTH, 10_000):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        cli.main(asked)
        texts.append(capsys.readouterr().out)
    assert too_long(texts[0]) == [] and words(texts[0]) == words(texts[1])
