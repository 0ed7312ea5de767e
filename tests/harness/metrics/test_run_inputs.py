"""Finished runs whose files have changed since are not taken for done."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from harness.cli import bench
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.config.inputs import inputs_of
from harness.metrics.run_files import refuse_changed_inputs, run_directory
from tests.support.played_runs import MANIFEST


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
