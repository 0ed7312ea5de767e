"""Models by where they are: a folder as transformers writes it, or a repository of the Hugging Face hub.

A folder's config.json says what `ModelConfig` has to know of it: enough for costs and plans, without the weights. What
the engines here would compute wrongly is refused by name.

Of weight files only the headers are read, and bytes of a few tensors; needs no torch. A safetensors file begins with
the length of its header, uint64 in little-endian order, and the header, a JSON object: for each tensor its dtype, its
shape, and where its bytes are behind the header (https://github.com/huggingface/safetensors#format). Files of pickles
(.bin, .pt) are never read.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.fields import ConfigError, some
from harness.config.job import ModelConfig

HUB = "hf:"
"""Begins the name of a repository of the hub: `hf:<org>/<name>`, and `@<revision>` where one is meant."""

_REPOSITORY = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of configuration and tokenizer."""

DRAWN = ("qwen2", "qwen3", "llama")
"""Architectures whose weights can be drawn from settings alone, and whose layers can be shared by ranks."""

DRAWN_WITH_EXPERTS = ("qwen3_moe",)
"""Architectures with experts that can be drawn, besides. `ff` is that of one expert; every layer has them."""
WITH_EXPERTS = ("qwen3_moe", "olmoe")
"""Architectures with experts that real runs can have: those whose files name them as `engines.loading` does."""

_ATTENTION = {"full_attention", "sliding_attention"}
_ROTARY = {"default", "linear", "yarn", "llama3", "proportional"}
"""Position embeddings that depend on a token's position alone, not on how long its neighbours are."""

_REFUSED: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {
    "its logits are changed after the output layer": (
        ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier"),
        (None, 1, 1.0),
    ),
    "its attention scores are soft-capped": (("attn_logit_softcapping",), (None,)),
    "its attention compresses keys and values": (("kv_lora_rank",), (None,)),
    "its layers share keys and values": (("num_kv_shared_layers",), (None, 0)),
    "its keys are of several sizes": (("global_head_dim",), (None,)),
}
"""Settings of config.json that would come out wrong without an error, and the values at which each does nothing."""


def is_source(value: str) -> bool:
    """Whether this names a model by where it is: a repository of the hub, or a folder with a config.json."""
    return value.startswith(HUB) or _holds_model(os.path.expanduser(value))


def _holds_model(folder: str) -> bool:
    """Any text may be asked about: unlike Path's, these functions of os say no to what can be no name."""
    return os.path.isfile(os.path.join(folder, "config.json"))


def looks_like_source(value: str) -> bool:
    """Whether this can only be meant as a place."""
    return value.startswith((HUB, ".", "/", "~")) or os.sep in value


def local_folder(source: str, *, weights: bool = True, setting: str = "model.checkpoint") -> Path:
    """The folder of a model: itself, or a snapshot of the hub's repository, downloaded where it is not in the cache.

    weights: without them only configuration and tokenizer are asked for. setting: that names it. Raises ConfigError, in
    one line, where there is no such folder, or the repository can neither be found in the cache nor be downloaded.
    """
    if not source.startswith(HUB):
        if not _holds_model(os.path.expanduser(source)):
            raise ConfigError(f"{setting}={source} holds no model; name a local directory with config.json and weights")
        folder = Path(source).expanduser().resolve()
        if weights and not any(folder.glob("*.safetensors")):
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
            unread = f" ({pickles[0]} is a pickle, which is never read: save it as safetensors)" if pickles else ""
            raise ConfigError(
                f"{setting}={source} holds no *.safetensors{unread}; name a folder with weights, or "
                "model.checkpoint=null for random ones"
            )
        return folder
    named = _REPOSITORY.fullmatch(source)
    if named is None:
        raise ConfigError(
            f"{setting}={source} names no repository; write hf:<org>/<name> or hf:<org>/<name>@<revision>"
        )
    patterns = [*SMALL_FILES, *(_WEIGHTS if weights else ())]
    return _snapshot(setting, source, named["repository"], named["revision"], patterns)


def _snapshot(setting: str, source: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        copy = "model=<folder>" if setting == "model" else f"{setting}=<folder>"
        random = ", or model.checkpoint=null for random weights" if setting == "model.checkpoint" else ""
        raise ConfigError(
            f"{setting}={source} is not in the cache and the Hugging Face hub cannot be reached; give a local copy, as "
            f"in {copy}{random}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"{setting}={source} cannot be downloaded: {str(error).strip().splitlines()[0]}") from error


def model_settings(source: str) -> dict[str, Any]:
    """Settings of the model at `source`, as a file under experiments/model has them; its weights are not read.

    Raises ConfigError as `local_folder`, and where transformers does not know the architecture, or its decoder does
    what no engine here computes.
    """
    found = read_config(local_folder(source, weights=False, setting="model"), source)
    settings = shape_of(found, source)
    named = source.removeprefix(HUB) if source.startswith(HUB) else str(Path(source).expanduser().resolve())
    name = re.sub(r"[^A-Za-z0-9_.=+-]", "-", named.partition("@")[0].rstrip("/").rpartition("/")[2]).lstrip(".=+-")
    checkpoint = source if source.startswith(HUB) else named
    return {"name": name or "model", **settings, "checkpoint": checkpoint, "warm_start": False}


def read_config(folder: Path, source: str) -> Any:
    """config.json as transformers reads it. Raises ConfigError where it cannot."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"model={source}: transformers cannot read its config.json: {why}") from error


def shape_of(found: Any, source: str) -> dict[str, Any]:
    """Settings of a `ModelConfig` that describe the decoder of transformers' configuration."""
    _refuse(found, source)
    heads = _number(found, "num_attention_heads", source)
    hidden = _number(found, "hidden_size", source)
    layers = _number(found, "num_hidden_layers", source)
    experts = next((n for name in ("num_experts", "num_local_experts") if (n := getattr(found, name, None))), 0)
    wide = getattr(found, "moe_intermediate_size", None) if experts else None
    rotary: Mapping[str, Any] = getattr(found, "rope_parameters", None) or {}
    architecture, biased = found.model_type, getattr(found, "attention_bias", False)
    sliding = [kind for kind in getattr(found, "layer_types", None) or [] if kind == "sliding_attention"]
    window = getattr(found, "sliding_window", None)
    if window is not None and getattr(found, "layer_types", None) is None:
        sliding = ["sliding_attention"] * layers
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": getattr(found, "num_key_value_heads", None) or heads,
        "head_dim": getattr(found, "head_dim", None) or hidden // heads,
        "ff": wide or getattr(found, "intermediate_size", None) or 4 * hidden,
        "vocabulary": _number(found, "vocab_size", source),
        "tied_embeddings": bool(found.tie_word_embeddings),
        "max_length": _number(found, "max_position_embeddings", source),
        "dtype": "bfloat16" if str(found.dtype).removeprefix("torch.") in ("bfloat16", "float16") else "float32",
        "experts": experts,
        "active_experts": found.num_experts_per_tok if experts else 0,
        "architecture": architecture,
        "attention_bias": "qkv" if architecture.startswith("qwen2") else "all" if biased else "none",
        "qk_norm": bool(architecture.startswith("qwen3") or getattr(found, "use_qk_norm", False)),
        "sliding_window": window if sliding else None,
        "sliding_layers": len(sliding) if window is not None else 0,
        "rope_theta": float(rotary.get("rope_theta", 10000.0)),
        "norm_eps": float(getattr(found, "rms_norm_eps", 1e-6)),
    }


def _refuse(found: Any, source: str) -> None:
    """Raises ConfigError for what would be computed wrongly, or is no decoder of text."""

    def refused(why: str) -> ConfigError:
        return ConfigError(
            f"model={source} ({found.model_type}) cannot be run here: {why}; use a decoder such as "
            "Qwen2, Qwen3 or Llama"
        )

    if getattr(found, "is_encoder_decoder", False) or hasattr(found, "text_config"):
        raise refused("it is no decoder of text alone")
    for why, (names, harmless) in _REFUSED.items():
        for name in names:
            if (value := getattr(found, name, None)) not in harmless:
                raise refused(f"{why} ({name}={value})")
    if odd := sorted(set(getattr(found, "layer_types", None) or ()) - _ATTENTION):
        raise refused(f"it has layers of {', '.join(odd)}")
    rotary = getattr(found, "rope_parameters", None) or {}
    nested = [part for part in rotary.values() if isinstance(part, Mapping)] or [rotary]
    if odd := sorted({kind for part in nested if (kind := part.get("rope_type", "default")) not in _ROTARY}):
        raise refused(f"its rotary embedding is {', '.join(odd)}, which depends on how long other samples are")
    if getattr(found, "mlp_only_layers", None) or getattr(found, "decoder_sparse_step", 1) != 1:
        raise refused("some of its layers have experts and some have none")
    if getattr(found, "shared_expert_intermediate_size", None) or getattr(found, "n_shared_experts", None):
        raise refused("it has shared experts")


def _number(found: Any, name: str, source: str) -> int:
    value = getattr(found, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"model={source}: its config.json gives no {name}; name a folder with a decoder's config.json"
        )
    return value


_CHOSEN = ("max_length", "dtype", "rope_theta", "norm_eps", "sliding_window", "sliding_layers")
"""Settings of a shape that may differ from a checkpoint's: each is chosen for a run, or read from the checkpoint in any
case."""


def require_shape(config: ModelConfig, found: Any) -> None:
    """Raises ConfigError, naming what differs, where transformers' configuration of `config.checkpoint` is not of the
    configured shape. It may have been trained for longer sequences than the run uses; all else must be equal."""
    shape = shape_of(found, str(config.checkpoint))
    wrong = [
        f"{name} {value}, not {getattr(config, name)}"
        for name, value in shape.items()
        if name not in _CHOSEN and value != getattr(config, name)
    ]
    if shape["max_length"] < config.max_length:
        wrong.append(f"max_length {shape['max_length']}, less than {config.max_length}")
    if wrong:
        raise ConfigError(
            f"model.checkpoint={config.checkpoint} does not have the shape of model {config.name}: it has "
            f"{'; '.join(wrong)}; choose it by model={config.checkpoint}"
        )


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes, as the library has it
_CHUNK = 1 << 20

_EXPONENTS = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}
_EXPONENTS["F64"] = (np.uint64, 0x7FF0000000000000)
"""Types that weights are read in: integers of their size, and the bits of the exponent, all set in NaN and infinity."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. start, end: of its bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes, at most 1 MiB at a time."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            for left in range(self.end - self.start, 0, -_CHUNK):
                yield file.read(min(left, _CHUNK))

    @property
    def is_float(self) -> bool:
        """Whether it is of a type that weights are read in."""
        return self.dtype in _EXPONENTS

    @property
    def finite(self) -> bool:
        """Whether all of its numbers are."""
        integers, exponent = _EXPONENTS[self.dtype]
        wanted = integers(exponent)
        return not any(((np.frombuffer(chunk, integers) & wanted) == wanted).any() for chunk in self.chunks())


def stored_tensors(folder: Path, where: str) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name: of the files that its index names, else of model.safetensors. where: begins the
    messages.

    Raises ConfigError for a file that is missing, cut off or none of this format, and an index that does not say what
    its files hold.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            there = some(sorted(file.name for file in folder.glob("*.safetensors"))) or "no *.safetensors"
            raise ConfigError(
                f"{where} holds {there}, and neither {SINGLE} nor {INDEX}; name a folder with a whole model"
            )
        return _header(folder / SINGLE, where)
    placed = weight_map(index, where)
    if (folder / SINGLE).is_file() and SINGLE not in placed.values():
        raise ConfigError(
            f"{where}: {INDEX} names other files than {SINGLE}, which is there, too; remove one of the two"
        )
    found: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(placed.values()):
        if not (folder / name).is_file():
            raise ConfigError(f"{where}: {name}, which {INDEX} names, is not there; download or copy it again")
        held = _header(folder / name, where)
        for tensor in held:
            if placed.get(tensor) != name:
                says = f"has it in {placed[tensor]}" if tensor in placed else "does not name it"
                raise ConfigError(f"{where}: {name} holds {tensor}, and {INDEX} {says}; save the model again")
        found |= held
    if lacking := sorted(placed.keys() - found.keys()):
        raise ConfigError(
            f"{where}: {placed[lacking[0]]} lacks {some(lacking)}, which {INDEX} has there; save the model again"
        )
    return found


def weight_map(path: Path, where: str) -> dict[str, str]:
    """The file, of the index's own folder, that holds each tensor. Raises ConfigError for what is no such index."""
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {path.name} is no index of weights ({error!r}); copy it again") from error
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(f"{where}: {path.name} has no weight_map of tensors and files; copy it again")
    for file in placed.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{where}: {path.name} names {file}, which is no .safetensors file of this folder")
    return placed


def _header(path: Path, where: str) -> dict[str, StoredTensor]:
    def bad(why: str) -> ConfigError:
        return ConfigError(f"{where}: {path.name} {why}; download or copy it again")

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise bad(f"is cut off or no safetensors file: it has {size:,} bytes, and a header of {length:,}")
        try:
            header = json.loads(file.read(length))
            tensors = {name: _stored(path, 8 + length, told) for name, told in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise bad(f"has a header that cannot be read ({error!r:.100})") from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise bad(f"is {'cut off' if size < end else 'too long'}: it has {size:,} bytes, by its header {end:,}")
    for name, tensor in tensors.items():
        if not tensor.is_float:
            continue
        integers, _ = _EXPONENTS[tensor.dtype]
        if tensor.end - tensor.start != math.prod(tensor.shape) * np.dtype(integers).itemsize:
            raise bad(f"gives {name} {tensor.end - tensor.start:,} bytes, which its shape {list(tensor.shape)} has not")
    return tensors


def _stored(path: Path, behind: int, told: Mapping[str, Any]) -> StoredTensor:
    start, end = (int(offset) for offset in told["data_offsets"])
    return StoredTensor(
        path, str(told["dtype"]), tuple(int(size) for size in told["shape"]), behind + start, behind + end
    )


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(one.chunks(), other.chunks(), strict=True))
