"""The contents of each device of a job, and when they are there: the one count of memory behind the check at the door,
`make doctor`, the planner and the simulator.

A plan has a row for each thing (weights, optimizer, activations, KV cache, ...) on the devices of each pool, and the
phases in which it is there. What a colocated engine holds is there while it generates, and on the host while it sleeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from harness.config import JobConfig
from harness.config.placement import ENGINE_ROLES, Placement
from harness.config.readers import described_engine
from harness.config.transports import TransferMemory, transport_of
from harness.cost_model.host_memory import HostLoad, HostMemory, Hosts, fullest_host, row_bytes
from harness.cost_model.memory import EngineMemory
from harness.cost_model.shape import (
    adapter_parameters,
    bytes_per_number,
    expert_parameters,
    head_parameters,
    linear_layers,
    weight_bytes,
)
from harness.cost_model.training_memory import PassShape, RankMemory

GIB = 1 << 30

Phase = Literal["start", "generate", "score", "loss", "backward", "reduce", "step", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""start: roles are made. generate: an engine samples. score: log-probabilities without gradients. loss, backward,
reduce, step: of a micro-batch, the moments of harness/cost_model/training_memory.py. publish: weights travel."""

TRAINING: tuple[Phase, ...] = ("loss", "backward", "reduce", "step")

USABLE = 0.9
"""Share of a device's memory that a job may use. The rest is the driver's, CUDA's and the libraries' in one process,
and lost between blocks: assumed, not measured."""

ANOTHER_PROCESS = 1 << 30
"""Bytes of a GPU that an engine's own process takes besides what it holds: CUDA's context, kernels, workspaces,
captured graphs. Assumed, not measured. One process computes on each of an engine's devices; as their sources read, no
other makes a context: vLLM 0.32's core beside workers only schedules, its front end asks NVML, and neither SGLang
0.5.21's HTTP process nor its detokenizer touches a device, but for weight caches and images, which nobody asks for."""

_ENGINE_BUCKET = 64 << 20  # `weight_bucket_bytes` of vLLM and SGLang, where nobody set it


@dataclass(frozen=True)
class Item:
    """Bytes on each device of a pool, in these phases."""

    what: str
    bytes: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class PoolMemory:
    """A pool: the devices that the same roles share."""

    roles: tuple[str, ...]
    devices: int
    phases: tuple[Phase, ...]
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        """Roles of the pool, joined by `+`."""
        return "+".join(self.roles)

    def of(self, phase: Phase) -> float:
        """Bytes on each device in a phase."""
        return sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def peak_phase(self) -> Phase:
        """The phase in which a device holds most."""
        return max(self.phases, key=self.of)

    @property
    def peak(self) -> float:
        """Bytes that a device holds in that phase."""
        return self.of(self.peak_phase)

    @property
    def weights(self) -> float:
        """Bytes of weights that always lie on a device: masters and copies."""
        return sum(item.bytes for item in self.items if item.what in WEIGHTS)


WEIGHTS = ("master weights", "critic's master weights", "engine's weights", "reference", "weights to score with")


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job's pools. there: bytes that may be used on each device; together: all pools are on one. host:
    the fullest host, where the job's are known."""

    pools: tuple[PoolMemory, ...]
    there: float
    together: bool = False
    host: HostMemory | None = None

    @property
    def fits(self) -> bool:
        """Whether no pool, and no host, needs more than is there."""
        return self.devices_fit and self.hosts_fit

    @property
    def devices_fit(self) -> bool:
        """Whether no pool needs more than is there."""
        return self.everything <= self.there if self.together else all(pool.peak <= self.there for pool in self.pools)

    @property
    def hosts_fit(self) -> bool:
        """Whether no host needs more than is there."""
        return self.host is None or self.host.everything <= self.host.there

    @property
    def fullest(self) -> PoolMemory:
        """The pool whose devices hold most."""
        return max(self.pools, key=lambda pool: pool.peak)

    @property
    def everything(self) -> float:
        """Bytes of all devices together, each at its fullest."""
        return sum(pool.devices * pool.peak for pool in self.pools)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest sample: prompt, and response with what an environment writes."""

    prompt: int
    response: int

    @property
    def sample(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt + self.response


@dataclass(frozen=True)
class PlanSetting:
    """The circumstances of a plan besides its job. device_bytes: memory of one device. simulated: of a cluster that is
    described: engines take what is left beside weights, micro-batches are cut by what fits, colocated training rests on
    the host, and training computes as published systems do. together: the job's devices are one. hosts: that they stand
    in; rows: that the queue may hold; keeps_weights: engines that sleep keep theirs."""

    lengths: Lengths
    device_bytes: float
    transport: str
    simulated: bool = False
    gpu: bool = True
    usable: float = USABLE
    together: bool = False
    hosts: Hosts | None = None
    rows: int = 0
    keeps_weights: bool = True


def plan_memory(config: JobConfig, placement: Placement, setting: PlanSetting) -> MemoryPlan:
    """The memory of every pool of the job, on the devices of its placement."""
    pools = [_pool(config, placement, name.split("+"), devices, setting) for name, devices in placement.pools.items()]
    there = setting.device_bytes * setting.usable
    return MemoryPlan(tuple(pools), there, setting.together, _fullest_host(config, placement, setting))


def _fullest_host(config: JobConfig, placement: Placement, setting: PlanSetting) -> HostMemory | None:
    if setting.hosts is None:
        return None
    rank = RankMemory(config.model, pass_of(config, placement, setting))
    trained = "critic" if "critic" in placement.devices else "actor"
    critic = RankMemory(config.model, pass_of(config, placement, setting, trained))
    algorithm, row = config.algorithm, row_bytes(config, setting.lengths.prompt, setting.lengths.response)
    kept = algorithm.batch_samples / rank.work.ranks * row if algorithm.steps_per_version > 1 else 0.0
    load = HostLoad(
        transport=setting.transport,
        rank=rank,
        critic=critic,
        row=row,
        rows=setting.rows,
        kept=kept,
        bucket=max(config.cluster.bucket_bytes, _largest_sent(config)),
        keeps_weights=setting.keeps_weights,
        gpu=setting.gpu,
    )
    return fullest_host(config, placement, load, setting.hosts)


def pass_of(config: JobConfig, placement: Placement, setting: PlanSetting, role: str = "actor") -> PassShape:
    """The forward and backward pass of a training rank of a role, as large as its micro-batches get."""
    training, algorithm, lengths = config.training, config.algorithm, setting.lengths
    samples = 1 if setting.simulated else algorithm.micro_batch_groups * algorithm.group_size
    tokens, scored = samples * lengths.sample, samples * lengths.response
    if training.tokens_per_micro_batch is not None:
        tokens = min(tokens, max(training.tokens_per_micro_batch, lengths.sample))
    together, engine = training.ranks_together, described_engine(training.engine, "training.engine")
    sliced = setting.simulated or getattr(engine, "SLICES_SEQUENCES", False)
    return PassShape(
        tokens=tokens,
        scored=min(scored, tokens) if training.layout == "packed" else tokens,
        ranks=max(1, len(placement.devices[role]) // together) * training.pipeline_parallel,
        tensor=training.tensor_parallel,
        between=training.tensor_parallel if sliced else 1,
        recompute=training.recompute_activations,
        megatron=setting.simulated,
        repeated_heads=_repeats_heads(config, setting),
        gpu=setting.gpu,
        expert_ranks=training.expert_parallel,
        logit_bytes=training.logit_bytes,
        adapters=adapter_parameters(config.model, training) if role == "actor" else 0,
    )


def _repeats_heads(config: JobConfig, setting: PlanSetting) -> bool:
    """Whether packed attention holds keys and values for each query head (`engines.torch.packing`)."""
    packed = config.training.layout == "packed"
    return packed and setting.gpu and config.model.dtype == "float32" and not setting.simulated


def _pool(
    config: JobConfig, placement: Placement, roles: list[str], devices: tuple[int, ...], setting: PlanSetting
) -> PoolMemory:
    phases: list[Phase] = ["start"]
    items: list[Item] = []
    rank = RankMemory(config.model, pass_of(config, placement, setting))
    engines = not set(ENGINE_ROLES).isdisjoint(roles)
    shared = engines and "actor" in roles
    if engines:
        phases.append("generate")
    if {"actor", "actor_fwd", "reference", "critic"} & set(roles):
        phases.append("score")
    if {"actor", "critic"} & set(roles):
        phases += TRAINING
    phases.append("publish")
    if engines:
        items += _engine(config, setting, tuple(phases), sleeps=shared)
    if "actor" in roles:
        # What is simulated rests on the host while rollout uses its devices.
        here = [phase for phase in phases if not (shared and setting.simulated and phase == "generate")]
        moments = _offloaded(config, rank, setting)
        items += training_items(rank, here, shared="rollout" in roles, moments=moments)
        if not getattr(described_engine(config.training.engine, "training.engine"), "SHARDS_WEIGHTS", True):
            items += _kept_whole(config, rank, tuple(here))
        items += _sent(config, rank, tuple(phase for phase in here if phase != "start"), setting)
        items += _kept_rows(config, pass_of(config, placement, setting).ranks, setting)
    if "critic" in roles:
        items += _critic(config, placement, setting, roles, phases)
    items += _scoring(config, rank, roles, len(devices), phases, setting)
    return PoolMemory(tuple(roles), len(devices), tuple(phases), tuple(items))


def _kept_whole(config: JobConfig, rank: RankMemory, phases: tuple[Phase, ...]) -> list[Item]:
    """Weights and gradients of a rank's layers and its experts, of which `training_items` counts a shard. Weights in
    float32 are the masters themselves."""
    ranks = max(1, rank.work.ranks // config.training.pipeline_parallel)
    experts = 4 * expert_parameters(config.model) / rank.shards
    parts = (rank.copy - experts, ranks), (experts, ranks // config.training.expert_parallel)
    gradients, number = sum(shard * (ranks - 1) for shard, ranks in parts), bytes_per_number(config.model)
    weights = gradients if number == 4 else sum(shard * ranks for shard, ranks in parts) * number / 4
    return [Item("weights, whole", weights, phases), Item("gradients, whole", gradients, phases)]


def training_items(
    rank: RankMemory, phases: Sequence[Phase], *, shared: bool = False, moments: Item | None = None
) -> list[Item]:
    """Memory of training itself on a device of a pool with these phases; the trainer scores, too. shared: with rollout,
    so that it scores and trains whole batches, and no gradients wait while it scores. moments: AdamW's, where they are
    not always there."""
    accumulated: tuple[Phase, ...] = TRAINING if shared else ("score", *TRAINING)
    computing: tuple[Phase, ...] = ("score", "loss", "backward")
    always = Item("optimizer state", 2 * rank.copy, tuple(phase for phase in phases if phase != "start"))
    return [
        Item("master weights", rank.copy + rank.frozen, tuple(phases)),
        moments or always,
        Item("gradients", rank.copy, accumulated),
        Item("embeddings, gathered", rank.gathered_embeddings, computing),
        Item("layers, gathered", rank.gathered_blocks, computing),
        Item("activations", rank.activations, ("loss", "backward")),
        Item("last norm", rank.last_norm, ("loss",)),
        Item("a layer, computed again", rank.recomputed, ("backward",)),
        Item("gradients inside of a layer", rank.layer_work, ("backward",)),
        Item("a layer's gradients, added up", rank.reducing_block, ("backward",)),
        Item("output layer", rank.head, ("loss",)),
        Item("output layer's gradient", rank.head_gradient, ("backward",)),
        Item("embeddings' gradients, added up", rank.reducing_embeddings, ("reduce",)),
        Item("optimizer's work", min(rank.optimizer_work, (moments or always).bytes / 2), ("step",)),
        Item("a forward pass", max(rank.forward_work, rank.head_forward), ("score",)),
    ]


_OUTPUT_LAYER = ("output layer", "output layer's gradient")


def _critic(
    config: JobConfig, placement: Placement, setting: PlanSetting, roles: list[str], phases: Sequence[Phase]
) -> list[Item]:
    """A policy without an output layer, counted with the table of embeddings that it may not share. Beside the actor it
    works when that does not, in memory that the actor has as well: only what stays comes on top."""
    rank = RankMemory(config.model, pass_of(config, placement, setting, "critic"))
    engines = not set(ENGINE_ROLES).isdisjoint(roles)
    here = [phase for phase in phases if not (engines and setting.simulated and phase == "generate")]
    items = training_items(rank, here, shared="rollout" in roles, moments=_offloaded(config, rank, setting))
    stays = ("master weights", "optimizer state", "gradients")
    kept = [item for item in items if item.what in stays or ("actor" not in roles and item.what not in _OUTPUT_LAYER)]
    return [replace(item, what=f"critic's {item.what}") for item in kept]


def training_peaks(rank: RankMemory) -> dict[Phase, float]:
    """Bytes of a device that only trains, in each of its phases."""
    phases: tuple[Phase, ...] = ("score", *TRAINING)
    pool = PoolMemory(("actor",), rank.shards, phases, tuple(training_items(rank, phases)))
    return {phase: pool.of(phase) for phase in phases}


def training_peak(rank: RankMemory) -> float:
    """Bytes of a rank that does nothing but train, at its fullest."""
    peaks = training_peaks(rank)
    return max(peaks[phase] for phase in TRAINING)


def _offloaded(config: JobConfig, rank: RankMemory, setting: PlanSetting) -> Item | None:
    """AdamW's moments where they rest in the memory of the host: a step has them, or those of one parameter
    (engines/torch/moments.py). None where they stay on the device."""
    offload = config.training.optimizer_offload
    if offload == "none" or not setting.gpu or setting.simulated:
        return None
    one = 2 * 4.0 * _largest_sent(config) / bytes_per_number(config.model) / rank.shards
    return Item("optimizer state", one if offload == "always" else 2 * rank.copy, ("step",))


def _kept_rows(config: JobConfig, ranks: int, setting: PlanSetting) -> list[Item]:
    """The share of a batch that a rank keeps for later passes in the host's memory: that of cores."""
    algorithm, lengths = config.algorithm, setting.lengths
    if setting.gpu or setting.simulated or algorithm.steps_per_version == 1:
        return []
    row = row_bytes(config, lengths.prompt, lengths.response)
    return [Item("rows kept for later passes", algorithm.batch_samples / ranks * row, ("score", *TRAINING))]


def _sent(config: JobConfig, rank: RankMemory, phases: tuple[Phase, ...], setting: PlanSetting) -> list[Item]:
    """Memory of the transport where weights are sent."""
    held = _transfer(config, setting, sharded=rank.sharded)
    ranks = rank.work.ranks * rank.work.tensor
    return [
        Item(held.what, held.sender, phases if held.kept else ("publish",)),
        *_compared(config, setting, "weights as engines have them", ranks, phases),
    ]


def _engine(config: JobConfig, setting: PlanSetting, phases: tuple[Phase, ...], *, sleeps: bool) -> list[Item]:
    """Memory of a rollout engine in a pool with these phases. sleeps: while others use the device; then weights arrive
    on the host, or, in other engines than the embedded one, in the memory that these take back for them. New weights
    are put in place of the old as they come."""
    engine = EngineMemory(config.model, config.engine, setting.lengths.sample, setting.simulated)
    awake: tuple[Phase, ...] = ("start", "generate") if sleeps else ("start", "generate", "publish")
    apart = config.engine.name != "torch" and not setting.simulated
    here: tuple[Phase, ...] = (*awake, "publish") if sleeps and apart else awake
    items = [
        Item("engine's weights", engine.weights + (0 if apart else _adapters(config)), here),
        Item("KV cache", engine.kv_cache, awake),
        Item("a step of the engine", engine.work, ("generate",)),
    ]
    if apart:
        items.append(
            Item("weights on their way into the engine", _into_engine(config, setting, sleeps), ("publish", "generate"))
        )
        items.append(Item("the engine's own process", ANOTHER_PROCESS if setting.gpu else 0.0, phases))
    if not sleeps:
        items += _received(config, setting, "generate")
    return items


def _into_engine(config: JobConfig, setting: PlanSetting, sleeps: bool) -> float:
    """Bytes that weights need on their way into an engine with processes of its own, beside the transport's buckets:
    what came of a layer that is not complete, and that layer as it is made anew (engines/vllm/worker/transfer.py).
    Where its processes are no receivers, the adapter's bucket and the same one in the engine come before. An allocator
    keeps them until the engine sleeps. Adapters are added to a weight in float32."""
    largest = _largest(config) * (1 + 8 / bytes_per_number(config.model) * (config.training.lora_rank > 0))
    if not (transport_of(setting.transport).staged or sleeps):
        return 2 * largest
    bucket = config.engine.options.get("weight_bucket_bytes") or _ENGINE_BUCKET
    return 4 * max(bucket, largest)


def _scoring(
    config: JobConfig, rank: RankMemory, roles: list[str], devices: int, phases: Sequence[Phase], setting: PlanSetting
) -> list[Item]:
    """Copies to score with: none where the actor's parameters do, sharded beside the actor, else whole; simulated ones
    are always laid out as training is."""
    model, every = config.model, tuple(phases)
    items = []
    if "reference" in roles:
        spread = rank.shards if "actor" in roles else devices if setting.simulated else 1
        beside = "actor" in roles
        offloaded = beside and (bool(config.training.lora_rank) or (config.training.reference_offload and setting.gpu))
        items.append(Item("reference", 0.0 if offloaded else weight_bytes(model) / spread, every))
    if "actor_fwd" in roles and "actor" not in roles:
        spread = devices if setting.simulated else 1
        items.append(Item("weights to score with", (weight_bytes(model) + _adapters(config)) / spread, every))
        items += _received(config, setting, "score")
    if items and "actor" not in roles:
        items.append(Item("a forward pass", rank.forward_work + rank.head_forward, ("score",)))
    return items


def _received(config: JobConfig, setting: PlanSetting, working: Phase) -> list[Item]:
    """Memory of the transport where weights arrive; working: the phase in which that role computes."""
    held = _transfer(config, setting, sharded=False)
    phases: tuple[Phase, ...] = (working, "publish") if held.kept else ("publish",)
    items = [Item("transfer buckets", held.receiver, phases)] if held.receiver else []
    return items + _compared(config, setting, "weights as they arrived", 1, (working, "publish"))


def _compared(config: JobConfig, setting: PlanSetting, what: str, ranks: int, phases: tuple[Phase, ...]) -> list[Item]:
    """The copy, shared by so many ranks, that buckets are compared with; and what comparing one takes at most: half of
    its words, and their places (harness/weight_sync/difference.py)."""
    if not config.cluster.delta_weights or transport_of(setting.transport).over != "device":
        return []
    bucket = max(config.cluster.bucket_bytes, _largest_sent(config))
    return [Item(what, weight_bytes(config.model) / ranks, phases), Item("buckets, compared", 2 * bucket, ("publish",))]


def _transfer(config: JobConfig, setting: PlanSetting, *, sharded: bool) -> TransferMemory:
    """A bucket is as large as the largest parameter at least (harness/weight_sync/plan.py)."""
    largest = _largest_sent(config)
    bucket = max(config.cluster.bucket_bytes, largest)
    return transport_of(setting.transport).memory(bucket, largest, sharded=sharded)


def _adapters(config: JobConfig) -> float:
    """Bytes of adapters beside a copy of the weights."""
    return float(adapter_parameters(config.model, config.training) * bytes_per_number(config.model))


def _largest_sent(config: JobConfig) -> float:
    """Bytes of the largest parameter as it travels."""
    if not config.training.lora_rank:
        return _largest(config)
    layers = linear_layers(config.model)
    sides = max(max(layers[name]) for name in config.training.lora_targets or layers)
    return float(bytes_per_number(config.model) * config.training.lora_rank * sides)


def _largest(config: JobConfig) -> float:
    """Bytes of the largest parameter of the model, in its dtype."""
    model = config.model
    return bytes_per_number(model) * max(head_parameters(model), model.hidden * model.ff)


@dataclass(frozen=True)
class EngineShare:
    """Bytes on each device of an engine: weights; cache, at most, of keys and values, `token` of them for each token;
    work, of a step. device: all that the device has, or without GPUs the machine. It follows from the plan, so it is
    the same in every run: nothing is asked of the device, where what is free depends on who came first."""

    weights: float
    cache: float
    work: float
    token: float
    device: float
    gpu: bool

    @property
    def whole(self) -> float:
        """The share of the device for all of it (vLLM's gpu_memory_utilization)."""
        return (self.weights + self.cache + self.work) / self.device

    @property
    def static(self) -> float:
        """The share for what stays between steps (SGLang's mem_fraction_static)."""
        return (self.weights + self.cache) / self.device

    def cache_within(self, share: float, *, work: bool) -> float:
        """Bytes of the cache where the engine may take this share of the device, with or without its work; negative
        where that does not hold the weights."""
        return share * self.device - self.weights - (self.work if work else 0.0)


def engine_share(plan: MemoryPlan, setting: PlanSetting, token: float, role: str = "rollout") -> EngineShare:
    """The share of an engine of this role by a plan that fits. token: bytes of a token in the cache. On GPUs the cache
    may have what all else leaves on its device in any phase in which it is there: alone, beside new weights and
    buckets; beside a trainer, what that has while engines generate. Devices of a CPU job have their memory together,
    and engines share evenly what the job as a whole leaves."""
    pool = next(pool for pool in plan.pools if role in pool.roles)
    cache = _item(pool, "KV cache")
    if setting.gpu and not setting.together:
        left = plan.there - max(pool.of(phase) - cache.bytes for phase in cache.phases)
    else:
        beside = plan.host.everything if plan.host is not None and not setting.gpu else 0.0
        left = cache.bytes + (plan.there - plan.everything - beside) / _engine_devices(plan)
    work = _item(pool, "a step of the engine")
    return EngineShare(
        _item(pool, "engine's weights").bytes, left, work.bytes, token, setting.device_bytes, setting.gpu
    )


def _engine_devices(plan: MemoryPlan) -> int:
    return sum(pool.devices for pool in plan.pools if not set(ENGINE_ROLES).isdisjoint(pool.roles))


def _item(pool: PoolMemory, what: str) -> Item:
    return next(item for item in pool.items if item.what == what)
