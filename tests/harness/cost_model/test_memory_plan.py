"""What lies on each device of a job: by hand for a small model, and what more devices, shorter samples and
recomputation do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checks.job import lengths_of, plan_job
from harness.checks.layout import device_roles
from harness.checks.machine import real_setting
from harness.config import JobConfig, ModelConfig
from harness.config.compose import choices, compose_job, make_schedule
from harness.config.machine import Machine
from harness.config.model_folder import DRAWN, model_settings
from harness.config.placement import resolve_split
from harness.cost_model.host_memory import PINNED
from harness.cost_model.memory import EngineMemory
from harness.cost_model.memory_plan import GIB, EngineShare, Lengths, MemoryPlan, PoolMemory, engine_share, plan_memory
from harness.cost_model.roofline import roofline
from harness.cost_model.shape import (
    adapter_parameters,
    decode_flops_per_cached_token,
    expert_parameters,
    forward_flops_per_pair,
    kv_bytes_per_token,
    parameters,
    weight_bytes,
)
from harness.cost_model.training_memory import PassShape, RankMemory
from harness.planner.memory import planned_memory
from harness.planner.plan import plan_jobs
from tests.support.random_models import SIZES
from tests.support.rooflines import DEVICE, FACTORS

MODEL = ModelConfig("small", 8, 2, 2, 1, 4, 16, 10, False, 64, dtype="bfloat16", qk_norm=False)
BYTES = {"float32": 4, "bfloat16": 2}
EIGHT = Machine(64, 8, 80 * GIB)


def planned(*settings: str, response: int = 100, gpu: bool = True) -> tuple[JobConfig, MemoryPlan]:
    config = compose_job(["model=qwen7b", "model.checkpoint=null", "cluster.devices=8", *settings])
    schedule = make_schedule(config)
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    return config, plan_memory(config, placement, real_setting(config, schedule, EIGHT, Lengths(28, response), gpu=gpu))


def bytes_of(plan: MemoryPlan, pool: str, what: str) -> float:
    (found,) = (found for found in plan.pools if pool in found.roles)
    return sum(item.bytes for item in found.items if item.what == what)


def test_training_state_is_cut_over_ranks_and_caches_have_room_for_every_slot() -> None:
    config, plan = planned("algorithm.reference=true", "schedule.split.reference=1", "schedule.split.actor=3")
    size = parameters(config.model)
    assert bytes_of(plan, "actor", "master weights") == 4 * size / 3
    assert bytes_of(plan, "actor", "optimizer state") == 8 * size / 3
    assert bytes_of(plan, "reference", "reference") == bytes_of(plan, "rollout", "engine's weights") == 2 * size
    _, beside = planned("algorithm.reference=true")
    assert bytes_of(beside, "actor", "reference") == 2 * size / 4, "sharded beside the actor"
    config, plan = planned("engine.slots=16", response=200)
    assert bytes_of(plan, "rollout", "KV cache") == 16 * 240 * 2 * 28 * 4 * 128 * 2, "228 tokens, in steps of 16"
    from engines.torch import kv_slots
    from harness.cost_model import memory as engine_memory

    assert engine_memory.PREFILL_TOKENS == kv_slots.PREFILL_TOKENS
    assert all(engine_memory.key_length(n) == kv_slots.key_length(n) for n in (1, 16, 17, 256, 257, 8200))


def test_megatron_keeps_whole_what_a_rank_computes_with_and_of_experts_only_its_own() -> None:
    job = ("model=qwen3-30b-a3b", "schedule.split.rollout=4", "training.engine=megatron")
    for spread in (1, 4):
        config, plan = planned(*job, f"training.expert_parallel={spread}")
        experts = expert_parameters(config.model)
        held = parameters(config.model) - experts + experts / spread
        whole = {kind: bytes_of(plan, "actor", f"{kind}, whole") for kind in ("weights", "gradients")}
        assert whole["weights"] == pytest.approx(2 * held), "in bfloat16, beside masters"
        assert whole["gradients"] + bytes_of(plan, "actor", "gradients") == pytest.approx(4 * held)
    sliced = planned(*job, "training.tensor_parallel=2")[1]
    assert bytes_of(sliced, "actor", "last norm") == bytes_of(plan, "actor", "last norm") / 2, "of half of a sequence"


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_of_adapters_masters_gradients_and_moments_are_theirs_and_a_reference_is_the_base(engine: str) -> None:
    settings = ("algorithm.reference=true", f"engine={engine}", "schedule=separated_sync", "save_weights=false")
    config, plan = planned(*settings, "training.lora_rank=16")
    size, adapters = parameters(config.model), adapter_parameters(config.model, config.training)
    assert adapters == 28 * 16 * (2 * (3584 + 3584) + 2 * (512 + 3584) + 3 * (18944 + 3584))
    assert bytes_of(plan, "actor", "master weights") == (2 * size + 4 * adapters) / 4
    assert bytes_of(plan, "actor", "gradients") == 4 * adapters / 4
    assert bytes_of(plan, "actor", "optimizer state") == 8 * adapters / 4
    assert bytes_of(plan, "actor", "reference") == 0
    assert bytes_of(plan, "rollout", "engine's weights") == 2 * (size + adapters * (engine == "torch"))


def test_a_critic_is_another_model_in_training_beside_the_actor_or_apart() -> None:
    config, beside = planned("algorithm=ppo")
    size = parameters(config.model)
    for what in ("master weights", "optimizer state", "gradients"):
        assert bytes_of(beside, "actor", f"critic's {what}") == bytes_of(beside, "actor", what) >= size
    _, without = planned()
    actor, alone = (next(pool for pool in plan.pools if "actor" in pool.roles) for plan in (beside, without))
    assert actor.of("step") - alone.of("step") == 16 * size / 4, "its activations are there when the actor's are not"
    _, apart = planned("algorithm=ppo", "schedule.split.critic=2", "schedule.split.rollout=2")
    assert bytes_of(apart, "critic", "critic's master weights") == 4 * size / 2
    assert bytes_of(apart, "critic", "critic's activations") > 0 == bytes_of(apart, "critic", "critic's output layer")


def test_engines_that_share_a_device_give_their_memory_back_before_training() -> None:
    _, plan = planned("schedule=colocate_sync")
    (pool,) = plan.pools
    asleep = {item.what for item in pool.items if "loss" not in item.phases}
    assert {"engine's weights", "KV cache"} <= asleep
    assert "optimizer state" not in asleep and pool.of("generate") > pool.of("score")
    (rollout, lent), (alone, actor) = (planned(f"schedule={name}")[1].pools for name in ("lending", "fully_async"))
    assert rollout == alone and lent.roles == ("lent", *actor.roles)
    assert [lent.of(phase) for phase in actor.phases[1:]] == [actor.of(phase) for phase in actor.phases[1:]]
    state = sum(item.bytes for item in actor.items if item.what in ("master weights", "optimizer state"))
    assert lent.of("generate") == rollout.of("generate") + state, "both have transfer buckets"


def test_moments_on_the_host_take_room_in_a_step_alone_and_one_by_one_only_that_of_the_largest() -> None:
    pools = {}
    for offload in ("none", "between_phases", "always"):
        config, plan = planned("schedule=colocate_sync", f"training.optimizer_offload={offload}")
        (pools[offload],) = plan.pools
    size, largest = parameters(config.model) / 8, config.model.vocabulary * config.model.hidden / 8
    for phase in ("generate", "backward"):
        assert pools["none"].of(phase) - pools["between_phases"].of(phase) == pytest.approx(8 * size)
        assert pools["between_phases"].of(phase) == pools["always"].of(phase)
    assert pools["none"].of("step") == pools["between_phases"].of("step")
    both = 8 + 4  # moments, and the root that AdamW takes of the second
    assert pools["none"].of("step") - pools["always"].of("step") == pytest.approx(both * (size - largest))


def test_cores_hold_rows_and_engines_share_what_is_left() -> None:
    settings, twice = ("schedule=colocate_sync", "cluster.devices=2"), ("algorithm.epochs=2",)
    settings += ("algorithm.recompute_log_probs=false",)
    for gpu, kept in ((False, 64 * (8 * 28 + (8 + 4 + 4 + 1) * 100)), (True, 0)):
        bytes_ = [planned(*settings, *more, gpu=gpu)[1].fullest.of("loss") for more in ((), twice)]
        assert bytes_[1] - bytes_[0] == kept
    own = ("group", "optimal_token_baseline")
    settings = settings[:2] + twice
    bytes_ = [planned(*settings, f"algorithm.advantage={name}", gpu=False)[1].fullest.of("loss") for name in own]
    assert bytes_[1] - bytes_[0] == 64 * 4 * 100
    config = compose_job(["engine=torch", "cluster.devices=4", "schedule.split.rollout=3", "cluster.memory_gib=4"])
    plan = plan_job(config, make_schedule(config), Machine(8, 0, 0))
    share = plan.shares["rollout"]
    assert not share.gpu
    setting = real_setting(config, make_schedule(config), Machine(8, 0, 0), lengths_of(config), gpu=False)
    memory = plan_memory(config, plan.placement, setting)
    (engines,) = (pool for pool in memory.pools if "rollout" in pool.roles)
    own = next(item.bytes for item in engines.items if item.what == "KV cache")
    assert memory.host is not None, "processes and the queue have their memory there too"
    taken = memory.everything + memory.host.everything
    assert taken + 3 * (share.cache - own) == pytest.approx(16 * GIB)


def host_items(*settings: str, response: int = 100, gpu: bool = True) -> dict[str, float]:
    _, plan = planned(*settings, response=response, gpu=gpu)
    return {item.what: item.bytes for item in plan.host.items}


def test_a_host_holds_what_leaves_its_gpus_and_of_several_the_fullest_counts() -> None:
    colocated = ("schedule=colocate_sync", "save_weights=false", "algorithm.reference=true")
    size = parameters(compose_job(["model=qwen7b"]).model)
    bare = host_items(*colocated)
    assert set(bare) == {"processes", "weights of engines that sleep", "rows of the queue"}
    assert bare["weights of engines that sleep"] == pytest.approx(PINNED * 8 * 2 * size)
    away = host_items(*colocated, "training.optimizer_offload=always", "training.reference_offload=true")
    assert away["optimizer state"] == pytest.approx(PINNED * 8 * size) and away["reference"] == 2 * 2 * size
    saved = host_items(*colocated, "checkpoint.every=2")["a checkpoint being written"]
    assert saved == pytest.approx(12 * size), "weights and both moments, of all ranks"
    vllm = host_items("schedule=colocate_sync", "engine=vllm")
    assert vllm["processes of engines"] == 8 * 4 * GIB and "weights of engines that sleep" not in vllm, "level 2"
    assert host_items(*colocated, response=1100)["rows of the queue"] > 5 * bare["rows of the queue"]
    experts = ("model=qwen3-30b-a3b", "model.checkpoint=null", "backend=real", "training.routing_replay=")
    without, replayed = (host_items(*colocated, experts[-1] + switch, *experts[:-1]) for switch in ("false", "true"))
    rows = without["rows of the queue"] / (8 * 28 + (8 + 4 * 3 + 4 + 1) * 100)
    assert replayed["rows of the queue"] - without["rows of the queue"] == pytest.approx(rows * 48 * 8 * 128)
    job = ("schedule=fully_async", "cluster.devices=16", "schedule.split.rollout=8", "algorithm.batch_groups=64")
    config = compose_job(["model=qwen7b", "model.checkpoint=null", "training.optimizer_offload=always", *job])
    schedule, placement = make_schedule(config), resolve_split(config.schedule.split, 16, device_roles(config))
    two = replace(EIGHT, gpus=16, nodes=2, host_bytes=64 * GIB)
    setting = real_setting(config, schedule, two, Lengths(28, 100), gpu=True)
    plan = plan_memory(config, placement, setting)
    assert plan.host is not None and plan.host.largest.what == "optimizer state", "on the second, where training is"
    assert plan.devices_fit and not plan.fits


def test_weights_that_travel_through_hosts_are_once_at_the_sender_and_twice_at_each_engine() -> None:
    weights = weight_bytes(compose_job(["model=qwen7b"]).model)
    staged = "weights on their way (host_staged)"
    found = host_items("schedule=delayed_update", "schedule.split.rollout=4")[staged]
    assert found == pytest.approx(PINNED * (1 + 4 * 2) * weights)
    on_cores = host_items("schedule=delayed_update", "schedule.split.rollout=4", gpu=False)
    assert on_cores[staged] == pytest.approx(9 * weights) and "optimizer state" not in on_cores
    assert "weights on their way (collective)" not in host_items("schedule=fully_async")
    delta = ("schedule.split.rollout=4", "cluster.delta_weights=true")
    assert host_items("schedule=delayed_update", *delta)[staged] == pytest.approx(PINNED * (2 + 4 * 2) * weights)
    _, plan = planned("schedule=fully_async", *delta)
    assert bytes_of(plan, "rollout", "weights as they arrived") == weights
    assert bytes_of(plan, "actor", "weights as engines have them") == weights / 4


def test_activations_are_those_by_hand_and_of_published_trainers() -> None:
    """Two norms keep their input in float32, what is normalised, and their output; then queries, keys, values and the
    result of attention, the logarithm of its sums for each head, and four of the feed-forward network's width."""
    rank = RankMemory(MODEL, PassShape(tokens=1, scored=1))
    assert rank.layer_bytes_per_token == 2 * (4 + 2 + 2) * 8 + 2 * (2 * 8 + 2 * 4) + 4 * 2 + 4 * 2 * 16
    assert rank.activations == 2 * rank.layer_bytes_per_token and rank.last_norm == (4 + 2 + 2) * 8
    again = RankMemory(MODEL, PassShape(tokens=1, scored=1, recompute=True))
    assert again.activations == 2 * 2 * 8 and again.recomputed == rank.layer_bytes_per_token
    # Korthikanti et al., arXiv 2205.05198: 34 bytes x hidden for a token and a layer, 3 of them masks of dropout.
    # Ours has a gate: 8 in place of 16 bytes x hidden are 4 x 2 of four networks' width. And attention's sums.
    model = replace(compose_job(["model=qwen7b"]).model, ff=2 * 3584, kv_heads=28)
    rank = RankMemory(model, PassShape(tokens=1, scored=1, megatron=True))
    assert (rank.layer_bytes_per_token - 4 * 28) / 3584 == 34 - 3 + 1


def test_more_ranks_shorter_samples_and_recomputation_need_less() -> None:
    few, many = (planned(f"cluster.devices={devices}", response=4000)[1] for devices in (4, 16))
    assert many.fullest.peak < few.fullest.peak
    again = planned("cluster.devices=16", "training.recompute_activations=true", response=4000)[1]
    cut = planned("cluster.devices=16", "training.tokens_per_micro_batch=5000", response=4000)[1]
    for less in (again, cut):
        peaks = [next(pool.peak for pool in plan.pools if "actor" in pool.roles) for plan in (less, many)]
        assert peaks[0] < peaks[1]


@pytest.mark.parametrize("name", ["qwen7b", "qwen14b", "qwen32b", "qwen3-8b", "qwen3-30b-a3b"])
def test_experts_and_layers_make_up_the_weights(name: str) -> None:
    """What is gathered layer by layer, and the tables, is all that there is."""
    model = compose_job([f"model={name}"]).model
    rank = RankMemory(model, PassShape(tokens=1, scored=1))
    assert 2 * (model.layers * rank.block + rank.embeddings) == weight_bytes(model)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_with_processes_of_its_own_takes_memory_while_it_sleeps_and_keeps_its_buckets(engine: str) -> None:
    _, plan = planned(f"engine={engine}", "schedule=colocate_sync")
    _, embedded = planned("schedule=colocate_sync")
    (pool,), (alone,) = plan.pools, embedded.pools
    assert pool.of("step") == alone.of("step") + GIB
    assert bytes_of(planned(f"engine={engine}", gpu=False)[1], "rollout", "the engine's own process") == 0
    shared = planned(f"engine={engine}", "schedule=colocate_sync", "engine.tensor_parallel=2")[1]
    assert bytes_of(shared, "rollout", "the engine's own process") == GIB, "one on each of its devices, and no other"
    (buckets,) = (item for item in pool.items if item.what == "weights on their way into the engine")
    assert buckets.phases == ("publish", "generate")


MACHINES = ("device=h100", "device=a100", "device=h20", "device=h200", "device=h100 cluster.devices=16")


def shared(*settings: str) -> tuple[MemoryPlan, EngineShare]:
    found = planned_memory(["model=qwen7b", *settings])
    config, schedule = found.config, make_schedule(found.config)
    setting = real_setting(config, schedule, found.machine, found.lengths, gpu=True)
    token = EngineMemory(config.model, config.engine, setting.lengths.sample).token
    return found.plan, engine_share(found.plan, setting, token)


def with_cache(plan: MemoryPlan, cache: float) -> PoolMemory:
    """The engines' pool, with a cache of this size."""
    pool = next(pool for pool in plan.pools if "rollout" in pool.roles)
    items = [item if item.what != "KV cache" else type(item)(item.what, cache, item.phases) for item in pool.items]
    return PoolMemory(pool.roles, pool.devices, pool.phases, tuple(items))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("schedule", ["colocate_sync", "fully_async", "half_step"])
def test_an_engine_has_all_that_others_leave_in_the_fullest_phase(machine: str, engine: str, schedule: str) -> None:
    plan, share = shared(f"schedule={schedule}", f"engine={engine}", *machine.split())
    assert plan.fits
    pool = with_cache(plan, share.cache)
    assert max(pool.of(phase) for phase in ("start", "generate", *pool.phases[-1:])) == pytest.approx(plan.there)
    assert share.static < share.whole <= plan.there / share.device, "vLLM refuses a GPU of which less is free"


def test_an_engine_has_more_of_a_device_of_its_own_than_beside_a_larger_trainer() -> None:
    caches = []
    for offload in ("none", "between_phases"):
        _, share = shared(
            "schedule=colocate_sync", "engine=vllm", "device=h100", f"training.optimizer_offload={offload}"
        )
        caches.append(share.cache)
    assert caches[0] < caches[1], "moments rest on the host while the engine generates"


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mistral, sliding": ("mistral", {"sliding_window": 16}),
}


def on_meta(config: Any) -> int:
    """Weights of the model that transformers makes of a configuration, none of them in memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_folders_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    architecture, changes = MODELS[name]
    config = AutoConfig.for_model(architecture, **(SIZES | changes))
    config.save_pretrained(tmp_path)
    model = ModelConfig(**model_settings(str(tmp_path)))
    assert parameters(model) == on_meta(config)


@pytest.mark.parametrize(
    ("architecture", "changes", "windowed"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, 1),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3, "num_experts": 8}, 4),
        ("qwen3_moe", {"sliding_window": 16, "num_experts": 8}, 0),
        ("llama", {}, 0),
    ],
)
def test_plans_have_a_folders_shape(architecture: str, changes: dict[str, Any], windowed: int, tmp_path: Path) -> None:
    """Windows in as many layers as transformers gives one: in those from `max_window_layers` on of Qwen2, in all of
    Qwen3 with experts, and in none unless `use_sliding_window` says so."""
    from transformers import AutoConfig

    AutoConfig.for_model(architecture, **(SIZES | {"num_hidden_layers": 4} | changes)).save_pretrained(tmp_path)
    jobs, _ = plan_jobs([f"model={tmp_path}", "schedule=fully_async", "cluster.devices=8"])
    model = jobs[0].model
    assert (model.architecture, model.layers, model.experts) == (architecture, 4, changes.get("num_experts", 0))
    assert (model.sliding_layers, model.sliding_window) == (windowed, 16 if windowed else None)


@pytest.mark.parametrize("name", choices("model"))
def test_known_names_have_the_parameters_of_the_architecture_that_they_name(name: str) -> None:
    from engines.torch.model import transformers_config

    model = compose_job([f"model={name}"]).model
    assert parameters(model) == on_meta(transformers_config(model)) == weight_bytes(model) / BYTES[model.dtype]
    assert model.experts or model.architecture in DRAWN
    assert model.checkpoint is None or model.checkpoint.startswith("hf:Qwen/Qwen")


def test_a_sliding_windows_cost_and_room_are_those_inside_of_it() -> None:
    full = compose_job(["model=qwen7b"]).model
    half = replace(full, sliding_window=1000, sliding_layers=14)
    seen = sum(min(token, 1000) for token in range(4000))
    pairs = (14 * sum(range(4000)) + 14 * seen) / (28 * sum(range(4000)))
    assert forward_flops_per_pair(half, 4000) / forward_flops_per_pair(full) == pytest.approx(pairs, rel=1e-3)
    for of in (kv_bytes_per_token, decode_flops_per_cached_token):
        assert of(half, 4000) == of(full, 4000) * (14 + 14 / 4) / 28
        assert of(half, 800) == of(full, 800) == of(full)
    from harness.cost_model.memory import JobLayout
    from tests.support.rooflines import MODEL

    windowed = replace(MODEL, sliding_window=2, sliding_layers=MODEL.layers)
    full, short = (roofline(model, DEVICE, FACTORS, JobLayout()) for model in (MODEL, windowed))
    assert full.kv_tokens is not None and short.kv_tokens is not None and short.kv_tokens > full.kv_tokens
    assert short.decode_s_per_cached_token < full.decode_s_per_cached_token
    assert short.train_s_per_pair < full.train_s_per_pair and short.prefill_s_per_pair < full.prefill_s_per_pair
