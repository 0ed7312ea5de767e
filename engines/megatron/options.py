"""Refusals of what this engine cannot train, and whether this Python has megatron-core. Loads neither it nor torch."""

from importlib.metadata import version
from importlib.util import find_spec

from harness.config import JobConfig

VERSION = "0.16.1"
SHARDS_WEIGHTS = False
"""Data-parallel ranks share moments and float32 weights; each has its layers' weights and gradients whole."""

SLICES_SEQUENCES = True
"""Ranks that share a layer have a slice of the sequence each between its products."""

ARCHITECTURES = "qwen3", "qwen3_moe"


def check_environment() -> None:
    """Raises ModuleNotFoundError where megatron-core is not installed, and RuntimeError where it is another one."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ModuleNotFoundError("it needs megatron-core, which this Python lacks; `make setup-megatron` installs it")
    if (found := version("megatron-core")) != VERSION:
        raise RuntimeError(f"it needs megatron-core {VERSION}, and this Python has {found}; use `make setup-megatron`")


def refusal(config: JobConfig) -> str | None:
    """The reason why it cannot train this job, in words that name a fix; None where it can."""
    model, training = config.model, config.training
    if model.architecture not in ARCHITECTURES:
        wrong, fix = f"model.architecture={model.architecture}", f"use {' or '.join(ARCHITECTURES)}"
    elif config.algorithm.has_critic:
        wrong, fix = "it has no critics", "set algorithm.advantage=group"
    elif training.lora_rank:
        wrong, fix = f"training.lora_rank={training.lora_rank}", "set it to 0"
    elif training.compile or training.reference_offload:
        wrong, fix = f"training.{'compile' if training.compile else 'reference_offload'}=true", "set it to false"
    elif training.optimizer_offload != "none":
        wrong, fix = f"training.optimizer_offload={training.optimizer_offload}", "set it to none"
    else:
        return None
    return f"training.engine=megatron cannot train this: {wrong}; {fix}, or training.engine=torch"
