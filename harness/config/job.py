"""Typed settings of a job, validated once at the door. The YAML files under experiments/ hold the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.config.fields import (
    STRICT,
    Above1,
    Below1,
    ConfigError,
    Count,
    CountFromZero,
    Decay,
    Fraction,
    Name,
    NameOrPath,
    NotNegative,
    Positive,
    Seeds,
    Share,
    Switch,
    first_line,
    one_of,
)
from harness.config.simulation import CostConfig, DeviceConfig, RooflineConfig


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The shape of a Qwen3-style decoder. `checkpoint` is a local directory with weights, or None for made ones."""

    name: Name
    hidden: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ff: Count
    vocabulary: Count
    tied_embeddings: Switch
    max_length: Count  # tokens, prompt and response together
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint: str | None = None
    experts: CountFromZero = 0  # feed-forward networks of each layer to choose from; 0: one for all. Simulated only
    active_experts: CountFromZero = 0  # chosen for each token; each is `ff` wide
    warm_start: Switch = False  # train it on noisy demonstrations first, so that RL has something to sharpen


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """The rollout engine. `options` are its own and are checked by its class."""

    name: NameOrPath
    slots: Count  # samples one engine generates at a time
    tensor_parallel: Count = 1  # devices of one engine; simulated engines only
    keep_cache: Switch = False  # keep the KV cache of running samples across a weight update
    options: dict[str, Any] = field(default_factory=dict)


COMMON_TO_ENGINES = ("name", "slots", "tensor_parallel", "keep_cache")
"""Settings of every engine; what else stands beside them is an option of one."""


@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    """Prompts and rewards. `options` are the task's own and are checked by its class."""

    name: NameOrPath
    path: str | None = None  # the file of a task that reads one
    reward: str | None = None  # `package.module:function` that scores responses instead of the task
    reward_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CORRECTIONS = ("none", "clip", "decoupled", "tis", "mis")
"""Off-policy corrections that are built in."""


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """GRPO and its optimizer."""

    name: Name
    batch_groups: Count  # groups trained in one iteration
    group_size: Annotated[int, Strict(), Field(ge=2)]  # samples of a group
    micro_batch_groups: Count  # groups of one forward and backward, per training rank
    learning_rate: NotNegative
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    grad_clip: Positive = 1.0
    temperature: Positive = 1.0
    top_p: Fraction = 1.0
    normalise_std: Switch = True  # divide advantages by the group's standard deviation
    correction: Annotated[str, one_of(*CORRECTIONS)] = "clip"  # how off-policy samples are treated: docs/algorithms.md
    clip_low: NotNegative = 0.2  # of clip and decoupled
    clip_high: NotNegative = 0.2
    proximal: Literal["actor_fwd", "trainer"] = "actor_fwd"  # whose log-probs decoupled clips against
    decoupled_cap: Above1 | None = 5.0  # tokens with a larger weight are left out; None leaves out none
    tis_cap: Positive = 2.0
    mis_low: Below1 = 0.5  # tokens whose ratio is outside of [mis_low, mis_high] are left out
    mis_high: Above1 = 5.0
    kl_coef: NotNegative = 0.0
    reference: Switch = True  # run the reference model, for policy/kl_ref and the KL term
    recompute_log_probs: Switch = True  # run actor_fwd, for decoupled and policy/mismatch_kl
    advantage: Annotated[str, one_of("group")] = "group"  # how the rewards of a group are compared
    options: dict[str, Any] = field(default_factory=dict)  # of a correction and an advantage of the user's own

    @property
    def batch_samples(self) -> int:
        """Samples trained in one iteration."""
        return self.batch_groups * self.group_size

    @property
    def train_on_old_log_probs(self) -> bool:
        """Whether the loss is made of what actor_fwd computes."""
        return self.correction == "decoupled" and self.proximal == "actor_fwd"


Backend = Literal["real", "virtual", "paced"]
Layout = Literal["padded", "packed"]
"""How a micro-batch is laid out: a row for each sample, filled up to the longest; or all of them in one row."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How training is computed; what is learnt stays the same but for rounding."""

    name: Name = "fsdp"
    layout: Layout = "padded"  # for training and for scoring
    recompute_activations: Switch = False  # keep no activations inside of layers; costs another forward pass
    tensor_parallel: Count = 1  # ranks that share each layer, and each micro-batch
    pipeline_parallel: Count = 1  # parts that the layers are cut into; simulated training only
    expert_parallel: Count = 1  # data-parallel ranks over which experts are spread; simulated training only


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    """The devices of the job. On a CPU machine one device is one core."""

    name: Name
    devices: Count
    kind: Literal["auto", "cpu", "gpu"] = "auto"
    threads_per_device: Count = 1
    oversubscribe: Switch = False  # let a CPU job use more devices than there are cores (for tests, not for timing)
    bucket_bytes: Count = 64 << 20  # weights travel in pieces of at most this
    transfer_attempts: Count = 3  # how often weights are sent to an engine that does not get them
    verify_weights: Switch = False  # hold every tensor that arrives against its digest
    on_lost_engine: Literal["end", "go_on"] = "end"  # of the run, where an engine dies or does not get its weights
    serve_membership: Switch = False  # serve how the engines are, and who is to leave or join, over HTTP on loopback
    wait_timeout_s: Positive = 300.0  # longest wait on another process before the run ends with an error
    stall_timeout_s: Positive = 1800.0  # longest time without any progress before the run says what waits
    call_timeout_s: Positive = 3600.0  # longest single piece of work, such as training on one batch
    memory_gib: Positive | None = None  # memory of one device; asked from the machine when None


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """Which schedule, over which devices. `options` are the schedule's own and are checked by its class.

    `split` gives for each role a number of devices, a percentage, `rest`, or the role whose devices it shares.
    """

    name: NameOrPath
    split: dict[str, Share]
    options: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class JobConfig:
    """Everything that decides a run, except its seed."""

    experiment: Name
    backend: Literal["auto", "real", "virtual", "paced"]
    iterations: Count
    seeds: Seeds  # a number of seeds (0, 1, ...) or the seeds themselves
    smoke: Switch
    force: Switch  # run again what is already done
    warmup_iterations: CountFromZero  # left out of throughput and idle shares
    schedule: ScheduleConfig
    model: ModelConfig
    engine: EngineConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    training: TrainingConfig
    cluster: ClusterConfig
    cost: Annotated[CostConfig | RooflineConfig, Field(discriminator="kind")]  # of simulated work
    device: DeviceConfig  # that a roofline is of
    max_tokens: Count | None = None  # of a response; None takes the task's own
    save_weights: Switch = True  # keep the final weights in the run's folder

    @property
    def seed_list(self) -> tuple[int, ...]:
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else tuple(self.seeds)


def job_config(tree: Mapping[str, Any]) -> JobConfig:
    """Check the types of a composed configuration tree. Raises ConfigError for the first setting that is off."""
    tree = dict(tree)
    schedule, task = dict(tree.get("schedule") or {}), dict(tree.get("task") or {})
    named = {"name": schedule.pop("name", None), "split": schedule.pop("split", {})}
    tree["schedule"] = named | {"options": schedule}
    own = {name: task.pop(name) for name in ("path", "reward", "reward_options") if name in task}
    tree["task"] = {"name": task.pop("name", None), **own, "options": task}
    engine = dict(tree.get("engine") or {})
    common = {name: engine.pop(name) for name in COMMON_TO_ENGINES if name in engine}
    tree["engine"] = common | {"options": engine}
    try:
        return TypeAdapter(JobConfig).validate_python(tree)
    except ValidationError as error:
        raise ConfigError(first_line(error)) from error
