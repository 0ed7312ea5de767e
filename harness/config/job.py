"""Typed settings of a job, validated once at the door. The YAML files under experiments/ hold the values."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from harness.config.cost import CostConfig, DeviceConfig, RooflineConfig
from harness.config.fields import (
    STRICT,
    AtLeast1,
    ConfigError,
    Count,
    CountFromZero,
    Decay,
    Devices,
    Fraction,
    Name,
    NameOrPath,
    NotNegative,
    Part,
    Positive,
    Seeds,
    Share,
    Switch,
    first_line,
)
from harness.config.readers import (
    BesideReference,
    BetweenDevices,
    Buffered,
    CutByLayout,
    Decaying,
    Decoupled,
    DividedByStd,
    Evaluated,
    Generated,
    HostMemory,
    Losses,
    NarrowWeights,
    OfRuns,
    OnGPU,
    OnTheFly,
    OwnWeights,
    Processes,
    Read,
    Real,
    RealOrRoofline,
    Refilled,
    Rewarded,
    Roofline,
    Saved,
    ScoredApart,
    ScoredInTime,
    Simulated,
    Travelling,
    WithCritic,
    WithExperts,
    WithKL,
    WithKLTarget,
    WithLoRA,
    WithLossKL,
    WithoutKL,
    WithTexts,
    plain_value,
)
from harness.config.registries import check_name

DEALT_AGAIN = 1 << 26
"""A place whose group was refused by a filter, or took too long, is dealt another: its number is as much higher each
time."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The shape of a decoder. `checkpoint` is a folder with weights or a repository of the hub, `hf:<org>/<name>`
    (harness/config/model_folder.py), or None for made ones."""

    name: Read[Name]
    hidden: Read[Count]
    layers: Read[Count]
    heads: Read[Count]
    kv_heads: Read[Count]
    head_dim: Read[Count]
    ff: Read[Count]
    vocabulary: Read[Count]
    tied_embeddings: Read[Switch]
    max_length: Read[Count]  # tokens, prompt and response together
    dtype: Read[Literal["float32", "bfloat16"]] = "float32"
    checkpoint: Real[str | None] = None
    experts: Read[CountFromZero] = 0  # feed-forward networks of each layer to choose from; 0: one for all
    active_experts: Read[CountFromZero] = 0  # chosen for each token; each is `ff` wide
    warm_start: Real[OwnWeights[Switch]] = False  # trained first on noisy demonstrations: RL has something to sharpen
    architecture: Read[str] = "qwen3"  # transformers' model_type
    tokenizer: Real[str | None] = None  # a folder or repository with one; None takes the checkpoint's
    attention_bias: Read[Literal["none", "qkv", "all"]] = "none"  # projections of attention that have biases
    qk_norm: Read[Switch] = True  # queries and keys are normalised head by head
    sliding_window: Read[Count | None] = None  # tokens before a token, with itself, that `sliding_layers` layers see
    sliding_layers: Read[CountFromZero] = 0
    rope_theta: Real[Positive] = 10000.0
    norm_eps: Real[Positive] = 1e-6
    fp32_head: NarrowWeights[Switch | None] = None  # logits in float32 whatever the dtype; None: where it is bfloat16

    @property
    def float32_logits(self) -> bool:
        """Whether logits are computed in float32: in bfloat16 log-probabilities are off by up to .09."""
        return self.dtype != "float32" if self.fp32_head is None else self.fp32_head


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """The rollout engine. `options` are its own and are checked by its class."""

    name: Real[NameOrPath]
    slots: Read[Count]  # samples one engine generates at a time
    tensor_parallel: Read[Count] = 1  # devices of one engine; real ones by its TENSOR_PARALLEL, beside no other role
    keep_cache: OnTheFly[Switch] = False  # keep the KV cache of running samples across a weight update
    sample_limit_s: Read[Positive | None] = None  # of a sample, from when an engine gets it; None: as long as it takes
    on_straggler: Read[Literal["wait", "cut", "drop"]] = "wait"  # what becomes of one that takes longer; docs/faults.md
    options: Real[dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_straggler != "wait" and self.sample_limit_s is None:
            raise ValueError(
                f"on_straggler={self.on_straggler} needs a limit; set engine.sample_limit_s, in seconds, such as 600"
            )
        if self.on_straggler == "wait" and self.sample_limit_s is not None:
            raise ValueError(
                f"sample_limit_s={self.sample_limit_s:g} with on_straggler=wait limits nothing; set "
                "engine.on_straggler=cut or drop"
            )


COMMON_TO_ENGINES = tuple(own.name for own in fields(EngineConfig) if own.name != "options")
"""Settings of every engine; what else stands beside them is an option of one."""


@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    """Prompts and rewards. `options` are the task's own and are checked by its class."""

    name: Real[NameOrPath]
    reward: Real[str | None] = None  # by name or `package.module:function`: what scores responses instead of the task
    reward_options: Real[Rewarded[dict[str, Any]]] = field(default_factory=dict)
    reward_processes: Real[CountFromZero | None] = None  # that score; 0: the worker of the host; None: by the reward
    reward_timeout_s: Real[ScoredInTime[Positive]] = 10.0  # longest scoring of one sample; then it has failed
    reward_memory_gib: Real[ScoredApart[Positive]] = 4.0  # address space of a process that scores
    on_failed_score: Read[Literal["leave_out", "redeal"]] = "leave_out"  # what becomes of a sample without a score
    failure_reward: Real[float | None] = None  # of such a sample, which then has a score; None: it has none
    failed_bound: Real[Part] = 0.01  # share of such samples above which a verdict is withheld
    pay_truncated: Real[bool] = False  # whether a response that the limit cut off may earn more than 0
    generate: Real[str | None] = None  # `package.module:coroutine` that plays each sample with the policy, turn by turn
    generate_options: Real[Generated[dict[str, Any]]] = field(default_factory=dict)
    generate_turns: Real[Generated[Count]] = 8  # that the policy has in it at most
    generate_timeout_s: Real[Generated[Positive]] = 30.0  # between two of its turns; then the sample has failed
    buffer: Read[str | None] = None  # `package.module:Class` that says which problem a group gets
    buffer_options: Buffered[dict[str, Any]] = field(default_factory=dict)
    buffer_state: Buffered[str | None] = None  # buffer.json of a run, from which it goes on
    options: Real[dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.failure_reward is not None and self.on_failed_score != "leave_out":
            raise ValueError(
                f"failure_reward={self.failure_reward:g} is a score: nothing is left for on_failed_score="
                f"{self.on_failed_score}; take one of the two out"
            )


COMMON_TO_TASKS = tuple(own.name for own in fields(TaskConfig) if own.name not in ("name", "options"))
"""Settings of every task; what else stands beside them is an option of one."""
_GREEDY_BASELINE = "remax"


def trained_in_iteration(algorithm: Mapping[str, Any]) -> int:
    """Samples that an iteration trains, by the settings of its algorithm: of groups with a greedy one, all others."""
    greedy = algorithm.get("advantage") == _GREEDY_BASELINE
    trained: int = algorithm["batch_groups"] * (algorithm["group_size"] - greedy)
    return trained


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """GRPO and its optimizer."""

    name: Read[Name]
    batch_groups: Read[Count]  # groups trained in one iteration
    group_size: Read[Annotated[int, Strict(), Field(ge=2)]]  # samples of a group
    micro_batch_groups: Read[Count]  # groups of one forward and backward, per training rank
    learning_rate: Real[NotNegative | Literal["auto"]]  # auto: by the model's size (harness/rl/learning_rate.py)
    warmup_steps: Real[CountFromZero] = 0  # over which it rises to that
    decay: Real[Literal["constant", "linear", "cosine"]] = "constant"  # of the learning rate, after them, over the run
    decay_to: Real[Decaying[Part]] = 0.0  # share of it that is left at the last step
    betas: Real[tuple[Decay, Decay]] = (0.9, 0.95)
    weight_decay: Real[NotNegative] = 0.0
    grad_clip: Real[Positive] = 1.0
    temperature: Real[Positive] = 1.0
    top_p: Real[Fraction] = 1.0
    normalise_std: DividedByStd[Switch] = True  # divide advantages by the group's deviation; gae: whiten the batch's
    correction: Losses[str] = "clip"  # how off-policy samples are treated: docs/algorithms.md
    aggregation: Real[str] = "token_mean"  # of the losses of tokens
    proximal: Decoupled[Literal["actor_fwd", "trainer", "log_linear"]] = "actor_fwd"  # what decoupled losses clip to
    kl_coef: Read[NotNegative] = 0.0
    kl: Real[WithKL[str]] = "k3"  # estimator of the KL to the reference
    kl_unbiased: Real[WithLossKL[Switch]] = False  # in the loss, weighed by pi / mu: tokens are of another policy
    kl_in: WithKL[Literal["loss", "reward"]] = "loss"  # what kl_coef times the KL is part of
    kl_target: WithKL[Positive | None] = None  # nats a token: in the reward, kl_coef follows it from batch to batch
    kl_horizon: Real[WithKLTarget[Count]] = 10_000  # samples over which it does
    reference: WithoutKL[Switch] = False  # run the reference model without a KL term too, for policy/kl_ref
    recompute_log_probs: Read[Switch] = True  # run actor_fwd: for decoupled, a token baseline and policy/mismatch_kl
    advantage: Read[str] = "group"  # how rewards are compared
    critic_learning_rate: Real[WithCritic[NotNegative | Literal["auto"]]] = "auto"  # auto: by the model's size
    value_clip: Real[WithCritic[Positive | None]] = 0.5  # how far a value may move from the old one; None: any way
    mini_batches: Read[Count] = 1  # parts of a batch, of whole groups, each with an optimizer step of its own
    epochs: Read[Count] = 1  # passes over a batch
    shaping: Read[list[str]] = field(default_factory=list)  # of rewards, in this order
    rejection: Real[dict[str, tuple[float | None, float | None]]] = field(default_factory=dict)  # bounds by measure
    filter: Read[str] = "none"  # groups that it refuses are generated anew, from other prompts
    filter_rounds: Refilled[Count] = 10  # times a batch that may be generated for it; then the run ends, and says why
    over_sampling: Refilled[AtLeast1] = 1.0  # times a batch, admitted at first: refused groups are replaced at once
    mask_truncated: Read[Switch] = False  # responses cut off at max_tokens have no loss
    max_token_staleness: Read[CountFromZero | None] = None  # iterations; tokens that lag by more have no loss
    entropy_coef: Real[NotNegative] = 0.0  # of the entropy of each token's distribution, which the loss is less
    options: Real[dict[str, Any]] = field(default_factory=dict)  # of the correction, advantage, shaping and filter

    @property
    def batch_samples(self) -> int:
        """Samples generated for one iteration."""
        return self.batch_groups * self.group_size

    @property
    def admitted_groups(self) -> int:
        """Groups admitted for one iteration at first: those that it trains, and its spares."""
        return math.ceil(round(self.over_sampling * self.batch_groups, 9))

    @property
    def spare_groups(self) -> int:
        """Groups admitted at first that are not trained."""
        return self.admitted_groups - self.batch_groups

    @property
    def mini_batch_groups(self) -> int:
        """Groups of one optimizer step."""
        return self.batch_groups // self.mini_batches

    @property
    def trained_samples(self) -> int:
        """Samples trained in one iteration."""
        return trained_in_iteration(vars(self))

    @property
    def has_greedy_baseline(self) -> bool:
        """Whether the first sample of each group is drawn greedily, and what its reward is taken off the others'."""
        return self.advantage == _GREEDY_BASELINE

    @property
    def steps_per_version(self) -> int:
        """Optimizer steps from one version of the weights to the next."""
        return self.mini_batches * self.epochs

    @property
    def filters(self) -> bool:
        """Whether some groups may be refused."""
        return self.filter != "none"

    @property
    def has_critic(self) -> bool:
        """Whether there is a model of values, which advantages are made with."""
        return self.advantage == "gae"

    @property
    def has_token_baseline(self) -> bool:
        """Whether advantages are made of how log-probs change with the logits, which actor_fwd computes."""
        return self.advantage == "optimal_token_baseline"

    @property
    def has_reference(self) -> bool:
        """Whether the reference model runs: the loss reads it, or somebody asked for policy/kl_ref."""
        return self.reference or self.kl_coef > 0

    @property
    def has_loss_kl(self) -> bool:
        """Whether the loss has a term for the KL to the reference."""
        return self.kl_in == "loss" and self.kl_coef > 0

    @property
    def has_reward_kl(self) -> bool:
        """Whether rewards are less the KL to the reference before they are compared."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @property
    def has_proximal(self) -> bool:
        """Whether the loss clips against another policy than that which sampled."""
        return self.correction in ("decoupled", "decoupled_tis")

    @property
    def train_on_old_log_probs(self) -> bool:
        """Whether the loss is made of what actor_fwd computes."""
        return self.has_proximal and self.proximal == "actor_fwd"

    @property
    def learns_from_actor_fwd(self) -> bool:
        """Whether anything that is learnt is made of what actor_fwd computes."""
        return self.train_on_old_log_probs or self.has_token_baseline

    @property
    def freezes_proximal(self) -> bool:
        """Whether the trainer scores a batch before its first step, to clip against: where it makes one step only, the
        policy before that step is the one in training."""
        return self.has_proximal and self.proximal == "trainer" and self.steps_per_version > 1


Backend = Literal["real", "virtual", "paced"]
Layout = Literal["padded", "packed"]
"""How a micro-batch is laid out: a row for each sample, filled up to the longest; or all of them in one row."""

OptimizerOffload = Literal["none", "between_phases", "always"]
"""Never; whenever no step is made; and of a step, all but the parameter of which it is the turn."""


def routes_dtype(experts: int) -> Literal["uint8", "int16"]:
    """The dtype in which experts of tokens are told (`harness.protocols.Completion`), of a layer that has so many."""
    return "uint8" if experts <= 256 else "int16"


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How training is computed; what is learnt stays the same but for rounding."""

    name: Read[Name] = "fsdp"
    engine: Read[NameOrPath] = "torch"  # that trains the model; docs/adding_an_engine.md
    layout: CutByLayout[Layout] = "padded"  # for training and for scoring
    tokens_per_micro_batch: Read[Count | None] = None  # most tokens of a pass, whole samples; None: no limit
    recompute_activations: RealOrRoofline[Switch] = False  # none are kept inside of layers; costs another forward pass
    logit_bytes: RealOrRoofline[Count] = 128 << 20  # float32 logits of the output layer that exist at a time
    compile: Real[Switch] = False  # blocks by torch.compile; engines/torch/model.py says what that costs
    optimizer_offload: OnGPU[OptimizerOffload] = "none"  # AdamW's moments rest on the host; engines/torch/moments.py
    reference_offload: HostMemory[BesideReference[Switch]] = False  # beside the actor, on the host: a copy a layer
    routing_replay: Real[WithExperts[Switch]] = False  # training and its scorers route as rollout did; docs/data.md
    lora_rank: Read[CountFromZero] = 0  # of adapters, trained instead of the weights; 0: none; docs/data.md
    lora_alpha: WithLoRA[Positive] = 32.0  # an adapter's output is times this over the rank
    lora_targets: WithLoRA[list[str]] = field(default_factory=list)  # linear layers, such as [q_proj]; []: all
    tensor_parallel: Read[Count] = 1  # ranks that share each layer, and each micro-batch
    pipeline_parallel: Read[Count] = 1  # stages that the layers are cut into; parts of a micro-batch follow one another
    expert_parallel: Read[Count] = 1  # data-parallel ranks over which experts are spread, neighbours

    @property
    def ranks_together(self) -> int:
        """Ranks that hold one copy of the layers between them, and train on the same micro-batches."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    """The devices of the job. On a CPU machine one device is one core."""

    name: Read[Name]
    devices: Read[Devices]
    kind: Real[Literal["auto", "cpu", "gpu"]] = "auto"
    threads_per_device: Real[Count] = 1
    oversubscribe: Real[Switch] = (
        False  # more devices than cores, or one GPU for all: a trial, whose times do not count
    )
    bucket_bytes: Read[Count] = 64 << 20  # weights travel in pieces of at most this
    transfer_attempts: Processes[Count] = 3  # how often weights are sent to an engine that does not get them
    verify_weights: Travelling[Switch] = False  # hold every tensor that arrives against its digest
    delta_weights: BetweenDevices[Switch] = False  # send only what changed since the version before; always verified
    on_lost_engine: Read[Literal["end", "go_on"]] = "end"  # of the run, where an engine is lost for good
    serve_membership: Processes[Switch] = False  # over HTTP on loopback: how engines are, and who is to leave or join
    wait_timeout_s: Processes[Positive] = 300.0  # longest wait for a process to start, meet others, or pass weights on
    stall_timeout_s: Processes[Positive] = 1800.0  # longest time in which nobody computes; then the run ends
    call_timeout_s: Processes[Positive] = 3600.0  # longest wait for a device, or for an answer that needs no work
    heartbeat_timeout_s: Processes[Positive] = 600.0  # longest silence of a worker; then it counts as dead
    queue: Read[NameOrPath | None] = None  # where rows rest: harness/transfer_queue/README.md; None: by runtime
    queue_options: Read[dict[str, Any]] = field(default_factory=dict)
    memory_gib: Real[Positive | None] = None  # memory of one device; asked from the machine when None


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Held-out accuracy; docs/results.md. Its time is no part of the run's."""

    every: Read[CountFromZero | Literal["auto"]] = "auto"
    """Versions between two evaluations; the first and the last one besides. 0: none; auto: as `harness.checks.job`
    settles it for a run that is a result."""
    samples: Evaluated[Count] = 128  # held-out problems
    k: Evaluated[Annotated[int, Strict(), Field(ge=0, lt=4096)]] = 2  # responses sampled to each, besides a greedy one
    function: Evaluated[str | None] = None  # `package.module:coroutine` that evaluates besides, in its own way

    @property
    def period(self) -> int:
        """`every` as a number; 0 for an auto that nobody settled."""
        return 0 if self.every == "auto" else self.every


@dataclass(frozen=True, config=STRICT)
class TextsConfig:
    """Prompts and responses as text, beside tokens, in samples.parquet and eval_responses.parquet; docs/results.md."""

    samples: Read[CountFromZero] = 1000  # of each file, spread evenly over the run; 0: none
    characters: WithTexts[Count] = 2000  # of each text at most


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints, from which a run goes on when it ended early; docs/faults.md."""

    every: Read[CountFromZero] = 0  # versions between two checkpoints; 0: none
    keep: Saved[Count] = 2  # newest ones that stay
    background: Saved[Switch] = True  # trainers go on while their state is written; it is in host memory meanwhile
    begin_with: Read[str | None] = None  # a cell's folder, of the same job elsewhere, whose checkpoints to begin with


@dataclass(frozen=True, config=STRICT)
class RestartsConfig:
    """Restarts of a run of which a role dies; docs/faults.md."""

    limit: Read[CountFromZero] = 3  # times that the same roles are started again in a run; 0: its first death ends it


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """The schedule and its devices. `options` are the schedule's own and are checked by its class.

    `split` gives for each role a number of devices, a percentage, `rest`, or the role whose devices it shares.
    """

    name: Read[NameOrPath]
    split: Read[dict[str, Share]]
    options: Read[dict[str, Any]]


@dataclass(frozen=True, config=STRICT)
class JobConfig:
    """Everything that decides a run, except its seed."""

    experiment: OfRuns[Name]
    backend: Read[Literal["auto", "real", "virtual", "paced"]]
    iterations: Read[Count]
    seeds: OfRuns[Seeds]  # a number of seeds (0, 1, ...) or the seeds themselves
    smoke: Read[Switch]
    force: OfRuns[Switch]  # run again what is already done
    warmup_iterations: Read[CountFromZero]  # left out of throughput and idle shares
    schedule: Read[ScheduleConfig]
    model: Read[ModelConfig]
    engine: Read[EngineConfig]
    task: Read[TaskConfig]
    algorithm: Read[AlgorithmConfig]
    training: Read[TrainingConfig]
    cluster: Read[ClusterConfig]
    cost: Simulated[Annotated[CostConfig | RooflineConfig, Field(discriminator="kind")]]  # of simulated work
    device: Roofline[DeviceConfig]  # that a roofline is of
    eval: Real[EvalConfig] = field(default_factory=EvalConfig)
    checkpoint: OfRuns[CheckpointConfig] = field(default_factory=CheckpointConfig)
    replay: Read[str | None] = None  # a cell's folder, of the same job, whose order of arrival to keep: docs/replay.md
    restarts: OfRuns[RestartsConfig] = field(default_factory=RestartsConfig)
    texts: OfRuns[TextsConfig] = field(default_factory=TextsConfig)
    loggers: OfRuns[tuple[str, ...]] = ("mlflow",)  # that hear the metrics of a run besides its folder
    max_tokens: Real[Count | None] = None  # of a response; None takes the task's own
    save_weights: OfRuns[Switch] = True  # keep the final weights in the run's folder

    @property
    def replays_routing(self) -> bool:
        """Whether tokens go to the experts that rollout chose, where a run or what may become one has tokens."""
        real = self.backend in ("auto", "real")
        return self.training.routing_replay and self.model.experts > 0 and real

    @property
    def refills(self) -> bool:
        """Whether a group may be given up after it was sampled, and its place in the batch dealt another."""
        return self.algorithm.filters or self.engine.on_straggler == "drop" or self.task.on_failed_score == "redeal"

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """Each setting that names code of a registry, and what it names."""
        algorithm, reward = self.algorithm, self.task.reward
        return (
            ("schedule", self.schedule.name),
            ("engine", self.engine.name),
            ("training.engine", self.training.engine),
            ("task", self.task.name),
            *((("task.reward", reward),) if reward is not None else ()),
            ("algorithm.correction", algorithm.correction),
            ("algorithm.advantage", algorithm.advantage),
            ("algorithm.aggregation", algorithm.aggregation),
            ("algorithm.kl", algorithm.kl),
            ("algorithm.filter", algorithm.filter),
            *(("algorithm.shaping", step) for step in algorithm.shaping),
            *(("algorithm.rejection", measure) for measure in algorithm.rejection),
            *((("cluster.queue", self.cluster.queue),) if self.cluster.queue is not None else ()),
        )

    @property
    def seed_list(self) -> tuple[int, ...]:
        """Seeds of all runs."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else tuple(self.seeds)


_CLIPPING = ("clip", "dual_clip", "decoupled", "opsm", "clip_cov", "m2po")
_MOVED: Mapping[str, tuple[str, float, tuple[str, ...]]] = {
    "clip_low": ("clip_low", 0.2, _CLIPPING),
    "clip_high": ("clip_high", 0.2, _CLIPPING),
    "decoupled_cap": ("cap", 5.0, ("decoupled",)),
    "tis_cap": ("cap", 2.0, ("tis", "tis_normalised")),
    "mis_low": ("low", 0.5, ("mis",)),
    "mis_high": ("high", 5.0, ("mis",)),
}
"""Settings of every algorithm in earlier versions: the option that each is now, its default, and the losses with it."""


def refuse_moved(setting: str, value: object) -> None:
    """Raises ConfigError for a setting that is an option of a loss now."""
    group, _, name = setting.partition(".")
    if group == "algorithm" and name in _MOVED:
        option, _, losses = _MOVED[name]
        raise ConfigError(
            f"{setting}={value} is an option of its loss now; set algorithm.options.{option}={value}, with "
            f"algorithm.correction={' or '.join(losses)}"
        )


def in_words_of_now(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config.yaml of a run, also of one that an earlier version made: settings that it does not name have their
    defaults, and those that have moved are where they are now, or nowhere, where the run did not read them."""
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, Mapping) and _MOVED.keys() & algorithm.keys():
        options = {
            option: algorithm[name]
            for name, (option, default, losses) in _MOVED.items()
            if algorithm.get("correction", "clip") in losses and algorithm.get(name, default) != default
        }
        kept = {name: value for name, value in algorithm.items() if name not in _MOVED}
        tree = {**tree, "algorithm": {**kept, "options": dict(algorithm.get("options") or {}) | options}}
    evaluated = {"every": 0, "samples": 64, "k": 0} | dict(tree.get("eval") or {})  # once it was for who asked for it
    return _completed({**tree, "eval": evaluated}, JobConfig)


_types_of = cache(get_type_hints)  # reading annotations took more than reading a run's file


def _completed(tree: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Settings with the defaults of those that are not among them; options, which stand beside a name, as they are."""
    found, types = dict(tree), _types_of(kind)
    for own in fields(kind):
        beside = own.name == "options" and kind is not AlgorithmConfig
        if own.name in found:
            if isinstance(found[own.name], Mapping) and is_dataclass(types[own.name]):
                found[own.name] = _completed(found[own.name], types[own.name])
        elif not beside and own.default is not MISSING:
            found[own.name] = plain_value(own.default)
        elif not beside and own.default_factory is not MISSING:
            found[own.name] = plain_value(own.default_factory())
    return found


def job_config(tree: Mapping[str, Any]) -> JobConfig:
    """Check types and names of a composed configuration tree. Raises ConfigError for the first setting that is off."""
    tree = dict(tree)
    for name, value in dict(tree.get("algorithm") or {}).items():
        refuse_moved(f"algorithm.{name}", value)
    schedule, task = dict(tree.get("schedule") or {}), dict(tree.get("task") or {})
    named = {"name": schedule.pop("name", None), "split": schedule.pop("split", {})}
    tree["schedule"] = named | {"options": schedule}
    own = {name: task.pop(name) for name in COMMON_TO_TASKS if name in task}
    tree["task"] = {"name": task.pop("name", None), **own, "options": task}
    engine = dict(tree.get("engine") or {})
    common = {name: engine.pop(name) for name in COMMON_TO_ENGINES if name in engine}
    tree["engine"] = common | {"options": engine}
    try:
        config = TypeAdapter(JobConfig).validate_python(tree)
    except ValidationError as error:
        raise ConfigError(first_line(error)) from error
    for setting, name in (*config.named, *(("loggers", name) for name in config.loggers)):
        check_name(setting, name)
    return config


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by their path, names joined by dots: {"schedule": {"eta": 1}} -> {"schedule.eta": 1}. Lists are leaves."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
