"""Typed configuration, validated once at the door. Imports neither torch nor ray.

Field comments give units; the YAML files under experiments/ hold the values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


def _share(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("is no share; give a number >= 1, a percentage, `rest`, or a role to share with")
    return value


def _seeds(value: Any) -> int | tuple[int, ...]:
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list | tuple) or not all(type(seed) is int for seed in listed):
        raise ValueError("gives no seeds; use how many (seeds=3) or which (seeds=[3,4])")
    if value == 0 or not listed or min(listed) < 0 or len(set(listed)) < len(listed):
        raise ValueError("gives no seeds; use a number >= 1, or different numbers >= 0 such as seeds=[3,4]")
    return value if isinstance(value, int) else tuple(listed)


# Strict: neither `true` nor `1.0` is a number of anything.
Count = Annotated[int, Strict(), Field(ge=1)]
CountFromZero = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
NotNegative = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(gt=0, le=1)]
Decay = Annotated[float, Strict(), Field(ge=0, lt=1)]
Switch = Annotated[bool, Strict()]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+-]*$")]
"""Names a folder."""
Share = Annotated[int | str, BeforeValidator(_share)]
Seeds = Annotated[int | tuple[int, ...], BeforeValidator(_seeds)]


class ConfigError(ValueError):
    """A setting that cannot work. The message is one line: the value, what is wrong with it, and the fix."""


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
    warm_start: Switch = False  # train it on noisy demonstrations first, so that RL has something to sharpen


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """The rollout engine."""

    name: Name
    slots: Count  # samples one engine generates at a time
    keep_cache: Switch = False  # keep the KV cache of running samples across a weight update


@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    """Prompts and rewards. `path` is the file of a task that reads one."""

    name: Name
    path: str | None = None


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
    correction: Literal["none", "clip", "tis"] = "clip"  # how off-policy samples are treated, see docs/algorithms.md
    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    tis_cap: Positive = 2.0
    kl_coef: NotNegative = 0.0
    reference: Switch = True  # run the reference model, for policy/kl_ref and the KL term
    recompute_log_probs: Switch = True  # run actor_fwd, for policy/mismatch_kl


Layout = Literal["padded", "packed"]
"""How a micro-batch is laid out: a row for each sample, filled up to the longest; or all of them in one row."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How training is computed; what is learnt stays the same but for rounding."""

    name: Name = "fsdp"
    layout: Layout = "padded"  # for training and for scoring
    recompute_activations: Switch = False  # keep no activations inside of layers; costs another forward pass
    tensor_parallel: Count = 1  # ranks that share each layer, and each micro-batch


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
    on_lost_engine: Literal["end", "go_on"] = "end"  # of the run, where an engine does not get its weights
    wait_timeout_s: Positive = 300.0  # longest wait on another process before the run ends with an error
    stall_timeout_s: Positive = 1800.0  # longest time without any progress before the run says what waits
    call_timeout_s: Positive = 3600.0  # longest single piece of work, such as training on one batch
    memory_gib: Positive | None = None  # memory of one device; asked from the machine when None


@dataclass(frozen=True, config=STRICT)
class LengthsConfig:
    """How many tokens simulated responses have. Every kind gives whole numbers from 1 to `cap`.

    constant: `mean`, always; uniform: 1 to 2 mean - 1; lognormal: of this mean before the cap, `sigma` the standard
    deviation of the logarithm; trace: drawn from `values`, or from the file at `path`, a number per line.
    """

    kind: Literal["constant", "uniform", "lognormal", "trace"]
    cap: Count
    mean: Annotated[float, Strict(), Field(ge=1)] | None = None
    sigma: NotNegative = 1.0
    values: tuple[Count, ...] = ()
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind != "trace" and self.mean is None:
            raise ValueError(f"needs a mean where kind={self.kind}; set cost.lengths.mean=100")
        if self.kind == "trace" and bool(self.values) == (self.path is not None):
            raise ValueError("needs either values or a path where kind=trace; set one of cost.lengths.values and .path")


@dataclass(frozen=True, config=STRICT)
class CostConfig:
    """What simulated work costs on one device. Seconds, tokens, bytes.

    per_billion: the settings marked * are for a model of 1e9 parameters, and grow with the model's parameters.
    """

    name: Name
    per_billion: Switch
    decode_step_s: Positive  # * one token for every running sample: the part that does not depend on how many run
    decode_step_s_per_sample: NotNegative  # * added for each running sample
    prefill_s_per_token: NotNegative  # *
    log_prob_s_per_token: NotNegative  # * prompt and response tokens
    train_s_per_token: NotNegative  # * prompt and response tokens, forward and backward
    train_step_s: NotNegative  # * the optimizer, once an iteration
    weight_bytes: NotNegative  # * of one copy of the weights
    call_s: NotNegative  # fixed part of every forward or training call of a micro-batch
    network_bytes_per_s: Positive  # weights between pools: collective, and in the background
    host_bytes_per_s: Positive  # weights between a device and its host, either way
    sync_s: NotNegative  # fixed part of every weight transfer, and of every load
    offload_s: NotNegative  # fixed part of giving a shared device back (the weights go to the host besides)
    reload_s: NotNegative  # fixed part of taking it again (the weights come back besides)
    prompt_tokens: Count  # of every prompt
    lengths: LengthsConfig


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """Which schedule, over which devices. `options` are the schedule's own and are checked by its class.

    `split` gives for each role a number of devices, a percentage, `rest`, or the role whose devices it shares.
    """

    name: Name
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
    cost: CostConfig  # of simulated work; real runs do not read it
    max_tokens: Count | None = None  # of a response; None takes the task's own
    save_weights: Switch = True  # keep the final weights in the run's folder

    @property
    def seed_list(self) -> tuple[int, ...]:
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else tuple(self.seeds)


def job_config(tree: Mapping[str, Any]) -> JobConfig:
    """Check the types of a composed configuration tree. Raises ConfigError for the first setting that is off."""
    tree = dict(tree)
    schedule = dict(tree.get("schedule") or {})
    tree["schedule"] = {
        "name": schedule.pop("name", None),
        "split": schedule.pop("split", {}),
        "options": schedule,
    }
    try:
        return TypeAdapter(JobConfig).validate_python(tree)
    except ValidationError as error:
        raise ConfigError(first_line(error)) from error


def first_line(error: ValidationError, prefix: str = "") -> str:
    """The first problem of a validation error as one line: setting, value, and what to use instead."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    context = problem.get("ctx", {})
    if problem["type"] == "value_error" and not where:
        return str(context["error"])
    advice = _ADVICE.get(problem["type"])
    told = f": {problem['msg'][0].lower()}{problem['msg'][1:]}" if advice is None else f" {advice.format(**context)}"
    return f"{prefix}{where}={_as_typed(problem['input'])}{told}"


_ADVICE = {
    "unexpected_keyword_argument": "is no setting; `make list` shows the files that name them all",
    "missing": "is incomplete: a value is missing",
    "missing_argument": "is incomplete: a value is missing",
    "literal_error": "is unknown; choose {expected}",
    "int_type": "is no whole number; use one such as 8",
    "int_parsing": "is no whole number; use one such as 8",
    "int_from_float": "is no whole number; use one such as 8",
    "float_type": "is no number; use one such as 0.5",
    "float_parsing": "is no number; use one such as 0.5",
    "finite_number": "is not finite; use a number such as 0.5",
    "bool_type": "is neither true nor false; use one of them",
    "bool_parsing": "is neither true nor false; use one of them",
    "string_type": "is no text; use a name",
    "string_pattern_mismatch": "cannot name a folder; use letters, digits, `_`, `-` and inner dots",
    "greater_than": "is too small; use a number above {gt}",
    "greater_than_equal": "is too small; use at least {ge}",
    "less_than": "is too large; use a number below {lt}",
    "less_than_equal": "is too large; use at most {le}",
    "too_long": "has too many values; use {max_length}",
    "value_error": "{error}",
    "dict_type": "is no set of settings; change single ones, as in model.layers=2",
    "dataclass_type": "is no set of settings; change single ones, as in model.layers=2",
}
"""What to do about a value, by the type that pydantic gives its error."""


def _as_typed(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
