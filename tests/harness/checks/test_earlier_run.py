"""What is asked of an earlier run, which a job begins with or replays, before anything starts."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.checks.earlier_run import check_begin_with, check_replay
from harness.config import Backend, ConfigError
from harness.config.compose import cell_name, compose_job, make_schedule, plain, plugins_of
from harness.config.inputs import inputs_of

BEGUN = ("backend=virtual", "cost=tiny_cpu", "schedule=one_step_off", "iterations=8", "seeds=[3]")
PLAYED = ("backend=real", "schedule=fully_async", "iterations=8", "seeds=[3]", "cluster.devices=2")


def made(cell: Path, *settings: str, **manifest: str) -> Path:
    """A run of seed 3, as far as is read of it; its folder."""
    folder = cell / "seed=3"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(compose_job(settings)))))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


# -- that a job begins with


def begun(cell: Path, *settings: str) -> Path:
    """With a checkpoint."""
    folder = made(cell, *BEGUN, "cluster.devices=2", *settings, backend="virtual")
    (folder / "checkpoints" / "version-000002").mkdir(parents=True)
    return folder


def begin(cell: Path, *settings: str, backend: Backend = "virtual") -> None:
    config = compose_job([*BEGUN, "cluster.devices=4", f"checkpoint.begin_with='{cell}'", *settings])
    check_begin_with(config, backend)


def refused(cell: Path, *settings: str, backend: Backend = "virtual") -> str:
    with pytest.raises(ConfigError) as told:
        begin(cell, *settings, backend=backend)
    return str(told.value)


def test_devices_and_what_lies_on_them_may_differ(tmp_path: Path) -> None:
    begun(tmp_path)
    begin(tmp_path, "schedule.split.rollout=75%", "engine.slots=3", "checkpoint.every=2")


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
    begun(tmp_path)
    assert said in refused(tmp_path, setting)


def test_a_run_that_cannot_be_begun_with_is_named_with_the_fix(tmp_path: Path) -> None:
    assert "has no run of seed 3 that made checkpoints; name the folder of a cell" in refused(tmp_path)
    folder = begun(tmp_path)
    assert f"it is the folder of one seed: name {tmp_path}" in refused(folder)
    assert "has no run of seed 4" in refused(tmp_path, "seeds=[3,4]")
    (folder / "checkpoints" / "version-000002").rmdir()
    assert "seed 3 has no checkpoint" in refused(tmp_path)
    (folder / "DONE").touch()
    assert "seed 3 is done there" in refused(tmp_path)


def test_a_simulation_is_not_gone_on_with_for_real(tmp_path: Path) -> None:
    (begun(tmp_path) / "manifest.json").write_text(json.dumps({"backend": "real"}))
    assert "is of a run with backend=real, and this one has backend=virtual" in refused(tmp_path)


def test_files_and_code_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "ab", "answer": "a"}\n')
    settings = ("task=data", f"task.data={data}", "algorithm.filter=tests.support.filters:even", "backend=real")
    folder, config = begun(tmp_path / "cell", *settings), compose_job([*BEGUN, *settings])
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


# -- that is replayed


def played(cell: Path, *settings: str, **manifest: str) -> Path:
    """One that finished."""
    folder = made(cell, *PLAYED, *settings, **({"backend": "real"} | manifest))
    (folder / "DONE").touch()
    return folder


def play(cell: Path, *settings: str, gpu: bool = False) -> None:
    config = compose_job([*PLAYED, f"replay='{cell}'", *settings])
    check_replay(config, make_schedule(config), "real", gpu)


def not_replayed(cell: Path, *settings: str, gpu: bool = False) -> str:
    with pytest.raises(ConfigError) as told:
        play(cell, *settings, gpu=gpu)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_limits_of_time_and_the_experiment_may_differ_and_a_replay_has_a_cell_of_its_own(tmp_path: Path) -> None:
    played(tmp_path, "checkpoint.every=2")
    play(tmp_path, "cluster.wait_timeout_s=7", "experiment=again")
    assert cell_name(compose_job([*PLAYED, f"replay='{tmp_path}'"])) != cell_name(compose_job(PLAYED))


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
    played(tmp_path)
    assert said in not_replayed(tmp_path, setting)


def test_what_is_no_record_of_this_job_is_named_with_the_fix(tmp_path: Path) -> None:
    played(tmp_path)
    scored = ("schedule.order=completion", "algorithm.kl_coef=0.1")
    assert "in which micro-batches the reference scored" in not_replayed(tmp_path, *scored)
    assert "on GPUs" in not_replayed(tmp_path, gpu=True)
    other = tmp_path / "other"
    other.mkdir()
    assert "has no finished run of seed 3; name the folder of a cell" in not_replayed(other)
    folder = played(other)
    assert f"it is the folder of one seed: name {other}" in not_replayed(folder)
    (folder / "DONE").unlink()
    assert "has no finished run of seed 3" in not_replayed(other)
    played(tmp_path / "a", backend="virtual")
    assert "is of a run with backend=virtual" in not_replayed(tmp_path / "a")
    played(tmp_path / "b", begun_with="there")
    assert "began with a checkpoint of other devices" in not_replayed(tmp_path / "b")
