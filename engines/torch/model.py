"""The policy: a decoder of transformers, of the configured shape, made here or read from a folder."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import ConfigError, ModelConfig
from harness.config.fields import some
from harness.config.model_folder import (
    DRAWN,
    DRAWN_WITH_EXPERTS,
    StoredTensor,
    equal_bytes,
    local_folder,
    read_config,
    require_shape,
    shape_of,
    stored_tensors,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from engines.torch.first_weights import FirstWeights, Outline, SavedWeights


def load_architecture() -> None:
    """Import what models are made of, which takes seconds: once before processes that need it are forked."""
    with _without_science():
        from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401


def build_model(config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model in `config.dtype` on `device`, in eval mode, with sdpa attention; its weights in no other dtype and
    nowhere else, but for one tensor at a time. Raises as `outline_model`."""
    return outline_model(config, seed=seed).fill(device).to(device)


def outline_model(config: ModelConfig, *, seed: int = 0) -> Outline:
    """The model without memory for its weights, in eval mode, with sdpa attention, and where its weights are.

    They come from `config.checkpoint` where that is set, else they are drawn from `seed` alone; the global random
    state stays as it was. A repository of the hub is taken from its cache, or downloaded. Files that name tensors
    otherwise than the model does are read by transformers, which holds all weights on the host for as long as it takes.

    Raises:
        ValueError: the checkpoint has another architecture or shape than configured, or lacks weights; or weights
            cannot be drawn for this architecture.
    """
    import torch

    from engines.torch.first_weights import Outline, WholeWeights, outlined, without_weights

    load_architecture()
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, config.dtype)
    if config.checkpoint is None:
        own = transformers_config(config)
        weights: FirstWeights | None
        model, weights = outlined(lambda: AutoModelForCausalLM.from_config(own, attn_implementation="sdpa"), seed)
    else:
        folder = local_folder(config.checkpoint)
        found = _config_of_checkpoint(config, config.checkpoint, folder)
        model = without_weights(
            lambda: AutoModelForCausalLM.from_config(found, dtype=dtype, attn_implementation="sdpa")
        )
        weights = _saved(model, folder)
        if weights is None:
            model = _load(found, config.checkpoint, folder, dtype)
            weights = WholeWeights(model)
        _require_open(model, config.checkpoint)
        model.config.max_position_embeddings = config.max_length  # of the run; it may have been trained for more
    for parameter in model.parameters():  # and no buffers: rotary frequencies are float32 in every model
        parameter.data = parameter.data.to(dtype)
    if config.float32_logits and config.dtype != "float32":
        model.config.head_dtype = "float32"  # as vLLM reads it from a model's config.json
    return Outline(model.eval(), weights, dtype)


READ_AT_DOOR = 1 << 30
"""Bytes of weights whose numbers are looked at before a run starts; of larger models each process looks at those that
it loads (`Outline.fill`)."""


def check_weights(config: ModelConfig) -> None:
    """Hold the files of `config.checkpoint`, by their headers, against the model that its config.json describes, whose
    parameters are only outlined; what is read of the numbers are tied tensors, and all of a small model's.

    Names are matched as transformers matches them when it loads: renamed, without those that it ignores. Raises
    ConfigError, naming file and tensor, for what is missing, unknown, of another shape or of no float type, for tied
    tensors that differ, and for numbers that are not finite.
    """
    from engines.torch.first_weights import without_weights

    load_architecture()
    from transformers import AutoModelForCausalLM

    checkpoint = str(config.checkpoint)
    where, folder = f"model.checkpoint={checkpoint}", local_folder(checkpoint)
    stored = stored_tensors(folder, where)
    found = _config_of_checkpoint(config, checkpoint, folder)
    model = without_weights(lambda: AutoModelForCausalLM.from_config(found))
    if (wrong := _misfit(model, stored)) is not None:
        raise ConfigError(f"{where}: {wrong}; copy it again, or save it with the config.json that it was made with")
    for names in _tied_names(model):
        one, *others = [name for name in names if name in stored] or [""]
        for other in others:
            if not equal_bytes(stored[one], stored[other]):
                raise ConfigError(
                    f"{where}: {other} in {stored[other].file.name} is not {one}, and config.json has them tied: set "
                    "tie_word_embeddings to false in it, or take the tensor out of the file"
                )
    if sum(tensor.end - tensor.start for tensor in stored.values()) <= READ_AT_DOOR:
        for name, tensor in stored.items():
            if tensor.is_float and not tensor.finite:
                raise ConfigError(
                    f"{where}: {name} in {tensor.file.name} holds NaN or infinity; name another checkpoint"
                )


def _misfit(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> str | None:
    """The first of these tensors that is none of the model's, or that it lacks, in words; None where all fit."""
    from engines.loading import file_shapes

    known = file_shapes({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    needed = file_shapes({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    missing, unknown = needed.keys() - shapes.keys(), shapes.keys() - known.keys()
    other = {(name, shape, known[name]) for name, shape in shapes.items() if shape != known.get(name, shape)}
    if (missing or unknown) and known.keys() == model.state_dict().keys():  # experts would be put together in memory
        missing, unknown, other = _as_transformers_reads(model, shapes)
    for name, tensor in sorted(stored.items()):
        if name in known and not tensor.is_float:
            return f"{name} in {tensor.file.name} is of type {tensor.dtype}, of which no weights are read here"
    for name, shape, right in sorted(other):
        file = f" in {stored[name].file.name}" if name in stored else ""
        return f"{name}{file} has shape {list(shape)}, and by config.json {list(right)}"
    if missing:
        files = sorted({tensor.file.name for tensor in stored.values()})
        where = f"{files[0]} lacks" if len(files) == 1 else f"none of its {len(files)} files has"
        return f"{where} {some(sorted(missing))}"
    if unknown:
        first = min(unknown)
        file = stored[first].file.name if first in stored else "it"
        return f"{file} holds {some(sorted(unknown))}, of which {type(model).__name__} has nothing"
    return None


def _as_transformers_reads(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[set[str], set[str], set[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Names that loading tensors of these shapes would leave missing, unknown, and of another shape, by its own names.
    One number stands for all of a tensor."""
    import torch
    from transformers.utils import logging

    one = torch.zeros((), dtype=model.dtype)
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        _, told = type(model).from_pretrained(
            None,
            config=model.config,
            dtype=model.dtype,
            state_dict={name: one.expand(shape) for name, shape in shapes.items()},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    other = {(name, tuple(there), tuple(here)) for name, there, here in told["mismatched_keys"]}
    return set(told["missing_keys"]), set(told["unexpected_keys"]), other


def _tied_names(model: PreTrainedModel) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def float32_head(model: PreTrainedModel) -> bool:
    """Whether a model's logits are to be computed in float32, and its weights are not."""
    return getattr(model.config, "head_dtype", None) == "float32"


def blocks_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Decoder blocks of a model, by the class that the model itself names as one."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_blocks(model: PreTrainedModel) -> None:
    """Have each block's `forward` compiled by torch (TorchDynamo and Inductor) when it is first called, for all sizes
    of a micro-batch: norms, rotations and gates become one kernel each. What surrounds it, FSDP's hooks and
    recomputation, stays as it is. All blocks alike share what is compiled.

    A compiled block adds up in another order and, in half precision, rounds less often: results are equal but for
    rounding, and may depend on which micro-batch came first, by whose shape kernels are chosen. Attention, whose
    samples have other lengths in every packed micro-batch, is called from between two compiled pieces
    (`engines.torch.packing`)."""
    import torch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # or each worker would have a pool of processes, which outlive it when it is killed
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def require_compiler(gpu: bool) -> None:
    """Raises ConfigError, naming all of it, where this machine lacks what kernels are compiled with: on CPUs Inductor
    calls a C++ compiler, on GPUs Triton a C compiler, both with Python's headers."""
    names = (os.environ.get("CC"), "gcc", "cc", "clang") if gpu else (os.environ.get("CXX", "g++"),)
    missing = []
    if not any(shutil.which(name) for name in names if name):
        missing.append("a C compiler (gcc, or $CC)" if gpu else f"a C++ compiler ({names[0]}, or another by $CXX)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python's headers (Python.h, as in python3-dev)")
    if missing:
        raise ConfigError(
            f"training.compile=true needs {' and '.join(missing)}, which are not here; install what is missing, or "
            "set training.compile=false"
        )


def model_shape(model: PreTrainedModel) -> dict[str, Any]:
    """Shape of a model, by the names that `ModelConfig` has for it."""
    return shape_of(model.config, "of this model")


@contextmanager
def _without_science() -> Iterator[None]:
    """Keep transformers from loading scikit-learn, with pandas, for a metric of assisted decoding, and SciPy for losses
    of object detection: a quarter of what a role's start takes."""
    from transformers.utils import is_scipy_available, is_sklearn_available

    for is_there in (is_scipy_available, is_sklearn_available):
        is_there.cache_clear()  # whoever loaded a part of transformers may have asked before
    hidden = [name for name in ("sklearn", "scipy") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python is told that there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _config_of_checkpoint(config: ModelConfig, checkpoint: str, folder: Path) -> PretrainedConfig:
    """The checkpoint's own config.json: it has what the configured shape does not say, such as how positions are
    scaled."""
    found = read_config(folder, checkpoint)
    require_shape(config, found)
    for name in vars(found):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(found, name, 0.0)  # a log-probability must be the same each time it is asked for
    own: PretrainedConfig = found
    return own


def _saved(model: PreTrainedModel, folder: Path) -> SavedWeights | None:
    """The files of `folder`, where they hold just the weights that `model` has, by its own names."""
    from engines.torch.first_weights import saved_weights

    saved = saved_weights(folder)
    if saved is None:
        return None
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    known = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = saved.shapes
    parameters_alone = known.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    return saved if parameters_alone and needed.items() <= shapes.items() <= known.items() else None


def _load(found: PretrainedConfig, checkpoint: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        config=found,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    odd = [f"{what.split('_')[0]} {name}" for what in ("missing_keys", "unexpected_keys") for name in loading[what]]
    if odd:
        raise ValueError(
            f"checkpoint {checkpoint} does not hold the weights that its config.json names: {some(sorted(odd), 4)}"
        )
    return model


def _require_open(model: PreTrainedModel, checkpoint: str) -> None:
    """Raises ValueError where attention cannot be taken over, or logits are more than a product with a matrix."""
    if not model._supports_attention_backend:
        raise ValueError(f"checkpoint {checkpoint}: {type(model).__name__} cannot attend by functions of others")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"checkpoint {checkpoint}: the output layer of {type(model).__name__} has a bias")


def transformers_config(config: ModelConfig) -> PretrainedConfig:
    """transformers' config made of these settings alone. Raises ValueError for an architecture that they do not
    describe."""
    from transformers import AutoConfig

    if config.architecture not in (*DRAWN, *DRAWN_WITH_EXPERTS):
        raise ValueError(
            f"weights of architecture {config.architecture} cannot be drawn; name a folder that holds some as "
            "model.checkpoint"
        )
    own: dict[str, Any] = {"use_sliding_window": False} if config.architecture != "llama" else {}
    if config.architecture != "qwen2":
        own["attention_bias"] = config.attention_bias == "all"
    if config.experts:
        own |= {
            "moe_intermediate_size": config.ff,
            "num_experts": config.experts,
            "num_experts_per_tok": config.active_experts,
            "norm_topk_prob": True,  # as Qwen3's published ones
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return AutoConfig.for_model(
        config.architecture,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ff,
        vocab_size=config.vocabulary,
        tie_word_embeddings=config.tied_embeddings,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **own,
    )
