"""What is asked of a run that is to be replayed, and of the job, before anything starts."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.checks.earlier_run import check_replay
from harness.config import ConfigError
from harness.config.compose import cell_name, compose_job, make_schedule, plain

JOB = ("backend=real", "schedule=fully_async", "iterations=8", "seeds=[3]", "cluster.devices=2")


def made(cell: Path, *settings: str, **manifest: str) -> Path:
    """A finished run of seed 3, as far as is read of it; its folder."""
    folder = cell / "seed=3"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(compose_job([*JOB, *settings])))))
    (folder / "manifest.json").write_text(json.dumps({"backend": "real"} | manifest))
    (folder / "DONE").touch()
    return folder


def check(cell: Path, *settings: str, gpu: bool = False) -> None:
    config = compose_job([*JOB, f"replay='{cell}'", *settings])
    check_replay(config, make_schedule(config), "real", gpu)


def refused(cell: Path, *settings: str, gpu: bool = False) -> str:
    with pytest.raises(ConfigError) as told:
        check(cell, *settings, gpu=gpu)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_limits_of_time_and_the_experiment_may_differ_and_a_replay_has_a_cell_of_its_own(tmp_path: Path) -> None:
    made(tmp_path, "checkpoint.every=2")
    check(tmp_path, "cluster.wait_timeout_s=7", "experiment=again")
    assert cell_name(compose_job([*JOB, f"replay='{tmp_path}'"])) != cell_name(compose_job(JOB))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.group_size=2", "has algorithm.group_size=8, and this job algorithm.group_size=2"),
        ("schedule.max_staleness=1", "and this job schedule.max_staleness=1"),
        ("schedule.split.rollout=1", "and this job schedule.split.rollout=1"),
        ("schedule=one_step_off", "order of arrival decides nothing"),
        ("schedule=colocate_sync", "order of arrival decides nothing"),
        ("engine=vllm", "depends on which samples are beside; replay runs of engine=torch"),
        ("engine.keep_cache=true", "keys and values of older weights are not recorded"),
        ("algorithm=ppo", "which version of the critic a value is of is not recorded"),
        ("algorithm.correction=decoupled", "learn from what actor_fwd computes"),
        ("algorithm.advantage=remax", "by which versions greedy responses were sampled"),
        ("algorithm.filter=zero_variance", "in which order groups were refused"),
        ("task.on_failed_score=redeal", "in which order groups were refused"),
        ("eval.every=2", "set it to 0"),
        ("checkpoint.every=2", "set it to 0"),
        ("task=lookup", "samples of several turns are not replayed"),
        ("cluster.on_lost_engine=go_on", "set it to end"),
    ],
)
def test_what_cannot_be_replayed_is_named(tmp_path: Path, setting: str, said: str) -> None:
    made(tmp_path)
    assert said in refused(tmp_path, setting)


def test_what_is_no_record_of_this_job_is_named_with_the_fix(tmp_path: Path) -> None:
    made(tmp_path)
    assert "in which micro-batches the reference scored" in refused(
        tmp_path, "schedule.order=completion", "algorithm.kl_coef=0.1"
    )
    assert "on GPUs" in refused(tmp_path, gpu=True)
    other = tmp_path / "other"
    other.mkdir()
    assert "has no finished run of seed 3; name the folder of a cell" in refused(other)
    folder = made(other)
    assert f"it is the folder of one seed: name {other}" in refused(folder)
    (folder / "DONE").unlink()
    assert "has no finished run of seed 3" in refused(other)
    made(tmp_path / "a", backend="virtual")
    assert "is of a run with backend=virtual" in refused(tmp_path / "a")
    made(tmp_path / "b", begun_with="there")
    assert "began with a checkpoint of other devices" in refused(tmp_path / "b")
