"""`cadence.run` and `cadence.load`: from a notebook cell, from a script, and the tables that they give."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.pyplot import close

import cadence
from cadence.api import Results, _written
from harness.config import ConfigError
from harness.metrics.samples import FATES
from tests.support.project import ROOT, python

SETTINGS: dict[str, Any] = {
    "schedule": "fully_async",
    "schedule.max_staleness": 1,
    "schedule.split": {"rollout": 1, "actor": "rest", "reference": "actor", "actor_fwd": "actor"},
    "backend": "virtual",
    "iterations": 3,
    "warmup_iterations": 1,
    "seeds": 2,
    "smoke": True,
    "loggers": [],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """As in a notebook: while an event loop is running in this thread."""

    async def cell() -> Results:
        return cadence.run("engine.slots=32", results=tmp_path_factory.mktemp("results"), **SETTINGS)

    return asyncio.run(cell())


def test_a_cell_gets_a_row_for_each_iteration_sample_and_run(made: Results) -> None:
    metrics, samples, ledger = made.metrics, made.samples, made.ledger
    assert list(zip(metrics.seed, metrics.iteration, strict=True)) == [(s, i) for s in (0, 1) for i in range(3)]
    assert metrics["throughput/samples_per_s"].gt(0).all() and set(metrics.schedule) == {"fully_async"}
    assert samples.groupby("seed").size().to_list() == ledger.admitted.to_list()
    assert samples[samples.fate == "trained"].lag_worst.max() <= 1
    assert (ledger.admitted == ledger[list(FATES)].sum(axis=1)).all()
    timed = metrics[metrics.seed == 0]
    steady = (timed.samples.iloc[-1] - timed.samples.iloc[0]) / (timed.seconds.iloc[-1] - timed.seconds.iloc[0])
    assert made.summary["throughput/samples_per_s"][0] == pytest.approx(steady), "one iteration of warm-up"
    for table in (metrics, made.summary, samples, ledger):
        assert list(table.columns[:4]) == ["experiment", "cell", "schedule", "seed"]


def test_runs_are_listed_with_their_settings_and_smoke_runs_not_compared(made: Results) -> None:
    assert made.runs["schedule.max_staleness"].to_list() == [1, 1] and made.runs.backend.to_list() == ["virtual"] * 2
    assert made.runs.path.to_list() == list(made.paths)
    with pytest.raises(ValueError, match="2 runs"):
        _ = made.path
    with pytest.raises(ConfigError, match="is a smoke run"):
        _ = made.comparison
    first = made.paths[0]
    assert cadence.load(first).path == first and len(cadence.load(str(first)).metrics) == 3
    for folder in (first.parent, first.parents[1], first.parents[2]):
        assert cadence.load(folder).paths == made.paths
    with pytest.raises(FileNotFoundError, match="holds no finished run"):
        cadence.load(first.parent / "seed=7")


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_and_leaves_what_is_done(made: Results, tmp_path: Path) -> None:
    results = made.paths[0].parents[2]
    script = tmp_path / "script.py"
    call = f"cadence.run('engine.slots=32', results={str(results)!r}, **{SETTINGS!r})"
    script.write_text(f"import cadence\nfound = {call}\nprint(*found.paths, sep='\\n')\n")
    done = python(script, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed 1 is done already" in done.stdout
    assert done.stdout.splitlines()[-2:] == [str(path) for path in made.paths]


def test_a_dry_run_has_no_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a dry run has no results"):
        cadence.run("--dry-run", results=tmp_path, quiet=True, **SETTINGS)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [(2, ConfigError, r"^schedule=nope is unknown$"), (1, RuntimeError, r"bench schedule=nope ended .* code 1:\n.*no")],
)
def test_what_fails_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], message: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho schedule=nope is unknown >&2\nexit {code}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(error, match=message):
        cadence.run(schedule="nope", quiet=True)


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("force", True, "true"),
        ("max_tokens", None, "null"),
        ("seeds", [0, 2], "[0,2]"),
        ("schedule", "my_lab.schedules:Mine", "my_lab.schedules:Mine"),
        ("cost", Path("my costs.yaml"), "my costs.yaml"),
        ("task.path", "it's a file.jsonl", r"'it\'s a file.jsonl'"),
        ("schedule.split", {"rollout": "50%", "actor": "rest"}, "{rollout:50%,actor:rest}"),
        ("algorithm.learning_rate", 1e-5, "1e-05"),
    ],
)
def test_values_are_written_as_on_the_command_line(name: str, value: object, written: str) -> None:
    assert _written(name, value) == written


@pytest.mark.slow
def test_the_notebook_runs_and_draws_what_it_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CADENCE_RESULTS", raising=False)
    matplotlib.use("agg")
    names: dict[str, Any] = {}
    cells = json.loads((ROOT / "examples/notebook/schedules.ipynb").read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        assert cell["source"] and (cell["cell_type"] != "code" or not cell["outputs"]), "as it is before it is run"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    close("all")
    compared = names["found"].comparison
    speed = compared[compared.measure == "throughput/samples_per_s"].set_index("label")
    assert list(speed.index) == ["colocate_sync", "fully_async"] and speed.against["fully_async"] > 1
    assert len(names["speed"]) == 6 and set(names["trained"].schedule) == set(speed.index)
