"""Typed configuration, validated once at the door. Imports neither torch nor ray."""

from harness.config.fields import STRICT, ConfigError, first_line
from harness.config.job import (
    AlgorithmConfig,
    Backend,
    ClusterConfig,
    CostConfig,
    DeviceConfig,
    EngineConfig,
    EvalConfig,
    JobConfig,
    Layout,
    LengthsConfig,
    ModelConfig,
    RooflineConfig,
    ScheduleConfig,
    TaskConfig,
    TrainingConfig,
    job_config,
)

__all__ = [
    "STRICT",
    "AlgorithmConfig",
    "Backend",
    "ClusterConfig",
    "ConfigError",
    "CostConfig",
    "DeviceConfig",
    "EngineConfig",
    "EvalConfig",
    "JobConfig",
    "Layout",
    "LengthsConfig",
    "ModelConfig",
    "RooflineConfig",
    "ScheduleConfig",
    "TaskConfig",
    "TrainingConfig",
    "first_line",
    "job_config",
]
