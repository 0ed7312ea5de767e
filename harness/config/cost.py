"""Settings of what is simulated: how long work takes, and how long responses are."""

from typing import Annotated, Literal

from pydantic import Field, Strict
from pydantic.dataclasses import dataclass

from harness.config.fields import STRICT, Count, Fraction, Name, NotNegative, Part, Positive, Switch
from harness.config.readers import Drawn, Read, Shared, Spread, Taken, Traced, WithDelta, WithFilter, WithTurns
from harness.config.registries import check_name


@dataclass(frozen=True, config=STRICT)
class LengthsConfig:
    """How many tokens simulated responses have. Every kind gives whole numbers from 1 to `cap`.

    constant: `mean`, always; uniform: 1 to 2 mean - 1; lognormal: of this mean before the cap, `sigma` the standard
    deviation of the logarithm, of whose square the samples of a group have `common` in common, as they answer the same
    prompt; trace: drawn from `values`, or from the file at `path`, a number per line. Those of batch i
    are drift^i times as long, before the cap: policies learn to say more, or less.
    """

    kind: Read[Literal["constant", "uniform", "lognormal", "trace"]]
    cap: Read[Count]
    mean: Drawn[Annotated[float, Strict(), Field(ge=1)] | None] = None
    sigma: Spread[NotNegative] = 1.0
    common: Spread[Part] = 0.0
    values: Traced[tuple[Count, ...]] = ()
    path: Traced[str | None] = None
    drift: Read[Positive] = 1.0

    def __post_init__(self) -> None:
        if self.kind != "trace" and self.mean is None:
            raise ValueError(f"needs a mean where kind={self.kind}; set cost.lengths.mean=100")
        if self.kind == "trace" and bool(self.values) == (self.path is not None):
            raise ValueError("needs either values or a path where kind=trace; set one of cost.lengths.values and .path")


@dataclass(frozen=True, config=STRICT)
class LatencyConfig:
    """Seconds that a simulated environment takes to answer a turn: constant: `mean`, always; lognormal: of this mean,
    `sigma` the standard deviation of the logarithm. Answers that take longer than `timeout_s` fail their sample."""

    kind: Read[Literal["constant", "lognormal"]] = "constant"
    mean: Read[NotNegative] = 0.0
    sigma: Spread[NotNegative] = 1.0
    timeout_s: Read[Positive] = 3600.0


@dataclass(frozen=True, config=STRICT)
class BytesCost:
    """Moving bytes lasts fixed_s, and the bytes over bytes_per_s."""

    fixed_s: NotNegative
    bytes_per_s: Positive


@dataclass(frozen=True, config=STRICT)
class TransferCost:
    """Weights by one transport from so many training ranks, as `make profile` times them. send: until the trainer goes
    on; stage: from then until they are in an engine's host memory, nothing of which where it is None; load: what an
    engine waits, besides sync_s."""

    transport: str
    ranks: Count
    send: BytesCost
    load: BytesCost
    stage: BytesCost | None = None

    def __post_init__(self) -> None:
        check_name("schedule.transport", self.transport, "cost.transfers.transport")


@dataclass(frozen=True, config=STRICT)
class RecurringCost:
    """Seconds with every so many versions."""

    seconds: Read[NotNegative] = 0.0
    every: Read[Count] = 1

    def of(self, version: int) -> float:
        """Seconds with this version; the first weights have none."""
        return self.seconds if version and version % self.every == 0 else 0.0


ONE_TOKEN = LengthsConfig(kind="constant", mean=1.0, cap=1)
NO_LATENCY = LatencyConfig()


@dataclass(frozen=True, config=STRICT, kw_only=True)
class SystemConfig:
    """Ways of the simulated system, and what its samples do besides: of both kinds of costs."""

    turns: Read[LengthsConfig | None] = None  # how often the policy speaks in one sample, of `lengths` each; None: once
    observation_tokens: WithTurns[LengthsConfig] = ONE_TOKEN  # that the environment writes after each turn but the last
    tool_latency: WithTurns[LatencyConfig] = NO_LATENCY
    filtered_share: WithFilter[Part | None] = None  # of groups, that `algorithm.filter` refuses
    prefix_caching: Read[Switch] = False  # samples of a group that an engine runs share its prompt in the KV cache
    step_tokens: Read[Count | None] = None
    """Tokens that an engine computes in a step, prompts beside running samples (vLLM's max_num_batched_tokens; SGLang's
    chunked_prefill_size with its mixed chunks); None: all wait while prompts are prefilled (SGLang without)."""
    evaluation: Read[RecurringCost] = RecurringCost()  # an engine that took a version evaluates it before it goes on
    checkpoint: Read[RecurringCost] = RecurringCost()  # training stands still after the last step of a version
    convert_s: Read[NotNegative] = 0.0
    """Seconds to bring weights from the training layout to that of engines: gathered, cast, renamed. In so many
    `buckets` it goes on beside sending; each takes `bucket_s` besides."""
    buckets: Read[Count] = 1
    bucket_s: Read[NotNegative] = 0.0
    changed_share: WithDelta[Part] = 0.02
    """Share of the weights' words, of 4 bytes, that change from version to version, where only those are sent. As
    measured: docs/weight_sync.md."""
    delta_bytes_per_s: WithDelta[Positive] = 0.3e9  # bytes of weights that a busy core compares and puts in place
    dealing: Read[Literal["balanced", "in_order"]] = "balanced"
    """Shares of ranks in a micro-batch: by tokens, as Cadence's queue deals, or as many in a row for each."""
    padding: Read[Switch] = False
    """A pass that trains or scores has its longest sample's tokens for all of its samples, with training.layout=padded;
    else costs of a token are of those that samples have, whatever the layout."""

    def __post_init__(self) -> None:
        for name, lengths in (("turns", self.turns), ("observation_tokens", self.observation_tokens)):
            for setting, none in (("common", 0), ("drift", 1)):
                if lengths is not None and (given := getattr(lengths, setting)) != none:
                    where = f"{name}.{setting}"
                    raise ValueError(f"{where}={given}: each sample draws its own; set cost.{where}={none}")


@dataclass(frozen=True, config=STRICT)
class CostConfig(SystemConfig):
    """Costs of simulated work on one worker: a rollout engine, or a data-parallel rank. Seconds, tokens, bytes.

    A decode step of n samples that hold c tokens in all lasts decode_step_s + max(decode_weights_s + decode_experts_s
    (1 - (1 - expert_share)^n), n decode_step_s_per_sample) + c decode_s_per_cached_token.
    """

    name: Read[Name]
    decode_step_s: Read[Positive]  # one token for every running sample: the part that does not depend on how many run
    decode_step_s_per_sample: Read[NotNegative]  # added for each running sample
    prefill_s_per_token: Read[NotNegative]
    log_prob_s_per_token: Read[NotNegative]  # prompt and response tokens
    train_s_per_token: Read[NotNegative]  # prompt and response tokens, forward and backward
    train_step_s: Read[NotNegative]  # the optimizer, once a step
    weight_bytes: Read[NotNegative]  # of one copy of the weights
    call_s: Read[NotNegative]  # fixed part of every forward or training call of a micro-batch
    network_bytes_per_s: Read[Positive]  # weights between pools: collective, and in the background
    host_bytes_per_s: Read[Positive]  # weights between a device and its host, either way
    sync_s: Read[NotNegative]  # fixed part of every weight transfer, and of every load
    offload_s: Taken[NotNegative]  # fixed part of giving a shared device back (the weights go to the host besides)
    reload_s: Taken[NotNegative]  # fixed part of taking it again (the weights come back besides)
    prompt_tokens: Read[Count]  # of every prompt
    lengths: Read[LengthsConfig]
    kind: Read[Literal["given"]] = "given"
    # What follows is nothing unless it is given.
    decode_weights_s: Read[NotNegative] = 0.0  # a step's matrix products take this long at least: the weights are read
    decode_experts_s: Read[NotNegative] = 0.0  # besides, where every expert is read
    expert_share: Read[Fraction] = 1.0  # of all experts, that one token goes through
    decode_s_per_cached_token: Read[NotNegative] = 0.0  # of a step, for each token in the KV caches of running samples
    kv_tokens: Read[Count | None] = None  # tokens that the KV cache of one engine holds; None is no limit
    prefill_s_per_pair: Read[NotNegative] = 0.0  # attention: for the square of a sequence's length
    log_prob_s_per_pair: Read[NotNegative] = 0.0
    train_s_per_pair: Read[NotNegative] = 0.0
    log_prob_call_s: Read[NotNegative] = 0.0  # besides call_s: shards are gathered
    train_call_s: Read[NotNegative] = 0.0  # besides call_s: shards are gathered, gradients reduced
    reward_s_per_sample: Read[NotNegative] = 0.0  # on the host
    generate_s: Read[NotNegative] = 0.0  # before a batch is generated as one: requests are handed out, engines set up
    transfers: Read[tuple[TransferCost, ...]] = ()  # that were timed; others go by the bytes and speeds above


@dataclass(frozen=True, config=STRICT)
class DeviceConfig:
    """One kind of device, by its maker's figures. `source` says where they stand."""

    name: Read[Name]
    flops: Read[Positive]  # dense bfloat16 floating-point operations per second
    memory_bytes_per_s: Read[Positive]
    memory_bytes: Read[Positive]
    link_bytes_per_s: Read[Positive]  # of one device to the others of its node, one way
    network_bytes_per_s: Read[Positive]  # of one device to those of other nodes, one way
    host_bytes_per_s: Read[Positive]  # of one device to its host's memory, one way
    per_node: Read[Count]  # devices of a node
    source: Read[str]
    host_memory_bytes: Read[Positive] = 1.0e12  # of a node's host; assumed where nothing is said, as in earlier runs


@dataclass(frozen=True, config=STRICT)
class RooflineConfig(SystemConfig):
    """Factors between a device's figures and costs: the shares of its peaks that are reached, and what no peak
    explains.

    docs/simulator.md says the formulas in short. Shares are of (0, 1]; seconds are added.
    """

    name: Read[Name]
    kind: Read[Literal["roofline"]]
    forward_share: Read[Fraction]  # of flops, scoring and prefill
    train_share: Read[Fraction]  # of flops, forward and backward
    decode_share: Read[Fraction]  # of flops, a decode step's matrix products
    memory_share: Read[Fraction]  # of memory_bytes_per_s
    network_share: Read[Fraction]  # of link_bytes_per_s and network_bytes_per_s
    host_share: Read[Fraction]  # of host_bytes_per_s
    overlap: Read[Part]  # of communication in training and scoring that hides behind computing
    latency_s: Read[NotNegative]  # of one collective
    kv_share: Read[Fraction]  # of a device's memory that an engine of its own may use, weights and KV cache together
    kv_share_colocated: Taken[Fraction]  # of a device that it shares with the trainer
    colocated_train_factor: Shared[Positive]  # how much longer training takes on devices shared with rollout
    decode_step_s: Read[Positive]  # of every step: launches and the engine's own work
    call_s: Read[NotNegative]
    sync_s: Read[NotNegative]
    offload_s: Taken[NotNegative]
    reload_s: Taken[NotNegative]
    reward_s_per_sample: Read[NotNegative]
    prompt_tokens: Read[Count]
    lengths: Read[LengthsConfig]
