"""Options of a job for vLLM, and whether this Python has it. Loads neither torch nor vLLM."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from harness.config.fields import ConfigError, Count, Fraction, Positive, Switch
from harness.config.readers import Read
from harness.cost_model.memory_plan import EngineShare

GIVES_ROUTES = "on GPUs"
"""Completions can have the experts of their tokens: by vLLM's model runner V2, which CPUs have not."""
TENSOR_PARALLEL = True
"""An engine may have several devices (`engine.tensor_parallel`)."""


def reads_files() -> bool:
    """Whether an engine starts from a model's own files, where it has some."""
    return True


_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
WAYS_ON_GPUS = {"model runner V1": {_RUNNER: "0"}, "model runner V2": {_RUNNER: "1"}}
"""Code that samples on a GPU, by the environment that chooses it. Left to itself, vLLM takes V2 wherever Triton is."""

BACKEND = "cadence"
"""The name of our worker's end among vLLM's weight transfer backends."""


@dataclass(frozen=True)
class Options:
    """`engine.<option>`. None leaves the choice to vLLM, unless a comment says otherwise."""

    dtype: Read[Literal["float32", "bfloat16", "float16"] | None] = None  # of weights and cache; None: the model's
    quantization: Read[Literal["fp8"] | None] = (
        None  # of layers' matrices, made by vLLM of all weights that arrive; policy/mismatch_kl shows what it changes
    )
    gpu_memory_share: Read[Fraction | None] = (
        None  # of a GPU, for weights, KV cache and a step; None: by the memory plan
    )
    kv_cache_bytes: Read[Count | None] = None  # at most; never more than every slot at full length; None: by the plan
    block_size: Read[Count] = 32  # tokens of a block of the KV cache; CPU kernels want multiples of 32
    max_num_batched_tokens: Read[Count | None] = None  # of one step, over all samples
    enforce_eager: Read[Switch | None] = None  # no CUDA graphs; None: on a CPU
    enable_chunked_prefill: Read[Switch | None] = None  # None: on a GPU; on a CPU it cannot be combined with seeds
    enable_prefix_caching: Read[Switch | None] = None
    attention_backend: Read[str | None] = None
    log_level: Read[Literal["DEBUG", "INFO", "WARNING", "ERROR"]] = "ERROR"
    weight_bucket_bytes: Read[Count] = 64 << 20  # weights travel in pieces of at most this
    timeout_s: Read[Positive] = 300.0  # longest wait for an answer
    drain_timeout_s: Read[Positive] = 3600.0  # longest wait for running samples to end


DEFAULTS = Options()


def within(options: Options, share: EngineShare) -> Options:
    """Options completed by the memory plan where the user left them open. Raises ConfigError where a share that the
    user gave does not hold the weights."""
    given = options.gpu_memory_share
    cache = share.cache if given is None else share.cache_within(given, work=True)
    if options.kv_cache_bytes is None and cache < 1:
        least = (share.weights + share.work) / share.device
        raise ConfigError(f"engine.gpu_memory_share={given} leaves no room for a KV cache; use more than {least:.3f}")
    return replace(
        options,
        gpu_memory_share=share.whole if given is None else given,
        kv_cache_bytes=options.kv_cache_bytes or int(cache),
    )


def check_environment() -> None:
    """Raises ModuleNotFoundError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "it needs vllm, which this Python lacks; `make setup-vllm` installs it into an environment of its own"
        )
