"""Weight files that are not those of their config.json: what is said before anything starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.torch import model as loading
from engines.torch.model import build_model, check_weights
from harness.config import ConfigError, ModelConfig
from harness.config.model_folder import model_settings
from tests.support.random_models import random_folder, random_model

UP, NORM, HEAD, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight", "embed_tokens"
Tensors = dict[str, torch.Tensor]


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(**model_settings(str(folder)))


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        check_weights(config_of(folder))
    assert str(error.value).startswith(f"model.checkpoint={folder}") and "\n" not in str(error.value)
    return str(error.value)


def altered(**tensors: Callable[[Tensors], torch.Tensor | None]) -> Callable[[Path], None]:
    """A change of model.safetensors: tensors by name, with dots for double underscores; None takes one out."""

    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        for name, make in tensors.items():
            made = make(held)
            held.pop(name, None) if made is None else held.update(
                {name: made.clone(memory_format=torch.contiguous_format)}
            )
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def with_number(number: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    return altered(**{NORM: lambda held: torch.cat([held[NORM][:-1], torch.tensor([number])]).to(dtype)})


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (altered(**{UP: lambda held: None}), f"model.safetensors lacks {UP};"),
        (
            altered(extra=lambda held: held[NORM]),
            "model.safetensors holds extra, of which Qwen2ForCausalLM has nothing",
        ),
        (
            altered(**{UP: lambda held: held[UP].T}),
            rf"{UP} in model.safetensors has shape \[32, 64\], and by .* \[64, 32\]",
        ),
        (altered(**{NORM: lambda held: held[NORM].to(torch.int8)}), f"{NORM} in model.safetensors is of type I8"),
        (
            altered(**{HEAD: lambda held: held[f"model.{EMBEDDING}.weight"] * 2}),
            "not model.embed_tokens.weight, and .* tied",
        ),
        (with_number(float("nan")), f"{NORM} in model.safetensors holds NaN or infinity"),
        (with_number(float("-inf"), torch.bfloat16), f"{NORM} in model.safetensors holds NaN or infinity"),
        (with_number(float("inf"), torch.float16), f"{NORM} in model.safetensors holds NaN or infinity"),
        (cut_off, "model.safetensors is cut off: it has"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"none"),
            "cut off or no safetensors file: it has 4 ",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "lora.safetensors"),
            "holds lora.safetensors, and ",
        ),
    ],
)
def test_a_file_that_is_not_the_configs_is_refused_with_its_tensor(
    damage: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder = random_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    check_weights(config_of(folder))
    damage(folder)
    assert pytest.raises(ConfigError, check_weights, config_of(folder)).match(said)
    refused(folder)


def placed(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda folder: sorted(folder.glob("*-00002-*"))[0].unlink(),
            "00002-of-.*which model.safetensors.index.json names",
        ),
        (placed(lambda files: files.pop(UP)), f"holds {UP}, and model.safetensors.index.json does not name it"),
        (
            placed(lambda files: files.update(other=files[UP])),
            "lacks other, which model.safetensors.index.json has there",
        ),
        (placed(lambda files: files.update({UP: "../x.safetensors"})), "names ../x.safetensors, which is no "),
        (placed(lambda files: files.clear()), "has no weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is no index of weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "names other files than model.safetensors"),
    ],
)
def test_shards_are_those_of_their_index(damage: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    model = random_model("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    check_weights(config_of(tmp_path))
    damage(tmp_path)
    assert pytest.raises(ConfigError, check_weights, config_of(tmp_path)).match(said)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "mistral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_takes_is_taken(architecture: str, tied: bool, tmp_path: Path) -> None:
    """An equal head beside tied embeddings, rotary frequencies of old files, and the decoder's names by themselves."""
    folder = random_folder(tmp_path, architecture, tie_word_embeddings=tied)
    check_weights(config_of(folder))
    if "moe" in architecture:
        altered(**{"model.layers.1.mlp.experts.1.up_proj.weight": lambda held: None})(folder)
        assert "lacks model.layers.1.mlp.experts.1.up_proj.weight" in refused(folder)
        return
    altered(
        **{
            HEAD: lambda held: held.get(HEAD, held["model.embed_tokens.weight"]),
            "model.layers.0.self_attn.rotary_emb.inv_freq": lambda held: torch.ones(4),
        }
    )(folder)
    check_weights(config_of(folder))
    held = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in held.items()}, folder / "model.safetensors")
    check_weights(config_of(folder))


def test_what_the_shape_does_not_say_comes_from_the_files(tmp_path: Path) -> None:
    rope = {"rope_theta": 1_000_000.0, "rope_type": "default"}
    model = build_model(config_of(random_folder(tmp_path, "qwen2", rope_parameters=rope, rms_norm_eps=1e-5)))
    assert model.config.rope_parameters["rope_theta"] == 1_000_000.0
    assert model.model.norm.variance_epsilon == 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "qwen3"}, "has architecture qwen2, not qwen3"),
        ({"ff": 512, "max_length": 512}, "ff 64, not 512.*max_length 256, less than 512"),
    ],
)
def test_a_model_of_another_shape_is_not_made_of_them(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = config_of(random_folder(tmp_path, "qwen2"))
    with pytest.raises(ValueError, match=said):
        build_model(replace(config, **changes))


def test_missing_and_unknown_weights_are_named_where_they_are_loaded(tmp_path: Path) -> None:
    folder = random_folder(tmp_path, "qwen2")
    altered(**{"strange": lambda held: held[UP], UP: lambda held: None})(folder)
    with pytest.raises(ValueError, match=f"missing {UP}, unexpected strange"):
        build_model(config_of(folder))


def test_numbers_of_large_models_are_looked_at_when_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "READ_AT_DOOR", 0)
    folder = random_folder(tmp_path, "qwen2")
    altered(**{NORM: lambda held: held[NORM] * 3e38})(folder)
    check_weights(config_of(folder))
    build_model(config_of(folder))
    with_number(float("nan"))(folder)
    check_weights(config_of(folder))
    with pytest.raises(ValueError, match=f"{NORM} in {folder} holds NaN or infinity"):
        build_model(config_of(folder))
