"""The policy: a transformers Qwen3 model of the configured shape, made here or read from a local directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM


def load_architecture() -> None:
    """Import what models are made of, which takes seconds: once before processes that need it are forked."""
    with _without_sklearn():
        from transformers import Qwen3ForCausalLM  # noqa: F401


def build_model(config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> Qwen3ForCausalLM:
    """The model in `config.dtype` on `device`, in eval mode, with sdpa attention.

    Weights come from `config.checkpoint` where that is set, else they are drawn from `seed` alone; the global random
    state stays as it was. Nothing is ever downloaded.

    Raises:
        ValueError: the checkpoint has another architecture or shape than configured, or lacks weights.
    """
    import torch

    load_architecture()
    from transformers import Qwen3ForCausalLM

    dtype = getattr(torch, config.dtype)
    if config.checkpoint is None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = Qwen3ForCausalLM(_qwen3_config(config))
        for parameter in model.parameters():  # and no buffers: rotary frequencies are float32 in every model
            parameter.data = parameter.data.to(dtype)
    else:
        model = _load(config, config.checkpoint, dtype)
    return model.to(device).eval()


@contextmanager
def _without_sklearn() -> Iterator[None]:
    """transformers loads it, with pandas, for a metric of assisted decoding: a fifth of what a role's start takes."""
    if "sklearn" in sys.modules:
        yield
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # how Python is told that there is no such module
    try:
        yield
    finally:
        del sys.modules["sklearn"]


def _load(config: ModelConfig, checkpoint: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Its own config.json says all that the configured shape does not, such as the base of the rotary embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    architecture = Qwen3Config.get_config_dict(checkpoint, local_files_only=True)[0].get("model_type")
    if architecture != "qwen3":
        raise ValueError(f"checkpoint {checkpoint} is of model_type {architecture}; only qwen3 can be loaded")
    found = Qwen3Config.from_pretrained(checkpoint, local_files_only=True)
    _require_shape(config, found)
    model, loading = Qwen3ForCausalLM.from_pretrained(
        checkpoint,
        config=found,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
    )
    odd = [f"{what.split('_')[0]} {name}" for what in ("missing_keys", "unexpected_keys") for name in loading[what]]
    if odd:
        raise ValueError(f"checkpoint {checkpoint} does not hold the weights that its config.json names: {_few(odd)}")
    return model


def _few(names: list[str]) -> str:
    shown = "; ".join(sorted(names)[:4])
    return shown if len(names) <= 4 else f"{shown}; and {len(names) - 4} more"


def _qwen3_config(config: ModelConfig) -> Qwen3Config:
    from transformers import Qwen3Config

    return Qwen3Config(
        **_shape(config),
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_sliding_window=False,
    )


def _shape(config: ModelConfig) -> dict[str, int | bool]:
    return {
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ff,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_length,
    }


def _require_shape(config: ModelConfig, found: Qwen3Config) -> None:
    """A checkpoint may have been trained for longer sequences than the run uses; all else must be equal."""
    wanted = _shape(config)
    longest = wanted.pop("max_position_embeddings")
    wrong = [
        f"{key} {getattr(found, key)}, not {value}" for key, value in wanted.items() if getattr(found, key) != value
    ]
    if found.max_position_embeddings < longest:
        wrong.append(f"max_position_embeddings {found.max_position_embeddings}, less than max_length {longest}")
    if wrong:
        raise ValueError(
            f"checkpoint {config.checkpoint} does not have the shape of model {config.name}: it has {'; '.join(wrong)}"
        )
    found.max_position_embeddings = longest
