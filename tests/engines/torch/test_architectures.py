"""Whatever decoder a folder holds: its log-probabilities are those of transformers, or it is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.torch.kv_slots import SlotModel
from engines.torch.model import blocks_of, build_model
from engines.torch.rollout import TorchRollout
from engines.torch.scoring import LAYOUTS, TorchLogProb
from harness.config import ConfigError, ModelConfig, TrainingConfig
from harness.config.model_folder import model_settings
from harness.protocols import Request, Sampling
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Ragged
from tests.support.random_models import random_folder

CPU = torch.device("cpu")
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}), "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}), "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3's positions": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3, positions stretched": ("qwen3", {"rope_parameters": YARN}), "qwen2, sliding": ("qwen2", SLIDING),
    "qwen3, sliding": ("qwen3", SLIDING), "mistral, sliding": ("mistral", {"sliding_window": 6}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "phi3": ("phi3", {"sliding_window": None}), "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {}), "gemma": ("gemma", {}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "starcoder2": ("starcoder2", {"sliding_window": None, "residual_dropout": 0.3, "attention_dropout": 0.3}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma2": ("gemma2", {}, r"logits are changed after the output layer \(final_logit_softcapping=30.0\)"),
    "granite, scaled": ("granite", {"logits_scaling": 4.0}, "logits_scaling=4.0"),
    "cohere": ("cohere", {}, "logit_scale="),
    "scores soft-capped": ("gemma2", {"final_logit_softcapping": None}, "attn_logit_softcapping"),
    "positions by length": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "its rotary embedding is dynamic, which depends on how long other samples are",
    ),
    "compressed keys": ("deepseek_v3", {}, "kv_lora_rank"),
    "state space": ("mamba", {}, "gives no num_attention_heads|cannot be run here"),
}


def samples(count: int = 5) -> tuple[Ragged, Ragged]:
    random = np.random.default_rng(1)
    return tuple(  # type: ignore[return-value]
        Ragged.from_rows([random.integers(1, 48, n) for n in random.integers(low, 19, count)]) for low in (3, 2)
    )


def by_transformers(config: ModelConfig, prompts: Ragged, responses: Ragged) -> list[float]:
    """Each sample alone, through the whole model with its own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.checkpoint, attn_implementation="eager").eval()
    found: list[float] = []
    for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.inference_mode():
            scores = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1)
        found += scores.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0].tolist()
    return found


def folder_of(folder: Path, name: str) -> ModelConfig:
    architecture, changes = COMPUTED[name]
    return ModelConfig(**model_settings(str(random_folder(folder, architecture, **changes))))


@pytest.mark.parametrize("name", COMPUTED)
async def test_a_decoder_scores_and_generates_as_transformers_does(name: str, tmp_path: Path) -> None:
    config = folder_of(tmp_path, name)
    prompts, responses = samples()
    expected = by_transformers(config, prompts, responses)
    for layout in LAYOUTS:
        scorer = TorchLogProb(build_model(config), temperature=1.0, device=CPU, training=TrainingConfig(layout=layout))
        found = await scorer.log_probs(prompts, responses)
        assert found.values.tolist() == pytest.approx(expected, abs=2e-5), layout
    engine = TorchRollout(build_model(config), sampling=Sampling(12), slots=3, seed=0, clock=RealClock.starting_now())
    engine.submit([Request(number, prompt) for number, prompt in enumerate(prompts.rows())])
    done = {}
    while len(done) < len(prompts):
        done |= {sample.sample_id: sample for sample in await engine.finished()}
    generated = Ragged.from_rows([done[number].tokens for number in range(len(prompts))])
    sampled = np.concatenate([done[number].log_probs for number in range(len(prompts))])
    assert sampled.tolist() == pytest.approx(by_transformers(config, prompts, generated), abs=2e-5)
    assert len(blocks_of(build_model(config))) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_out_wrong_is_refused_by_name(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from tests.support.random_models import SIZES

    architecture, changes, why = REFUSED[name]
    AutoConfig.for_model(architecture, **(SIZES | changes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=why) as refused:
        model_settings(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "llama with biases"])
def test_blocks_run_one_by_one_give_the_bits_of_the_models_own_forward_pass(name: str, tmp_path: Path) -> None:
    config = folder_of(tmp_path, name)
    one, other = SlotModel(build_model(config), 3), own_forward(build_model(config))
    for slots in (one, other):
        slots.prefill([(0, [5, 6, 7]), (1, list(range(1, 30))), (2, [9])])
    for step in range(4):
        at = [3 + step, 29 + step, 1 + step]
        assert torch.equal(one.decode([1, 2, 3], at), other.decode([1, 2, 3], at))


def own_forward(model: Any) -> SlotModel:
    from engines.torch import kv_slots

    blocks, kv_slots.BLOCKS = kv_slots.BLOCKS, ()
    try:
        return SlotModel(model, 3)
    finally:
        kv_slots.BLOCKS = blocks


def test_a_bfloat16_model_gives_logits_in_float32_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    from dataclasses import replace

    config = replace(folder_of(tmp_path, "llama"), dtype="bfloat16")
    contexts = [(0, [5, 6, 7]), (1, list(range(1, 30)))]
    exact, rounded = (SlotModel(build_model(made), 2) for made in (config, replace(config, fp32_head=False)))
    found = []
    for slots in (exact, rounded):
        slots.prefill(contexts)
        found.append(slots.decode([1, 2], [3, 29]))
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.bfloat16
    assert torch.equal(found[0].bfloat16(), found[1]) and not torch.equal(found[0], found[1].float())


def test_caches_are_made_for_the_run_and_not_for_what_the_model_was_trained_for(tmp_path: Path) -> None:
    from dataclasses import replace

    assert SlotModel(build_model(replace(folder_of(tmp_path, "qwen2"), max_length=20)), 2).capacity == 32
