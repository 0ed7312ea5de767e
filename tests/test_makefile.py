"""The front of the commands: what make passes on, in which environment, and that what is misspelt is refused."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.commands import COMMANDS, as_options
from harness.cli.front import settings_of
from tests.support.project import PAGES, ROOT

TEXT = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
OWN = set(re.findall(r"^OWN := (.*)$", TEXT, re.MULTILINE)[0].split())
"""Goals that are no commands."""


def make(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    own = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS")  # the tests may be run by make
    environment = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with everything of ours, whose environment is the one that runs the tests."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("Makefile", "harness", "engines", "schedules", "cadence", "experiments", "pyproject.toml", ".ci"):
        (folder / name).symlink_to(ROOT / name)
    environment = folder / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (environment / "bin" / "python").chmod(0o755)
    for kind in ("", "-cuda"):
        (environment / f".installed{kind}").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bench", "SCHEDUL=half_step"), "bench does not take SCHEDUL=; it takes SCHEDULE= .*and settings"),
        (("bench", "SCHEDULES=all", "SEEDS=1"), "bench does not take SCHEDULES=; it takes SCHEDULE= .*JSON=1 and set"),
        (("compare", "SCHEDULE=half_step"), "compare does not take SCHEDULE=; it takes SCHEDULES= "),
        (("bench", "schedul=half_step"), "schedul is no setting; those of a job are .*schedule, "),
        (("bnech", "SEEDS=1"), "bnech is no command; use cadence"),
        (("test", "SEEDS=1"), "make test does not take SEEDS=; it takes ARGS="),
        (("test-engine", "SCHEDULE=a:b"), "make test-engine does not take SCHEDULE=; it takes ENGINE= ARGS="),
    ],
)
def test_a_word_that_is_misspelt_is_named_and_nothing_runs(words: tuple[str, ...], told: str, installed: Path) -> None:
    done = make(*words, folder=installed)
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(told, done.stderr), done.stderr
    assert not (installed / "results").exists()


def test_what_is_misspelt_is_refused_before_anything_is_installed(installed: Path) -> None:
    shutil.rmtree(installed / ".venv")
    done = make("bench", "SCHEDUL=half_step", f"PYTHON={shlex.quote(sys.executable)}", folder=installed)
    assert done.returncode == 2 and "bench does not take SCHEDUL=" in done.stderr
    assert not (installed / ".venv").exists()


def test_variables_and_settings_reach_the_command_as_they_were_typed(installed: Path) -> None:
    words = ["DRY=1", "MODEL=it's my model", "schedule.max_staleness=2"]
    free = """'task.data=a "b".jsonl' iterations=3"""
    ran = shlex.split(make("-n", "bench", *words, f"ARGS={free}", folder=installed).stdout)
    assert ran[:5] == ["CADENCE_CALLED_BY_MAKE=1", ".venv/bin/python", "-m", "harness", "bench"]
    assert sorted(ran[5:-2]) == sorted(words) and ran[-2:] == ['task.data=a "b".jsonl', "iterations=3"]
    done = make("bench", "DRY=1", "SEEDS=2", "ARGS=iterations=3 backend=virtual cost=tiny_cpu", folder=installed)
    assert done.stdout.count("would be run") == 2 and "\niterations: 3\n" in done.stdout, done.stderr


def test_variables_are_options_and_a_switch_with_0_is_off() -> None:
    given = ["SEEDS=3", "DEVICES=", "FORCE=0", "DRY=1", "schedule.k=2"]
    assert settings_of("bench", given) == ["seeds=3", "dry=true", "schedule.k=2"]
    assert settings_of("gate-gpu", ["FORCE=yes"]) == ["force=true"]
    assert settings_of("calibrate", ["RUN=a b", "NAME=mine"]) == ["run=a", "run=b", "name=mine"]
    assert settings_of("diff", ["BEFORE=a", "AFTER=b c"]) == ["before=a", "after=b c"]


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (("bench",), ".venv/"),
        (("bench", "ENGINE=vllm"), ".venv-vllm/"),
        (("compare", "ENGINE=sglang"), ".venv-sglang/"),
        (("plan", "ENGINE=vllm"), ".venv/"),
        (("test-engine", "ENGINE=vllm"), ".venv-vllm/"),
    ],
)
def test_a_run_has_the_environment_of_its_engine(words: tuple[str, ...], needs: str) -> None:
    done = make("-n", "-B", *words).stdout
    assert set(re.findall(r"touch (\.venv[\w-]*/)", done)) == {needs} | ({".venv/"} if "sglang" in needs else set())
    runs_in = ".venv/" if "sglang" in needs else needs
    assert f"{runs_in}bin/python -m {'pytest' if words[0] == 'test-engine' else 'harness'} " in done


def test_help_names_every_goal_and_needs_no_environment(installed: Path) -> None:
    shutil.rmtree(installed / ".venv")
    told = make(f"PYTHON={shlex.quote(sys.executable)} -S", folder=installed).stdout  # nothing but Python's own modules
    goals = {*COMMANDS, *OWN} - {"help", "lint", "tests"}
    assert {goal for goal in goals if not re.search(rf"(?<![\w-]){goal}(?![\w-])", told)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_goals_and_variables_that_a_page_types_are_taken(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    typed = re.findall(r"(?:^    (?:[A-Z_]+=\S+ )*|`)make ([a-z][\w-]*)((?: [A-Z]+=[^\s`]*)*)", text, re.MULTILINE)
    for goal, variables in typed:
        if goal in COMMANDS:
            as_options(goal, [word for word in variables.split() if not word.startswith(("ARGS=", "WHEELS="))])
        else:
            assert goal in OWN, goal


def test_a_python_that_is_not_supported_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python3.13"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.13.1\nexit 1\n')
    python.chmod(0o755)
    done = make("bench", f"PYTHON={python}", folder=tmp_path)
    assert done.returncode == 2 and "is Python 3.13.1, and Cadence needs Python 3.11 or 3.12" in done.stdout
    assert not (tmp_path / ".venv").exists()
