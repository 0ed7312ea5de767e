"""What a job reads, by content: files that change under a name are seen."""

import os
import shutil
from pathlib import Path

import pytest

from harness.config import inputs
from harness.config.compose import cell_name, compose_job
from harness.config.inputs import inputs_of
from tests.support.random_models import random_folder


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Settings of one that reads a model's folder and two files."""
    random_folder(tmp_path / "model", "llama")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a", "answer": "a"}\n')
    data = [f"task.data={tmp_path / 'train.jsonl'}", f"task.held_out_data={tmp_path / 'test.jsonl'}"]
    return [f"model={tmp_path / 'model'}", "task=data", *data]


def digests(job: list[str]) -> dict[str, str]:
    return {one.setting: one.digest for one in inputs_of(compose_job([*job, "backend=real"]))}


def changed(job: list[str], before: dict[str, str]) -> list[str]:
    return [setting for setting, digest in digests(job).items() if digest != before[setting]]


def test_a_change_of_content_is_seen_and_a_copy_is_none(job: list[str], tmp_path: Path) -> None:
    before, name = digests(job), cell_name(compose_job(job))
    assert list(before) == ["model.checkpoint", "task.data", "task.held_out_data"]
    (tmp_path / "test.jsonl").write_text('{"prompt": "b", "answer": "b"}\n')
    assert changed(job, before) == ["task.held_out_data"]
    random_folder(tmp_path / "other", "llama", initializer_range=0.1)
    for file in ("model.safetensors", "tokenizer_config.json"):
        before = digests(job)
        path = tmp_path / "model" / file
        path.write_bytes((tmp_path / "other" / file).read_bytes() if file.startswith("model") else b"[]")
        assert changed(job, before) == ["model.checkpoint"]
    assert cell_name(compose_job(job)) == name
    before = digests(job)
    (tmp_path / "model" / "README.md").write_text("a card")
    os.utime(tmp_path / "train.jsonl", (1, 1))
    assert changed(job, before) == []
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    assert digests([f"model={tmp_path / 'copy'}", *job[1:]]) == before


def test_large_weights_are_known_by_parts(job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_WHOLE", 0)
    before, path = digests(job), tmp_path / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert changed(job, before) == ["model.checkpoint"]


def test_what_is_simulated_reads_no_file_but_a_trace_of_lengths(job: list[str], tmp_path: Path) -> None:
    assert inputs_of(compose_job([*job, "backend=virtual"])) == []
    trace = tmp_path / "lengths.txt"
    trace.write_text("3\n4\n")
    lengths = f"cost.lengths={{kind: trace, path: {trace}, cap: 8}}"
    found = inputs_of(compose_job(["backend=virtual", "cost=tiny_cpu", lengths]))
    assert [one.setting for one in found] == ["cost.lengths.path"]
