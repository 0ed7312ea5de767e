"""MODEL=<folder> and MODEL=hf:...: what is read from config.json, and what is said where it cannot be."""

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from harness.config import ConfigError, inputs
from harness.config.compose import cell_name, compose_job
from harness.config.inputs import inputs_of
from harness.config.model_folder import local_folder
from tests.support.random_models import random_folder


def refused(*settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose_job(settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_is_a_model_of_its_config_and_needs_no_weights_for_a_shape(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "My model v1", "qwen2", tie_word_embeddings=True)
    model = compose_job([f"model={folder}", "model.max_length=100", "model.fp32_head=true"]).model
    assert (model.name, model.architecture, model.checkpoint) == ("My-model-v1", "qwen2", str(folder))
    assert (model.hidden, model.layers, model.heads, model.kv_heads, model.head_dim) == (32, 2, 4, 2, 8)
    assert (model.ff, model.vocabulary, model.tied_embeddings, model.dtype) == (64, 48, True, "float32")
    assert (model.attention_bias, model.qk_norm, model.sliding_layers) == ("qkv", False, 0)
    assert (model.max_length, model.fp32_head) == (100, True)
    folder = random_folder(tmp_path, "mistral", sliding_window=64, num_hidden_layers=3)
    (folder / "model.safetensors").unlink()
    model = compose_job([f"model={folder}"]).model
    assert (model.sliding_window, model.sliding_layers, model.layers) == (64, 3, 3)
    with pytest.raises(ConfigError, match=r"model.checkpoint=.* holds no \*.safetensors; name a folder with weights"):
        local_folder(str(folder))


def test_a_place_that_holds_no_model_is_named(tmp_path: Path) -> None:
    assert refused(f"model={tmp_path}").startswith(f"model={tmp_path} holds no model; name a local directory")
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    assert "transformers cannot read its config.json" in refused(f"model={tmp_path}")
    for no_name in ("x" * 400, "/" + "x" * 400, "~nobody-of-that-name"):
        assert refused(f"model={no_name}").startswith(f"model={no_name} ")
    assert refused("model=hf:nothing").startswith("model=hf:nothing names no repository; write hf:<org>/<name>")


@pytest.mark.parametrize(
    ("setting", "copy"),
    [
        ("model", "model=<folder>"),
        ("model.checkpoint", "model.checkpoint=<folder>, or model.checkpoint=null for random weights"),
        ("model.tokenizer", "model.tokenizer=<folder>"),
    ],
)
def test_a_repository_that_is_not_cached_is_one_line(setting: str, copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are proposed only where the shape is known without config.json."""

    def unreachable(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repository, revision) == ("Qwen/Qwen2.5-7B", "main")
        raise LocalEntryNotFoundError("no\nnetwork")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError) as error:
        local_folder("hf:Qwen/Qwen2.5-7B@main", setting=setting)
    assert str(error.value) == (
        f"{setting}=hf:Qwen/Qwen2.5-7B@main is not in the cache and the Hugging Face hub cannot be reached; give a "
        f"local copy, as in {copy}"
    )
    assert refused("model=hf:Qwen/Qwen2.5-7B@main").endswith("as in model=<folder>")


def test_a_repository_is_looked_up_by_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, asked = random_folder(tmp_path / "Small", "llama"), []

    def downloaded(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    model = compose_job(["model=hf:org/Small-1B@v2"]).model
    assert (model.name, model.checkpoint, model.architecture) == ("Small-1B", "hf:org/Small-1B@v2", "llama")
    assert local_folder("hf:org/Small-1B") == folder
    assert asked == [("org/Small-1B", "v2", False), ("org/Small-1B", None, True)]


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
