"""The front of the commands: variables that a goal does not take are refused by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.cli.options import OPTIONS
from tests.support.project import ROOT

INTERNAL = {"STAMP", "PY", "PYTEST", "BENCH", "INSTALLED", "CUDA", "WHEELS"}
INTERNAL |= {"VENV", "VLLM", "SGLANG", "ORACLE", "PEER", "SITE"}  # environments
EVERYWHERE = {"ARGS", "PYTHON", "CURDIR"}


def make(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    own = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL")  # the tests may be run by make
    environment = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words", [("bench", "SCHEDUL=half_step"), ("bench", "schedule=half_step"), ("bench", "SCHEDULES=all", "SEEDS=1")]
)
def test_a_variable_that_the_goal_does_not_take_is_named_and_nothing_runs(words: tuple[str, ...]) -> None:
    done = make("-n", *words)
    unknown = words[1].partition("=")[0]
    assert done.returncode == 2 and "harness" not in done.stdout
    assert re.search(rf"make bench does not take .*\b{unknown}=.*; it takes SCHEDULE= .*ARGS=", done.stderr)


def test_force_and_dry_with_0_are_as_without() -> None:
    assert make("-n", "bench", "FORCE=0", "DRY=false").stdout == make("-n", "bench").stdout
    assert "force=true" in make("-n", "bench", "FORCE=1").stdout
    assert "dry=true" in make("-n", "compare", "DRY=1").stdout


def test_goals_take_every_variable_that_their_recipes_read() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    settings = re.search(r"^SETTINGS = (.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    job = re.search(r"^JOB := (.*)$", text, re.MULTILINE)
    assert settings is not None and job is not None
    assert set(re.findall(r"\(if \$\((\w+)\)", settings[1])) == set(job[1].split())
    takes = {goal: set(names.split()) for goal, names in re.findall(r"^TAKES\.(\S+) := (.*)$", text, re.MULTILINE)}
    for goals, recipe in re.findall(r"^([a-z][\w -]*):[^\n=]*\n((?:\t.*\n)+)", text, re.MULTILINE):
        read = set(re.findall(r"\$\(([A-Z]+)\)", recipe)) - INTERNAL - EVERYWHERE
        for goal in goals.split():
            taken = takes.get(goal, set())
            assert {"$(JOB)" if name == "SETTINGS" else name for name in read} <= taken, goal


def test_commands_take_as_options_what_their_goals_take_as_variables() -> None:
    named = {"dry-run": "DRY"}
    for command, options in OPTIONS.items():
        (taken,) = re.findall(r"; it takes (.*)$", make("-n", command, "NOT_TAKEN=1").stderr, re.MULTILINE)
        flags = {named.get(option.flag, option.flag.upper()) for option in options}
        variables = {name.rstrip("=") for name in re.findall(r"[A-Z]+=", taken)} - EVERYWHERE
        if "SCHEDULES" in flags:
            variables -= {"SCHEDULE"}  # taken to be refused with a line of its own
        assert variables == flags, command


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
