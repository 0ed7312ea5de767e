"""No figure of a table is cut, however narrow the terminal; a pipe gets a line a row, a program values."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.cli import main as cli
from harness.metrics.formatting import redacted
from harness.metrics.tables import PIPE, Table
from tests.support.examples import examples
from tests.support.project import ROOT

WIDTHS = (60, 80, 120, PIPE)
FIGURE = re.compile(r"\d[\d,.]*")
RUNS = Table(
    "runs",
    ("run", "iterations\nsamples", "first\n95 %", "last\n95 %", "by seed"),
    [("a\nmodel x", "120\n15,360", "0.5\n0.4 to 0.6", "-", "1 2 3"), ("b", "7\n8", "−1\n-2 to 0", "2\n1 to 3", "")],
)


def printed(table: Table, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def figures(table: Table) -> list[str]:
    return sorted(FIGURE.findall(" ".join(cell for row in table.rows for cell in row)))


words = st.lists(st.from_regex(r"[a-z]{1,20}|-?[0-9]{1,3}(,[0-9]{3}){0,3}|0\.[0-9]{1,4}", fullmatch=True), max_size=6)
cells = st.lists(words.map(" ".join), min_size=1, max_size=3).map("\n".join)
names = st.from_regex(r"[a-z]{1,20}( [a-z]{1,9})?", fullmatch=True)  # of rows, which a table in parts repeats


@settings(max_examples=examples(60))
@given(st.integers(1, 11).flatmap(lambda width: st.lists(st.tuples(names, *[cells] * width), min_size=1, max_size=4)))
def test_every_figure_stands_whole_at_every_width(rows: list[tuple[str, ...]]) -> None:
    table = Table("", [f"head of {'abcdefghijkl'[column]}" for column in range(len(rows[0]))], rows)
    for width in WIDTHS:
        text = printed(table, width)
        assert sorted(FIGURE.findall(text)) == figures(table)
        assert width == PIPE or max(map(len, text.splitlines())) <= width


def test_a_row_is_a_line_for_a_pipe_and_stands_in_parts_or_below_the_others_where_it_is_too_wide() -> None:
    lines = [re.split(" {2,}", line.strip()) for line in printed(RUNS, PIPE).splitlines()[1:-1]]
    assert lines == [
        ["run", "iterations", "samples", "first", "first, 95 %", "last", "last, 95 %", "by seed"],
        ["a model x", "120", "15,360", "0.5", "0.4 to 0.6", "-", "-", "1 2 3"],
        ["b", "7", "8", "−1", "-2 to 0", "2", "1 to 3", "-"],
    ]
    first, second = RUNS.values
    assert first["samples"] == 15360 and first["first"] == 0.5 and first["last"] is None and first["by seed"] == "1 2 3"
    assert second["first"] == -1 and second["last, 95 %"] == "1 to 3" and second["by seed"] is None
    heads = [f"head{number}" for number in range(12)]
    parts = printed(Table("", heads, [["name", *["1,234,567"] * 11]]), 60).splitlines()
    assert [parts[row].split() for row in (0, 4, 8)] == [["head0", *heads[at : at + 5]] for at in (1, 6, 11)]
    assert printed(Table("", heads, [["name", *["some 1,234,567"] * 11]]), 60).splitlines()[:2] == [
        "name",
        "  head1  some 1,234,567",
    ]


def test_no_other_tables_are_printed() -> None:
    files = [file for file in (ROOT / "harness").rglob("*.py") if "rich.table" in file.read_text(encoding="utf-8")]
    assert [file.name for file in files] == ["progress.py"]  # a run that goes on: shown on a terminal only


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)  # MLflow's
@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--backend", "virtual", "--cost", "tiny_cpu", "--iterations", "3", "--seeds", "2", "loggers="],
        ["doctor", "--model", "qwen7b", "--device", "h100", "--devices", "8", "--schedule", "fully_async"],
        ["compare", "--backend", "virtual", "--cost", "tiny_cpu", "--schedules", "fully_async,half_step", "--dry-run"],
    ],
    ids=lambda words: f"{words[0]}-{len(words)}",
)
def test_a_command_says_as_json_alone_what_it_prints(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("harness.report.plots.draw_run", lambda folder: [])
    status = cli.main([*words, "--json"])
    said = json.loads(capfd.readouterr().out)
    assert (said["command"], said["status"]) == (words[0], status)
    assert said["tables"] and all(table["rows"] for table in said["tables"])
    assert cli.main(words) == status
    text = capfd.readouterr().out
    for table in said["tables"]:
        for row in table["rows"] if table["title"] else ():  # of what is to be done none is left
            assert all(value in text for value in row.values() if isinstance(value, str))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h/db?user=u&password=secret&x=1", "postgresql://h/db?user=u&password=***&x=1"),
        ("https://h/?access_token=secret#key=secret", "https://h/?access_token=***#key=***"),
        ("https://secret@h/x and https://h/y", "https://***@h/x and https://h/y"),
        ("https://u:se@cret@h:1/x?step=3", "https://u:***@h:1/x?step=3"),
        ("file:///a/b@c", "file:///a/b@c"),
    ],
)
def test_what_may_be_a_secret_is_shown_in_no_part_of_an_address(address: str, shown: str) -> None:
    assert redacted(address) == shown
