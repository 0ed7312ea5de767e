import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import ModelConfig
from harness.transfer_queue import Ragged

SMALL = ModelConfig("small", 32, 2, 4, 2, 8, 64, 32, True, 64)
CPU = torch.device("cpu")


def saved(config: ModelConfig, folder: Path, **changes: object) -> ModelConfig:
    """A checkpoint of random weights as `save_pretrained` writes it, with changes to its config.json."""
    build_model(config, seed=9).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return replace(config, checkpoint=str(folder))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_local_checkpoint_scores_as_the_model_that_wrote_it(tied: bool, dtype: str, tmp_path: Path) -> None:
    config = saved(replace(SMALL, tied_embeddings=tied, dtype=dtype), tmp_path)
    loaded = build_model(config)
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    prompts, responses = (Ragged.from_rows([np.arange(1, 9), np.arange(5, 8)]) for _ in range(2))
    same = build_model(replace(config, checkpoint=None), seed=9)
    ours, theirs = [
        await TorchLogProb(model, temperature=1.0, device=CPU).log_probs(prompts, responses) for model in (loaded, same)
    ]
    assert ours.values.tolist() == theirs.values.tolist()


def test_what_the_shape_does_not_say_comes_from_the_checkpoint(tmp_path: Path) -> None:
    rope = {"rope_theta": 1_000_000.0, "rope_type": "default"}
    model = build_model(saved(SMALL, tmp_path, rope_parameters=rope, rms_norm_eps=1e-5))
    assert model.config.rope_parameters["rope_theta"] == 1_000_000.0
    assert model.model.norm.variance_epsilon == 1e-5


def test_another_architecture_is_refused_although_some_names_are_the_same(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has architecture qwen2, not qwen3"):
        build_model(saved(SMALL, tmp_path, model_type="qwen2"))


def test_missing_and_unknown_weights_are_named(tmp_path: Path) -> None:
    config = saved(SMALL, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["strange"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing model.layers.1.mlp.up_proj.weight, unexpected strange"):
        build_model(config)
