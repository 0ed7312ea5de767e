"""A model as a folder that an SGLang server can load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def write_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Its config.json and weights, tied ones once.

    Without an end-of-sequence token: what ends a sample is for its sampling parameters to say, and a server would add
    the model's own.
    """
    from safetensors.torch import save_file

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.eos_token_id = None
    config.save_pretrained(folder)
    weights = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
