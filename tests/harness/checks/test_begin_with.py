"""What is asked of the run that a job begins with, before anything starts."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.checks.earlier_run import check_begin_with
from harness.config import Backend, ConfigError
from harness.config.compose import compose_job, plain, plugins_of
from harness.config.inputs import inputs_of

JOB = ("backend=virtual", "cost=tiny_cpu", "schedule=one_step_off", "iterations=8", "seeds=[3]")


def made(cell: Path, *settings: str) -> Path:
    """A run of seed 3 with a checkpoint, as far as is read of it; its folder."""
    folder = cell / "seed=3"
    (folder / "checkpoints" / "version-000002").mkdir(parents=True)
    config = plain(compose_job([*JOB, "cluster.devices=2", *settings]))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    (folder / "manifest.json").write_text(json.dumps({"backend": "virtual"}))
    return folder


def check(cell: Path, *settings: str, backend: Backend = "virtual") -> None:
    config = compose_job([*JOB, "cluster.devices=4", f"checkpoint.begin_with='{cell}'", *settings])
    check_begin_with(config, backend)


def refused(cell: Path, *settings: str, backend: Backend = "virtual") -> str:
    with pytest.raises(ConfigError) as told:
        check(cell, *settings, backend=backend)
    return str(told.value)


def test_devices_and_what_lies_on_them_may_differ(tmp_path: Path) -> None:
    made(tmp_path)
    check(tmp_path, "schedule.split.rollout=75%", "engine.slots=3", "checkpoint.every=2")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.group_size=2", "has algorithm.group_size=8, and this job algorithm.group_size=2"),
        ("iterations=9", "has iterations=8, and this job iterations=9"),
        ("schedule=separated_sync", "has schedule.name=one_step_off, and this job schedule.name=separated_sync"),
        ("model.layers=7", "and this job model.layers=7"),
        ("algorithm.name=ppo", "has algorithm.name=grpo, and this job algorithm.name=ppo"),
    ],
)
def test_what_has_to_agree_and_does_not_is_named(tmp_path: Path, setting: str, said: str) -> None:
    made(tmp_path)
    assert said in refused(tmp_path, setting)


def test_a_run_that_cannot_be_begun_with_is_named_with_the_fix(tmp_path: Path) -> None:
    assert "has no run of seed 3 that made checkpoints; name the folder of a cell" in refused(tmp_path)
    folder = made(tmp_path)
    assert f"it is the folder of one seed: name {tmp_path}" in refused(folder)
    assert "has no run of seed 4" in refused(tmp_path, "seeds=[3,4]")
    (folder / "checkpoints" / "version-000002").rmdir()
    assert "seed 3 has no checkpoint" in refused(tmp_path)
    (folder / "DONE").touch()
    assert "seed 3 is done there" in refused(tmp_path)


def test_a_simulation_is_not_gone_on_with_for_real(tmp_path: Path) -> None:
    (made(tmp_path) / "manifest.json").write_text(json.dumps({"backend": "real"}))
    assert "is of a run with backend=real, and this one has backend=virtual" in refused(tmp_path)


def test_files_and_code_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "ab", "answer": "a"}\n')
    settings = ("task=data", f"task.data={data}", "algorithm.filter=tests.support.filters:even", "backend=real")
    folder, config = made(tmp_path / "cell", *settings), compose_job([*JOB, *settings])
    plugins = [asdict(own) for own in plugins_of(config)]
    manifest = {"backend": "real", "inputs": [asdict(one) for one in inputs_of(config)], "plugins": plugins}

    def told() -> str:
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return refused(tmp_path / "cell", *settings, backend="real")

    plugins[0]["sha256"] = "another"
    assert f"filters:even has changed since {folder} was begun: another then" in told()
    data.write_text('{"prompt": "ab", "answer": "b"}\n')
    assert f"task.data={data} has changed since" in told()
    manifest["inputs"] = 3
    assert "manifest.json is damaged" in told()
