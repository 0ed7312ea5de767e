"""Loggers of a run: all have what metrics.jsonl has, by the same names and steps, and none ends a run."""

import math
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.checks.plugins import check_loggers
from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.driver.loggers import LoggedRun, Logger, Loggers, TensorBoardLogger, WandbLogger
from harness.metrics.definitions import logged
from harness.metrics.manifest import identity_of
from harness.metrics.mlflow_mirror import iteration_metrics
from harness.metrics.run_files import load_config, load_manifest, load_metrics
from tests.support.fabricated_cells import Made, make_run

SAMPLE = {"time": 1e9, "system/cpu_utilization_percentage": 12.5}
FIFTH = {"iteration": 5, "reward/mean": 0.25, "queue/rows": 3.0, "policy/loss": math.nan}
Points = dict[tuple[str, int], float]


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    """A run of which four iterations were measured by an earlier attempt."""
    folder = make_run(tmp_path, "cell", Made("fully_async", iterations=4), 0)
    folder.write_summary({"throughput/samples_per_s": 7.5})
    manifest = load_manifest(folder.path)
    return LoggedRun(folder, tmp_path, identity_of(manifest), load_config(folder.path), manifest, print)


def points(run: LoggedRun) -> Points:
    """Of the files, and of a fifth iteration."""
    lines = [*load_metrics(run.folder.path), FIFTH]
    found = {(name, line["iteration"]): value for line in lines for name, value in logged(line).items()}
    return found | {("system/cpu_utilization_percentage", 0): 12.5, ("summary/throughput/samples_per_s", 0): 7.5}


def tell(logger: Logger) -> None:
    """Go on to the end."""
    logger.iteration(FIFTH)
    logger.system(SAMPLE)
    logger.finish()
    logger.ended(None)


def test_names_and_steps_are_those_of_metrics_jsonl_but_for_the_queues_which_are_system_metrics() -> None:
    line = {"iteration": 3, "reward/mean": 0.5, "queue/rows": 7, "policy/kl_ref": math.nan, "policy/loss": None}
    assert logged(line) == {"reward/mean": 0.5, "system/queue/rows": 7.0}
    assert {(metric.key, metric.value, metric.step) for metric in iteration_metrics(line, 0)} == {
        ("reward/mean", 0.5, 3),
        ("system/queue/rows", 7.0, 3),
    }


def events(folder: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboards_files_have_every_iteration_once_also_of_an_earlier_attempt(run: LoggedRun) -> None:
    TensorBoardLogger(run).ended(RuntimeError)
    tell(TensorBoardLogger(run))
    values = [(event.step, one) for event in events(run.folder.path / "tensorboard") for one in event.summary.value]
    found = [((one.tag, step), one.simple_value) for step, one in values if one.WhichOneof("value") == "simple_value"]
    assert len(dict(found)) == len(found)
    assert dict(found) == {at: float(np.float32(value)) for at, value in points(run).items()}
    assert "config/text_summary" in {one.tag for _, one in values}


class FakeWandb:
    """What is called of the package, of version 0.31."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.steps: dict[str, str] = {}
        self.lines: list[Mapping[str, float]] = []
        self.summary: dict[str, Any] = {}
        self.ended: list[int] = []
        self.module = SimpleNamespace(init=self.init, Settings=lambda **given: SimpleNamespace(**given))

    def init(self, **given: Any) -> "FakeWandb":
        self.given = given
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert name not in self.steps
        self.steps[name] = step_metric

    def log(self, line: Mapping[str, float]) -> None:
        self.lines.append(line)

    def finish(self, *, exit_code: int) -> None:
        self.ended.append(exit_code)


def test_weights_and_biases_has_the_same_names_offline(run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake.module)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tell(WandbLogger(run))
    told = [(name, value, line) for line in fake.lines for name, value in line.items() if name in fake.steps]
    found = {(name, line[fake.steps[name]]): value for name, value, line in told}
    summary = {(name, 0): value for name, value in fake.summary.items() if name.startswith("summary/")}
    assert found | summary == points(run)
    assert (fake.given["mode"], fake.given["dir"]) == ("offline", str(run.folder.path)) and fake.ended == [0]


class Failing(Logger):
    """A logger of the user's own."""

    def __init__(self, run: LoggedRun) -> None:
        self.heard = 0

    def iteration(self, metrics: Mapping[str, float]) -> None:
        self.heard += 1
        raise OSError("gone\nfor good")


def test_a_failing_logger_ends_no_run(
    run: LoggedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_folder: list[object] = []
    monkeypatch.setattr(run.folder, "append_system", of_folder.append)
    path = f"{__name__}:Failing"
    with Loggers((path, "tensorboard"), run) as loggers:
        loggers.iteration(FIFTH)
        loggers.iteration(FIFTH)
        loggers.finish()
    assert capsys.readouterr().out == f"loggers={path} failed: gone; the run goes on without it\n"
    assert of_folder and list((run.folder.path / "tensorboard").iterdir())


def test_loggers_are_a_list_and_one_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose_job(["loggers=mlflow,tensorboard"]).loggers == ("mlflow", "tensorboard")
    assert compose_job([]).loggers == ("mlflow",) and compose_job(["loggers="]).loggers == ()
    with pytest.raises(ConfigError, match="^loggers=nope is unknown; choose one of mlflow, tensorboard, wandb, or"):
        compose_job(["loggers=nope"])
    monkeypatch.setattr("harness.checks.plugins.find_spec", lambda name: None)
    check_loggers(["mlflow"])
    with pytest.raises(ConfigError, match="^loggers=wandb needs wandb, which is not here: pip install wandb, or leave"):
        check_loggers(["mlflow", "wandb"])
