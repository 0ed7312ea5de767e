"""The run's folder, its metrics lines, its lock, its manifest."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from harness.cli import bench
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.config.inputs import inputs_of
from harness.metrics import manifest as manifest_module
from harness.metrics.atomic_files import Lock, replacing, write_text
from harness.metrics.definitions import METRIC_NAMES, check_names, iteration_metrics, throughput_metrics
from harness.metrics.ledger import Ledger, LedgerError
from harness.metrics.manifest import RunIdentity, build_manifest, git_state, identity_of
from harness.metrics.run_files import RunDirectory, load_ledger, load_metrics, refuse_changed_inputs, run_directory
from harness.service.metrics import run_text
from tests.support.fake_nvml import FakeGpu, install
from tests.support.played_runs import MANIFEST


def run_in(root: Path, seed: int = 0) -> RunDirectory:
    return RunDirectory(root, "bench", "fully_async,eta=0.5", seed)


def test_the_folder_is_experiment_cell_seed_and_the_config_comes_back_from_it(tmp_path: Path) -> None:
    assert run_in(tmp_path, 3).path == tmp_path / "bench" / "fully_async,eta=0.5" / "seed=3"
    config: dict[str, Any] = {"schedule": {"name": "half_step", "eta": 0.5}, "sizes": [1, 2], "checkpoint": None}
    with run_in(tmp_path) as run:
        run.write_config(config)
    assert OmegaConf.to_container(OmegaConf.load(run.path / "config.yaml")) == config


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden"])
def test_a_name_that_would_leave_the_layout_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder"):
        RunDirectory(tmp_path, "bench", name, 0)


def test_starting_again_wipes_the_seed_folder_and_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    with run_in(tmp_path, 1) as other:
        other.append_metrics(iteration_metrics(1, 8, 1.0))
    run = run_in(tmp_path)
    (run.path / "plots").mkdir(parents=True)
    (run.path / "plots" / "old.png").write_text("old")
    (run.path / ".trace.json.123.tmp").write_text("half")
    (run.path / "link").symlink_to(outside)
    (run.path / "DONE").write_text("")
    run.start()
    run.close()
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "metrics.jsonl", "system.jsonl"]
    assert (outside / "kept").exists()
    assert len(load_metrics(other.path)) == 1


def test_a_run_is_done_only_after_finish(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.start()
    assert not run.done
    run.close()
    assert not run.done
    run.start()
    run.finish()
    assert run.done


def test_the_same_cell_and_seed_cannot_run_twice_at_once(tmp_path: Path) -> None:
    with run_in(tmp_path) as first:
        first.append_metrics(iteration_metrics(1, 8, 1.0))
        with pytest.raises(BlockingIOError, match="is being run by another process"):
            run_in(tmp_path).start()
        assert len(load_metrics(first.path)) == 1  # the refused start wiped nothing
        with run_in(tmp_path, seed=1):
            pass
    with run_in(tmp_path):
        pass


def test_a_lock_goes_with_its_process_and_who_waits_long_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"from pathlib import Path; from harness.metrics.atomic_files import Lock; import os; \
lock = Lock(Path({str(path)!r})); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    Lock(path).release()
    held = Lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError, match="lock: another process is at it"):
        Lock(tmp_path / "lock", within_s=0.01, busy="another process is at it")
    held.release()


def test_metrics_are_on_disk_after_every_iteration_also_where_not_finite(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        for iteration in (1, 2):
            run.append_metrics(iteration_metrics(iteration, 8 * iteration, 0.5, {"reward/mean": 0.25}))
            assert load_metrics(run.path)[-1]["iteration"] == iteration
    assert load_metrics(run.path)[0] == {"iteration": 1, "samples": 8, "seconds": 0.5, "reward/mean": 0.25}
    with run_in(tmp_path) as run:
        run.append_metrics(iteration_metrics(1, 8, 1.0, {"policy/kl_ref": math.nan, "policy/ratio_max": math.inf}))
    line = (run.path / "metrics.jsonl").read_text()
    assert "NaN" not in line and json.loads(line)["policy/ratio_max"] is None
    assert math.isnan(load_metrics(run.path)[0]["policy/kl_ref"])


def test_a_metric_has_a_known_name_its_axes_and_one_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown metric reward/median"):
        iteration_metrics(1, 8, 1.0, {"reward/median": 1.0})
    with run_in(tmp_path) as run, pytest.raises(ValueError, match="unknown metric lag"):
        run.append_metrics({"iteration": 1, "samples": 8, "seconds": 1.0, "lag": 2})
    assert load_metrics(run.path) == []
    with run_in(tmp_path) as run, pytest.raises(ValueError, match="need samples, seconds"):
        run.append_metrics({"iteration": 1})
    with pytest.raises(ValueError, match="iteration 3: reward/mean given by two parts"):
        iteration_metrics(3, 8, 1.0, {"reward/mean": 1.0}, {"reward/mean": 0.0})
    check_names(["idle/actor_fwd", "idle/rollout", "custom/copied", "custom/style/caps.1", *METRIC_NAMES])
    for name in ("idle/", "idle/a/b", "idle", "time/rollout_s", "custom/", "custom/Caps"):
        with pytest.raises(ValueError, match="unknown metric"):
            check_names([name])


def test_a_last_line_that_was_cut_off_is_left_out_and_a_broken_one_is_not(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        run.append_metrics(iteration_metrics(1, 8, 1.0))
    path = run.path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"iteration": 2, "sam')
    assert len(load_metrics(run.path)) == 1
    path.write_text(whole + '{"iteration": 2, "sam\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged: Unterminated string"):
        load_metrics(run.path)


def test_throughput_is_per_second_and_per_device() -> None:
    assert throughput_metrics(samples=10, tokens=100, seconds=2.0, devices=5) == {
        "throughput/samples_per_s": 5.0,
        "throughput/tokens_per_s": 50.0,
        "throughput/tokens_per_s_per_device": 10.0,
    }
    with pytest.raises(ValueError, match="no throughput over 0.0 s"):
        throughput_metrics(10, 100, 0.0, 5)


def test_a_ledger_that_does_not_close_is_not_written(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.admit([1, 2])
    with run_in(tmp_path) as run:
        run.write_ledger(ledger)
        assert load_ledger(run.path)["in_flight_ids"] == [1, 2]
        ledger._in_flight.clear()
        with pytest.raises(LedgerError):
            run.write_ledger(ledger)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as temporary:
        temporary.write_text("ne")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def identity() -> RunIdentity:
    return RunIdentity("bench", "cell", 3, "fully_async", "tiny", "torch", "real")


def test_the_manifest_says_what_made_the_run_and_null_of_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads(json.dumps(build_manifest(identity(), {"run": 3})))
    assert identity_of(manifest) == identity()
    assert manifest["seeds"] == {"run": 3}
    assert manifest["packages"]["numpy"] and "torch" in manifest["packages"]
    assert 1 <= manifest["hardware"]["cores"] <= (os.cpu_count() or 1)
    assert manifest["hardware"]["memory_bytes"] > 2**20
    assert manifest["started_at"].endswith("+00:00")
    monkeypatch.setattr(manifest_module, "PACKAGES", ("numpy", "no-such-package-here"))
    packages = build_manifest(identity(), {})["packages"]
    assert packages["numpy"] is not None and packages["no-such-package-here"] is None


def test_the_commit_is_that_of_the_repository_that_tracks_the_source(tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text("x = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    assert git_state(source) is None  # no repository
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_state(source) is None  # not tracked by it
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "--no-verify", "-m", "first"], check=True)
    clean = git_state(source)
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "records.md").write_text("")
    assert git_state(source) == clean, "what runs leave is no code"
    (tmp_path / "new_schedule.py").write_text("")
    assert git_state(source) == {"commit": clean["commit"], "dirty": True}


def test_gpus_are_those_that_the_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu("GPU-a"), FakeGpu("GPU-b", name="NVIDIA H200", mib=143771), visible="1")
    assert manifest_module.hardware()["gpus"] == ["NVIDIA H200, 143771 MiB"]


ROLES = [
    {"name": "rollout[0]", "state": "computes", "heard_s_ago": 0.5, "version": 3},
    {"name": "actor[0]", "state": "ended: killed by signal 9", "heard_s_ago": None, "version": None},
]


def test_a_run_is_its_newest_iteration_and_what_is_known_of_each_role() -> None:
    health = {"seconds": 12.5, "version": 4, "roles": ROLES}
    text = run_text(health, {"throughput/samples_per_s": 900.0, "train/grad_norm": float("nan")}).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert str(found.pop(("cadence_metric", "train/grad_norm"))) == "nan"
    assert found == {
        ("cadence_run_seconds",): 12.5,
        ("cadence_version", "trainer"): 4,
        ("cadence_version", "rollout[0]"): 3,
        ("cadence_role_up", "rollout[0]"): 1,
        ("cadence_role_up", "actor[0]"): 0,
        ("cadence_role_heard_seconds_ago", "rollout[0]"): 0.5,
        ("cadence_metric", "throughput/samples_per_s"): 900.0,
    }


def finished(config: JobConfig, results: Path, manifest: dict[str, object]) -> Path:
    folder = run_directory(config, 0, results).path
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | {"seed": 0} | manifest))
    (folder / "DONE").touch()
    return folder


def test_a_finished_run_of_other_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "ab", "answer": "a"}\n{"prompt": "b", "answer": "b"}\n')
    job = ["task=data", f"task.data={data}", "backend=real"]
    config = compose_job(job)
    before = inputs_of(config)
    folder = finished(config, tmp_path, {"inputs": [dataclasses.asdict(one) for one in before]})
    refuse_changed_inputs(config, [folder])
    data.write_text('{"prompt": "ab", "answer": "b"}\n{"prompt": "b", "answer": "b"}\n')
    with pytest.raises(ConfigError) as error:
        bench.run(job, tmp_path, Console(quiet=True))
    then, now = before[0].digest[:12], inputs_of(config)[0].digest[:12]
    assert str(error.value) == (
        f"task.data={data} has changed since {folder} was made: {then} then, {now} now; run it again with force=true, "
        "or keep both with experiment=another_name"
    )


def test_what_an_earlier_version_made_and_what_is_not_finished_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "ab", "answer": "a"}\n')
    config = compose_job(["task=data", f"task.data={data}", "backend=real"])
    folder = finished(config, tmp_path, {})
    refuse_changed_inputs(config, [folder])
    (folder / "manifest.json").write_text(
        json.dumps(MANIFEST | {"seed": 0, "inputs": [{"setting": "task.data", "path": "", "digest": "other"}]})
    )
    (folder / "DONE").unlink()
    refuse_changed_inputs(config, [folder])
