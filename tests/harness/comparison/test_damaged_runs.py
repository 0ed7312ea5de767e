"""Folders of finished runs whose files are missing, cut off, or hold something else, by accident or on purpose: one
line, and none is believed, looked up or run."""

import io
import json
import os
import re
import shutil
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from harness.cli.console import PlainTextConsole
from harness.cli.look import diff, report
from harness.cli.main import answered
from harness.comparison.experiment import Campaign, ListedCell, read_campaign, write_campaign
from harness.config import ConfigError
from harness.metrics.run_files import RunDirectory, load_summary
from harness.report.page import document
from tests.support.fabricated_cells import Made, make_run

FILES = ("config.yaml", "ledger.json", "manifest.json", "metrics.jsonl", "samples.parquet", "trace.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3]),
    "other words": lambda file: file.write_text('["what", {"no": "run"}, "writes", null]\n'),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    made = Made("colocate_sync", lag=0, iterations=4)
    for label, wanted in {"sync": made, "fast": replace(made, schedule="fully_async", lag=1)}.items():
        make_run(root, label, wanted, 0)
    return root


@pytest.fixture(scope="module")
def earlier(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as earlier versions left them: what the files were is told nowhere, and they are read as they are."""
    root = shutil.copytree(results, tmp_path_factory.mktemp("earlier") / "results")
    for done in root.rglob("DONE"):
        done.write_text("2026-01-01T00:00:40+00:00\n")
    return root


@pytest.fixture
def copy(earlier: Path, tmp_path: Path) -> Path:
    return shutil.copytree(earlier, tmp_path / "results")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures beside a page take three quarters of its time, and nothing here looks at them."""
    monkeypatch.setattr(document, "draw_comparison", lambda comparison, folder: [])


def reported(results: Path) -> tuple[int, str]:
    """Exit code, and what was said of what went wrong."""
    said = io.StringIO()
    code = answered(
        lambda: report(["experiment=made_up"], results, Console(file=io.StringIO())), Console(file=said, width=1000)
    )
    return code, said.getvalue().strip()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_run_is_named_in_one_line(copy: Path, name: str, damage: str) -> None:
    file = copy / "made_up" / "fast" / "seed=0" / name
    DAMAGES[damage](file)
    code, said = reported(copy)
    if (name, damage) == ("metrics.jsonl", "cut off"):  # as many lines as were whole: the ledger knows of more
        assert "No verdict: conservation FAILED" in (copy / "made_up" / "report.md").read_text()
        return
    assert code == 2 and "\n" not in said, said
    assert said.startswith(str(file)) and ("is damaged: " in said or "is missing; " in said), said
    assert said.endswith("; make the run again with force=true, or take its folder away")


SYNC = ("made_up", "sync", "seed=0")
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an alias bomb": ("config.yaml", lambda file: file.write_text(BOMB)),
    "a tag": ("config.yaml", lambda file: file.write_text("!!python/object/apply:os.getcwd []\n")),
    "a deep one": ("config.yaml", lambda file: file.write_text("[" * 5000)),
    "more settings than there are": ("config.yaml", lambda file: file.write_text("a: 1\n" + "#" * (1 << 20))),
    "a deep object": ("manifest.json", lambda file: file.write_text('{"a":' * 200_000)),
    "a large one": ("summary.json", lambda file: file.write_text(" " * (2 << 20))),
    "a pipe": ("ledger.json", lambda file: (file.unlink(), os.mkfifo(file))),
    "numbers without end": ("metrics.jsonl", lambda file: file.write_text('{"iteration": ' + "9" * 5000 + "}\n")),
    "a span of nobody": (
        "trace.json",
        lambda file: file.write_text(file.read_text().replace('"cat": "rollout"', '"cat": "nobody"', 1)),
    ),
    "an unknown fate": ("ledger.json", lambda file: changed(file, engines=[{"what": "exploded"}])),
    "a seed that is no number": ("manifest.json", lambda file: changed(file, seed="<b>7</b>")),
    "hardware that is a list": ("manifest.json", lambda file: changed(file, hardware=[])),
    "no command": ("manifest.json", lambda file: changed(file, command=[])),
    "another place": ("manifest.json", lambda file: changed(file, experiment="../..")),
}


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_means_harm_is_named_in_one_line(copy: Path, case: str) -> None:
    name, harm = HOSTILE[case]
    file = copy.joinpath(*SYNC, name)
    harm(file)
    if name == "summary.json":
        with pytest.raises(ConfigError) as told:
            load_summary(file.parent)
        code, said = 2, str(told.value)
    else:
        code, said = reported(copy)
    assert code == 2 and "\n" not in said and said.startswith(str(file)) and "is damaged: " in said, said


def test_what_a_run_wrote_is_never_looked_up(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENCE_TEST_SECRET", "hunter2")
    for file in copy.rglob("config.yaml"):
        file.write_text(re.sub(r"(?m)^  ff: .*$", "  ff: ${oc.env:CADENCE_TEST_SECRET}", file.read_text()))
    assert reported(copy) == (0, "")
    page = (copy / "made_up" / "report.html").read_text()
    assert "${oc.env:CADENCE_TEST_SECRET}" in page and "hunter2" not in page


class Elements(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script" and self.found[-1][1].get("type") != "application/json":
            self.scripts.append(data)


def test_every_text_of_a_folder_is_text_on_the_page_with_one_script(copy: Path) -> None:
    harm = """"'></script><i class=evil onclick="x">&lt;${title}"""
    cells = []
    for folder in sorted((copy / "made_up").iterdir()):
        changed(
            folder / "seed=0" / "manifest.json",
            python=harm,
            packages={harm: harm},
            command=[harm],
            hardware={"cpu": harm, "cores": 1, "memory_bytes": 1, "gpus": [harm], "platform": harm},
            git={"commit": harm, "dirty": True},
        )
        config = yaml.safe_load((folder / "seed=0" / "config.yaml").read_text())
        for group in ("task", "engine", "model", "algorithm", "cluster"):
            config[group][harm] = harm
        config["task"]["name"] = harm
        (folder / "seed=0" / "config.yaml").write_text(yaml.safe_dump(config))
        cells.append(ListedCell(harm + folder.name, folder.name, (), (), ""))
    write_campaign(copy / "made_up", Campaign(("schedule",), {}, (0,), tuple(cells), {harm: harm}, (harm,)))
    gate = {"baseline": harm, "baseline_path": "", "samples": 1, "iterations": 1, "model": harm, "note": harm}
    told = {"failure": harm, "made_from": {}, "pairs": [{"name": harm, "path": harm, "differing": [harm]}]}
    (copy / "made_up" / "gate.json").write_text(json.dumps(gate | told))
    assert reported(copy) == (0, "")
    page = Elements((copy / "made_up" / "report.html").read_text())
    assert not [tag for tag, attributes in page.found if attributes.get("class") == "evil" or "onclick" in attributes]
    (policy,) = [a["content"] for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy"]
    (script,) = page.scripts
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy is not None and f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy


def test_no_text_of_a_folder_moves_the_terminal(earlier: Path, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harm = "\x1b]0;pwned\x07\x1b[2J\x9b31m\x08\r\u202e"
    for folder in sorted((copy / "made_up").iterdir()):
        changed(folder / "seed=0" / "manifest.json", python=harm, packages={harm: folder.name}, command=[harm])
    cells = tuple(ListedCell(folder.name, folder.name, (), (), "") for folder in (copy / "made_up").iterdir())
    write_campaign(copy / "made_up", Campaign(("schedule",), {}, (0,), cells, {harm: harm}, (harm,)))
    labelled = tuple(replace(cell, label=harm + cell.label) for cell in cells)
    write_campaign(copy / "labelled", Campaign(("schedule",), {}, (0,), labelled, {}, ()))
    (copy / "odd").mkdir()
    (copy / "odd" / "campaign.json").write_text(json.dumps({harm: harm}))
    console, errors = PlainTextConsole(), PlainTextConsole(stderr=True)
    for command in (
        lambda: report(["experiment=made_up"], copy, console),
        lambda: report(["experiment=labelled"], copy, console),
        lambda: report(["experiment=odd"], copy, console),
        lambda: diff(["made_up", str(earlier / "made_up")], copy, console),
        lambda: diff([harm, "made_up"], copy, console),
    ):
        answered(command, errors)
    said = "".join(capfd.readouterr())
    assert "pwned" in said and [letter for letter in said if letter != "\n" and not letter.isprintable()] == []


@pytest.mark.parametrize("name", ["campaign.json", "gate.json"])
@pytest.mark.parametrize("text", ["", "[]", '{"cells": [1]}', "[" * 100_000, "\x80"])
def test_a_damaged_file_of_a_comparison_is_one_line(copy: Path, name: str, text: str) -> None:
    folder = copy / "made_up"
    cells = tuple(ListedCell(label, label, (), (), "") for label in ("sync", "fast"))
    write_campaign(folder, Campaign(("schedule",), {}, (0,), cells, {}, ()))
    (folder / name).write_bytes(text.encode("latin-1"))
    code, said = reported(copy)
    assert code == 2 and said.startswith(f"{folder / name} is damaged: ") and "\n" not in said, said


def test_a_comparison_names_neither_another_folder_nor_code(tmp_path: Path) -> None:
    def written(cell: ListedCell) -> Campaign:
        campaign = Campaign(("schedule",), {}, (0,), (cell,), {}, ())
        write_campaign(tmp_path, campaign)
        return campaign

    written(ListedCell("mine", "../../elsewhere", (), (), ""))
    with pytest.raises(ConfigError, match=r"campaign.json is damaged: a cell '../../elsewhere' cannot name a folder"):
        read_campaign(tmp_path)
    given = ("schedule=half_step",)
    planned = written(ListedCell("mine", "mine", given, (*given, "engine.slots=8"), ""))
    assert planned.settings_of({"mine": given}) == {"mine": (*given, "engine.slots=8")}
    for harm in ("task.reward=results.evil:score", "schedule=results.evil:Mine"):
        assert not written(ListedCell("mine", "mine", given, (*given, harm), "")).settings_of({"mine": given})


def one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


AFTERWARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: file.unlink(), "is missing; "),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\n"), "bytes, and had "),
    "one bit": (one_bit, "its SHA-256 is "),
    "a link": (lambda file: (shutil.move(file, file.parent / "x"), file.symlink_to("x")), "it is no file of its own"),
}


@pytest.mark.parametrize("how", AFTERWARDS)
@pytest.mark.parametrize("name", FILES[-2:])
def test_a_run_is_believed_only_as_it_was_when_it_was_done(results: Path, tmp_path: Path, name: str, how: str) -> None:
    copy = shutil.copytree(results, tmp_path / "results")
    file, (change, told) = copy.joinpath(*SYNC, name), AFTERWARDS[how]
    change(file)
    code, said = reported(copy)
    assert code == 2 and said.startswith(str(file)) and told in said and "\n" not in said, said
    if how != "one bit":  # who only asks whether it is done looks at names and sizes
        with pytest.raises(ConfigError, match=re.escape(told)):
            assert RunDirectory(copy, *SYNC[:2], 0).done


@pytest.mark.parametrize("done", ["", "2026-01-01T00:00:40+00:00\n"])
def test_what_an_earlier_version_made_is_read_with_a_warning(results: Path, tmp_path: Path, done: str) -> None:
    copy = shutil.copytree(results, tmp_path / "results")
    copy.joinpath(*SYNC, "DONE").write_text(done)
    assert reported(copy) == (0, "")
    page = (copy / "made_up" / "report.md").read_text()
    assert "- 1 of the 2 runs are of an earlier version, whose DONE does not say what their files were" in page


@pytest.mark.parametrize(
    "done", ["soon", "{}", '{"at": "2026-01-01T00:00:40Z", "files": {"../../x": {"bytes": 1, "sha256": ""}}}', "\x80"]
)
def test_a_done_that_no_version_wrote_is_named(results: Path, tmp_path: Path, done: str) -> None:
    copy = shutil.copytree(results, tmp_path / "results")
    file = copy.joinpath(*SYNC, "DONE")
    file.write_bytes(done.encode("latin-1"))
    code, said = reported(copy)
    assert code == 2 and said.startswith(f"{file} is damaged: ") and "\n" not in said, said
