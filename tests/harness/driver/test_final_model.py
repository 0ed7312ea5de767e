"""The folder of final weights: transformers loads it and finds what the trainer would."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]

from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import ModelConfig
from harness.config.model_folder import model_settings
from harness.driver.model_folders import model_card, write_beside
from harness.tasks import load_tokenizer
from harness.transfer_queue import Ragged
from harness.weight_sync.saving import save_weights, write_policy_config
from tests.support.random_models import random_folder

MANIFEST = {
    **{"schedule": "fully_async", "engine": "torch", "seed": 3, "experiment": "x", "cell": "c", "model": "small"},
    **{"started_at": "2026-01-01", "git": {"commit": "abc", "dirty": True}},
}
ALGORITHM = {"batch_groups": 4, "group_size": 8, "learning_rate": 1e-6, "correction": "tis"}


@pytest.mark.parametrize(("architecture", "most"), [("qwen2", 4096), ("qwen3", 1 << 40), ("llama", 4096)])
async def test_transformers_loads_it_and_finds_the_same_log_probs(architecture: str, most: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = random_folder(tmp_path / "start", architecture, tie_word_embeddings=architecture == "qwen3")
    config = ModelConfig(**model_settings(str(start)))
    trained = build_model(config)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path / "model"
    folder.mkdir()
    write_beside(folder, load_tokenizer(), "card")
    write_policy_config(folder, config, load_tokenizer().stop_tokens, load_tokenizer().pad_token)
    save_weights(folder, dict(trained.named_parameters()), write=True, most=most)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (most == 4096)
    prompt, response = np.array([5, 6, 7, 8]), np.array([9, 1, 2, 3, 4])
    samples = (Ragged.from_rows([prompt]), Ragged.from_rows([response]))
    expected = await TorchLogProb(trained, temperature=1.0, device=torch.device("cpu")).log_probs(*samples)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.from_numpy(np.concatenate([prompt, response]))
    with torch.inference_mode():
        scores = torch.log_softmax(loaded(input_ids=tokens[None]).logits[0, :-1], -1)
    found = scores.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
    assert found.tolist() == pytest.approx(expected.values.tolist(), abs=1e-5)
    again = ModelConfig(**model_settings(str(folder)))
    assert replace(again, name=config.name, checkpoint=config.checkpoint) == config
    assert AutoTokenizer.from_pretrained(folder).encode("ab") == load_tokenizer().encode("ab").tolist()
    assert loaded.generation_config.eos_token_id == list(load_tokenizer().stop_tokens)


def test_half_precision_and_the_run_that_made_them_stand_beside_the_weights(tmp_path: Path) -> None:
    config = replace(ModelConfig("small", 32, 2, 4, 2, 8, 64, 32, True, 64), dtype="bfloat16")
    write_policy_config(tmp_path, config, [3], 0)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["dtype"], written["head_dtype"]) == ("bfloat16", "float32")
    assert written["architectures"] == ["Qwen3ForCausalLM"] and written["eos_token_id"] == 3
    settings = {"model": {"checkpoint": "hf:Qwen/Qwen2.5-7B@main"}, "task": {"name": "reverse"}, "iterations": 5}
    settings |= {"algorithm": ALGORITHM}
    card = model_card(MANIFEST, settings, 1e-6)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen2.5-7B"
    assert "| run | x/c/seed=3 |" in card and "| commit | abc with changes |" in card
    assert "| learning rate | 1e-06 |" in card
    left_open = settings | {"algorithm": ALGORITHM | {"learning_rate": "auto"}}
    assert "| learning rate | 5e-05 (auto) |" in model_card(MANIFEST, left_open, 5e-5)
    assert yaml.safe_load(card.split("```yaml")[1].split("```")[0]) == settings
