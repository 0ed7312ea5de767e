"""Typed configuration, validated once at the door. Imports neither torch nor ray."""

from harness.config.cost import (
    BytesCost,
    CostConfig,
    DeviceConfig,
    LatencyConfig,
    LengthsConfig,
    RecurringCost,
    RooflineConfig,
    SystemConfig,
    TransferCost,
)
from harness.config.fields import STRICT, ConfigError, first_line
from harness.config.job import (
    AlgorithmConfig,
    Backend,
    CheckpointConfig,
    ClusterConfig,
    EngineConfig,
    EvalConfig,
    JobConfig,
    Layout,
    ModelConfig,
    OptimizerOffload,
    RestartsConfig,
    ScheduleConfig,
    TaskConfig,
    TrainingConfig,
    job_config,
)
