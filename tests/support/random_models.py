"""Small random models of any architecture, as folders that transformers wrote."""

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 48, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip


def random_model(architecture: str, **changes: Any) -> Any:
    """A model of transformers in float32, its biases too drawn at random; settings of its config as `changes`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **(SIZES | changes))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2)
    return model.eval()


def random_folder(folder: Path, architecture: str, **changes: Any) -> Path:
    """`random_model` with weights, in `folder`."""
    random_model(architecture, **changes).save_pretrained(folder)
    return folder
