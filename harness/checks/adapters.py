"""Whether a job can train adapters (engines/torch/lora.py). Raises ConfigError: the value and the fix."""

from __future__ import annotations

from harness.config import ConfigError, JobConfig
from harness.config.readers import described_engine
from harness.cost_model.shape import linear_layers


def check_adapters(config: JobConfig) -> None:
    """Check rank and targets, and refuse what is not built for adapters."""
    training, model = config.training, config.model
    where = f"training.lora_rank={training.lora_rank}"
    if not training.lora_rank:
        return
    if training.lora_rank > model.hidden:
        raise ConfigError(
            f"{where} is more than model.hidden={model.hidden}, beyond which a rank adds nothing; set it to "
            f"{model.hidden} or less, such as 8"
        )
    layers = linear_layers(model)
    if unknown := [name for name in training.lora_targets if name not in layers]:
        raise ConfigError(
            f"training.lora_targets names {', '.join(unknown)}; linear layers of model={model.name} are "
            f"{', '.join(layers)}"
        )
    if len(set(training.lora_targets)) < len(training.lora_targets):
        raise ConfigError(f"training.lora_targets={training.lora_targets} names a layer twice; name each once")
    refused = {
        f"training.tensor_parallel={training.tensor_parallel}": training.tensor_parallel > 1,
        f"training.pipeline_parallel={training.pipeline_parallel}": training.pipeline_parallel > 1,
        f"training.expert_parallel={training.expert_parallel}": training.expert_parallel > 1,
        "cluster.delta_weights=true": config.cluster.delta_weights,
    }
    engine = described_engine(config.engine.name)
    if not getattr(engine, "reads_files", lambda: True)():
        raise ConfigError(
            f"{where}: servers of engine={config.engine.name} that run already have files of their own, which adapters "
            "cannot be merged into here; have them started for the job (docs/engines.md), or set training.lora_rank=0"
        )
    for setting, is_set in refused.items():
        if is_set:
            off = "false" if setting.endswith("true") else "1"
            raise ConfigError(f"{where} is not built for {setting}; set that to {off}, or training.lora_rank=0")
