"""Options of a job for SGLang, and the place that SGLang comes from: an environment of its own, or servers that run
already. Loads neither torch nor SGLang.

CADENCE_SGLANG_URL names such servers, separated by commas: engine number n uses the n-th, with the flags that it was
started with. CADENCE_SGLANG_TOKEN is the API key that they ask for. CADENCE_SGLANG_PYTHON is an interpreter that has
SGLang, where it is not the one that `make setup-sglang` made.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness.config import ModelConfig
from harness.config.fields import ConfigError, Count, Fraction, Positive, Switch
from harness.config.readers import OnGPU, Read
from harness.cost_model.memory_plan import EngineShare

GIVES_ROUTES = "on GPUs"
"""Completions can have the experts of their tokens; on CPUs its buffer for them asks for CUDA."""
TENSOR_PARALLEL = True
"""An engine may have several devices (`engine.tensor_parallel`)."""
URL, TOKEN, PYTHON = "CADENCE_SGLANG_URL", "CADENCE_SGLANG_TOKEN", "CADENCE_SGLANG_PYTHON"
SOCKET = "CADENCE_SGLANG_SOCKET"
"""Names the open, bound socket that a server started here listens on: `launcher.py`."""
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """`engine.<option>`. None leaves the choice to the adapter on a CPU, and to SGLang on a GPU."""

    dtype: Read[Literal["float32", "bfloat16", "float16"] | None] = None  # of weights and cache; None: the model's
    quantization: Read[Literal["fp8"] | None] = None  # refused, as new weights would not be quantised anew
    mem_fraction_static: Read[Fraction | None] = None  # of a GPU, for weights and KV cache; None: by the memory plan
    max_total_tokens: Read[Count | None] = (
        None  # that the KV cache holds at most; never more than every slot at full length
    )
    chunked_prefill_size: Read[Count | None] = None  # tokens of a prompt that are prefilled at once
    attention_backend: Read[str | None] = None
    sampling_backend: Read[str | None] = None
    cuda_graph: OnGPU[Switch] = True  # on a GPU
    overlap_schedule: Read[Switch | None] = None  # of a step with the scheduling of the next
    deterministic: Read[Switch | None] = None  # draws follow from seeds, whatever runs beside; slower; None: on a CPU
    memory_saver: OnGPU[Switch] = True  # on a GPU; without it, an engine that sleeps gives nothing back
    stream_interval: Read[Count] = 64  # tokens between two messages about a sample
    log_level: Read[Literal["debug", "info", "warning", "error"]] = "warning"
    weight_bucket_bytes: Read[Count] = 64 << 20  # weights travel in pieces of at most this
    start_timeout_s: Read[Positive] = 300.0  # longest wait for the server to start
    timeout_s: Read[Positive] = 300.0  # longest wait for anything else


DEFAULTS = Options()


def cannot_serve(model: ModelConfig) -> str | None:
    """The reason why it cannot serve this model, in words that name a fix; None where it can."""
    if model.experts and model.tied_embeddings:  # SGLang 0.5.21: its head keeps the weights that it was made with
        return (
            f"engine=sglang gives a model with experts a head of its own, and that of "
            f"model={model.name} is tied to the embeddings; use engine=vllm or torch, or model.tied_embeddings=false"
        )
    return None


def within(options: Options, share: EngineShare) -> Options:
    """Options completed by the memory plan where the user left them open. Raises ConfigError where a share that the
    user gave does not hold the weights, and for weights of 8 bits."""
    if options.quantization is not None:
        # Fp8LinearMethod of SGLang 0.5.21 makes parameters that have no loader, and restores none before an update.
        raise ConfigError(
            f"engine.quantization={options.quantization}: SGLang quantises the weights that it starts with, and no "
            "later ones; set it to null, or engine=vllm"
        )
    given = options.mem_fraction_static
    cache = share.cache if given is None else share.cache_within(given, work=False)
    if cache < share.token:
        least = share.weights / share.device
        raise ConfigError(
            f"engine.mem_fraction_static={given} leaves no room for a KV cache; use more than {least:.3f}"
        )
    return replace(
        options,
        mem_fraction_static=share.static if given is None and share.gpu else given,
        max_total_tokens=options.max_total_tokens or int(cache / share.token),
    )


def servers() -> list[str]:
    """URLs of servers that run already."""
    return [url.strip().rstrip("/") for url in os.environ.get(URL, "").split(",") if url.strip()]


def reads_files() -> bool:
    """Whether an engine starts from a model's own files, where it has some. To servers that run already they are
    sent."""
    return not servers()


def interpreter() -> Path:
    """Path of SGLang's Python. Raises FileNotFoundError, with the fix, where there is none."""
    path = Path(os.environ.get(PYTHON) or _ROOT / ".venv-sglang" / "bin" / "python")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: run `make setup-sglang`, or name an interpreter by {PYTHON}")
    return path


def check_environment() -> None:
    """Raises FileNotFoundError where no server can be started, and none is named."""
    if not servers():
        interpreter()
