"""A model's shape and a device's figures as costs and memory: by hand for a small model; better never costs more."""

from dataclasses import fields, replace
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.config import (
    ConfigError,
    CostConfig,
    DeviceConfig,
    ModelConfig,
    RooflineConfig,
    SystemConfig,
    TrainingConfig,
)
from harness.config.compose import EXPERIMENTS, choices, compose_job
from harness.config.placement import resolve_split
from harness.cost_model import shape
from harness.cost_model.cost import DecodeCost, offload_s, reload_s
from harness.cost_model.job_cost import simulated_cost
from harness.cost_model.memory import JobLayout, kv_tokens
from harness.cost_model.roofline import all_reduce_s, all_to_all_s, gather_s, ring_bytes_per_s, roofline
from tests.support.rooflines import DEVICE, FACTORS, MODEL

ACTIVE, ALL = shape.active_parameters(MODEL), shape.parameters(MODEL)
HEAD = 8 * 10
QWEN = compose_job(["model=qwen7b"])
FACTORS_OF_FILES = QWEN.cost
assert isinstance(FACTORS_OF_FILES, RooflineConfig)

# -- by hand


def test_one_device_costs_what_arithmetic_by_hand_says() -> None:
    cost = roofline(MODEL, DEVICE, FACTORS, JobLayout())
    assert cost.decode_step_s == 1.0
    assert cost.decode_weights_s == pytest.approx(2 * ACTIVE / 50.0)  # bytes over half of the memory's bandwidth
    assert cost.decode_step_s_per_sample == pytest.approx(2 * ACTIVE / 500.0)
    assert cost.decode_s_per_cached_token == pytest.approx(32 / 50.0)
    assert cost.prefill_s_per_token == pytest.approx(2 * (ACTIVE - HEAD) / 500.0)
    assert cost.log_prob_s_per_token == pytest.approx(2 * ACTIVE / 500.0)
    assert cost.train_s_per_token == pytest.approx(6 * ACTIVE / 250.0)
    assert cost.log_prob_s_per_pair == cost.prefill_s_per_pair == pytest.approx(2 * 2 * 2 * 4 / 500.0)
    assert cost.train_s_per_pair == pytest.approx(3 * 32 / 250.0)
    assert cost.train_step_s == pytest.approx(28 * ALL / 50.0)
    assert cost.log_prob_call_s == cost.train_call_s == 0.0
    assert (cost.weight_bytes, cost.network_bytes_per_s, cost.host_bytes_per_s) == (2 * ALL, 2.5, 10.0)
    assert (cost.call_s, cost.sync_s, cost.offload_s, cost.reload_s) == (0.25, 0.125, 3.0, 4.0)
    assert cost.kv_tokens == (90_000 - 2 * ALL) // 32
    assert (cost.prompt_tokens, cost.lengths) == (FACTORS.prompt_tokens, FACTORS.lengths)


def test_of_adapters_gradients_and_moments_are_theirs_and_weights_have_no_backward_pass() -> None:
    adapters = shape.adapter_parameters(MODEL, TrainingConfig(lora_rank=2, lora_targets=["q_proj", "down_proj"]))
    assert adapters == 2 * 2 * (8 + 8 + 16 + 8)  # layers, rank, sides
    cost = roofline(MODEL, DEVICE, FACTORS, JobLayout(train_ranks=4, adapters=adapters))
    assert cost.train_s_per_token == pytest.approx((4 * ACTIVE + 6 * adapters) / 250.0)
    assert cost.train_s_per_pair == pytest.approx(3 * 32 / 250.0), "attention has one"
    assert cost.train_step_s == pytest.approx(28 * adapters / 4 / 50.0)
    assert cost.train_call_s == pytest.approx(0.75 * (2 * 2 * ALL + 4 * adapters) / 25.0)
    again = roofline(MODEL, DEVICE, FACTORS, JobLayout(recompute=True, adapters=adapters))
    assert again.train_s_per_token == pytest.approx((6 * ACTIVE + 8 * adapters) / 250.0)
    shared = roofline(MODEL, DEVICE, FACTORS, JobLayout(colocated=True, adapters=adapters))
    assert shared.offload_s == pytest.approx(FACTORS.offload_s + (16 * adapters + 2 * ALL) / 10.0)
    less = shape.sample_flops(MODEL, 10, 1, scorings=1) - shape.sample_flops(
        MODEL, 10, 1, scorings=1, adapters=adapters
    )
    assert less == pytest.approx(11 * (2 * ACTIVE - 6 * adapters))


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_of_adapters_they_alone_are_sent_and_an_engine_of_whole_weights_reads_these_besides(engine: str) -> None:
    settings = ["model=qwen7b", "model.checkpoint=null", "backend=virtual", "cluster.devices=8", f"engine={engine}"]
    whole, lora = (compose_job([*settings, f"training.lora_rank={rank}"]) for rank in (0, 16))
    placement = resolve_split(whole.schedule.split, 8, ("rollout", "actor"))
    of_whole, of_lora = (simulated_cost(job, placement) for job in (whole, lora))
    adapters = 2 * shape.adapter_parameters(lora.model, lora.training)
    assert of_lora.weight_bytes == pytest.approx(adapters) and adapters < 0.01 * of_whole.weight_bytes
    for moves in (offload_s, reload_s):
        assert moves(of_lora) == pytest.approx(moves(of_whole))
    read_s = (of_whole.weight_bytes - adapters) / of_whole.host_bytes_per_s
    assert of_lora.sync_s - of_whole.sync_s == pytest.approx(read_s if engine == "vllm" else 0.0)


def test_ranks_gather_shards_twice_and_reduce_gradients_in_each_call() -> None:
    cost = roofline(MODEL, DEVICE, FACTORS, JobLayout(train_ranks=4))
    gathered = 0.75 * 2 * ALL / 25.0  # three quarters of it come from others, over half of the link
    assert cost.log_prob_call_s == pytest.approx(gathered)
    assert cost.train_call_s == pytest.approx(2 * gathered + 0.75 * 4 * ALL / 25.0)
    assert cost.train_step_s == pytest.approx(28 * ALL / 4 / 50.0)
    hidden = roofline(MODEL, DEVICE, replace(FACTORS, overlap=0.75), JobLayout(train_ranks=4))
    assert hidden.train_call_s == pytest.approx(cost.train_call_s / 4)


def test_devices_that_share_layers_divide_the_work_and_sum_activations() -> None:
    one, two = (roofline(MODEL, DEVICE, FACTORS, JobLayout(engine_devices=n, train_devices=n)) for n in (1, 2))
    summed = 2 * 0.5 * (2 * 8 * 2) / 25.0  # an all-reduce of two: of layers x hidden x bytes, over half of the link
    assert two.decode_weights_s == pytest.approx(one.decode_weights_s / 2)
    assert two.decode_step_s_per_sample == pytest.approx(one.decode_step_s_per_sample / 2 + 2 * summed)
    assert two.log_prob_s_per_token == pytest.approx(one.log_prob_s_per_token / 2 + 2 * summed)
    assert two.train_s_per_token == pytest.approx(one.train_s_per_token / 2 + 4 * summed)
    assert two.decode_s_per_cached_token == one.decode_s_per_cached_token, "both hold the one KV head"
    assert two.host_bytes_per_s == 2 * one.host_bytes_per_s
    latency = roofline(MODEL, DEVICE, replace(FACTORS, latency_s=0.5), JobLayout(engine_devices=2, train_devices=2))
    assert latency.decode_step_s == 1.0 + 2 * 2 * 0.5
    assert latency.train_call_s == pytest.approx(4 * 2 * 0.5)


def test_kept_activations_pipelines_and_turns_cost_what_they_should() -> None:
    kept, again = (roofline(MODEL, DEVICE, FACTORS, JobLayout(recompute=value)) for value in (False, True))
    assert again.train_s_per_token == pytest.approx(kept.train_s_per_token * 4 / 3)
    assert again.train_s_per_pair == pytest.approx(kept.train_s_per_pair * 4 / 3)
    assert again.log_prob_s_per_token == kept.log_prob_s_per_token
    one = roofline(MODEL, DEVICE, FACTORS, JobLayout())
    for samples in (1, 3, 1000):
        two = roofline(MODEL, DEVICE, FACTORS, JobLayout(train_devices=2, pipeline=2, samples_per_call=samples))
        assert two.train_s_per_token == pytest.approx(one.train_s_per_token / 2 * (samples + 1) / samples)
    own, shared = (roofline(MODEL, DEVICE, FACTORS, JobLayout(colocated=value)) for value in (False, True))
    assert shared.train_s_per_token == 2 * own.train_s_per_token
    assert shared.train_step_s == 2 * own.train_step_s
    assert shared.log_prob_s_per_token == own.log_prob_s_per_token
    assert shared.offload_s == pytest.approx(own.offload_s + 16 * ALL / 10.0)
    assert shared.reload_s == pytest.approx(own.reload_s + 16 * ALL / 10.0)
    assert shared.kv_tokens == (50_000 - 2 * ALL) // 32


def test_experts_that_no_sample_goes_through_are_not_read_and_multiplied_with_is_a_part() -> None:
    mixture = replace(MODEL, experts=4, active_experts=2)
    dense, mixed = (roofline(model, DEVICE, FACTORS, JobLayout()) for model in (MODEL, mixture))
    router, network = 2 * 8 * 4, 2 * 3 * 8 * 16
    assert mixed.decode_weights_s + mixed.decode_experts_s - dense.decode_weights_s == pytest.approx(
        2 * (router + 3 * network) / 50.0
    )
    decode = DecodeCost.of(mixed)
    by_two = fmean(len({0, 1, *other}) for other in combinations(range(4), 2))
    for samples, read in ((1, 2 / 4), (2, by_two / 4), (200, 1.0)):
        assert decode.weights(samples) == pytest.approx(mixed.decode_weights_s + read * 2 * 4 * network / 50.0)
    assert DecodeCost.of(dense).weights(3) == dense.decode_weights_s
    assert mixed.train_s_per_token - dense.train_s_per_token == pytest.approx(6 * (router + network) / 250.0)
    assert mixed.weight_bytes == shape.weight_bytes(mixture) == 2 * (ALL + router + 3 * network)


def test_experts_that_are_spread_are_gathered_by_fewer_and_reached_by_all_to_alls() -> None:
    mixture = replace(MODEL, experts=4, active_experts=2)
    whole, spread = (roofline(mixture, DEVICE, FACTORS, JobLayout(train_ranks=4, expert_ranks=n)) for n in (1, 2))
    experts = shape.expert_parameters(mixture)
    assert experts == 2 * 4 * 3 * 8 * 16
    dense_s = 0.75 * 2 * (shape.parameters(mixture) - experts) / 25.0
    assert whole.log_prob_call_s == pytest.approx(dense_s + 0.75 * 2 * experts / 25.0)
    half_s = 0.5 * 2 * (experts / 2) / 25.0  # two ranks have the same half
    assert spread.log_prob_call_s == pytest.approx(dense_s + half_s)
    sent_s = 0.5 * (2 * 8 * 2 * 2) / 25.0  # layers x hidden x bytes to each of two experts, half of them elsewhere
    assert spread.log_prob_s_per_token == pytest.approx(whole.log_prob_s_per_token + 2 * sent_s)
    assert spread.train_s_per_token == pytest.approx(whole.train_s_per_token + 4 * sent_s)
    assert spread.decode_step_s_per_sample == whole.decode_step_s_per_sample


def test_transfers_inside_and_beyond_a_node_use_its_links() -> None:
    assert all_to_all_s(8.0, 1, DEVICE, FACTORS) == 0.0
    assert all_to_all_s(8.0, 4, DEVICE, FACTORS) == pytest.approx(6.0 / 25.0)
    assert all_to_all_s(8.0, 8, DEVICE, FACTORS) == pytest.approx(max(3.0 / 25.0, 4.0 / 2.5))
    assert all_to_all_s(8.0, 4, DEVICE, FACTORS, apart=2) == pytest.approx(max(2.0 / 25.0, 4.0 / 2.5))

    def speed(devices: int, apart: int = 1) -> float:
        return ring_bytes_per_s(devices, DEVICE, FACTORS, apart=apart) / FACTORS.network_share

    assert speed(4) == speed(2, apart=2) == DEVICE.link_bytes_per_s
    assert speed(5) == 4 * DEVICE.network_bytes_per_s
    assert speed(3, apart=2) == 2 * DEVICE.network_bytes_per_s
    assert speed(2, apart=4) == speed(2, apart=8) == DEVICE.network_bytes_per_s
    assert (gather_s(100.0, 4, 5.0), all_reduce_s(100.0, 4, 5.0), gather_s(100.0, 1, 5.0)) == (15.0, 30.0, 0.0)
    assert roofline(MODEL, DEVICE, FACTORS, JobLayout(one_node=True)).network_bytes_per_s == 25.0


# -- better is never worse


LAYOUTS = st.builds(
    lambda engine, tensor, pipeline, **rest: JobLayout(engine, tensor * pipeline, pipeline=pipeline, **rest),
    engine=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    train_ranks=st.integers(1, 200),
    colocated=st.booleans(),
    samples_per_call=st.integers(1, 64),
    recompute=st.booleans(),
    one_node=st.booleans(),
)
GROWS = ("kv_tokens", "network_bytes_per_s", "host_bytes_per_s")
FIGURES = [field.name for field in fields(DeviceConfig) if field.name not in ("name", "per_node", "source")]
WORKLOAD = ("lengths", "prompt_tokens", *(field.name for field in fields(SystemConfig)))
SHARES = [
    field.name
    for field in fields(RooflineConfig)
    if (field.name.endswith("_share") or field.name == "overlap") and field.name not in WORKLOAD
]


def worse(before: CostConfig, after: CostConfig) -> list[str]:
    """Costs that became larger, and speeds that became smaller."""
    numbers = [f.name for f in fields(CostConfig) if f.name not in ("name", "kind", "transfers", *WORKLOAD)]
    grown = {name: getattr(after, name) - getattr(before, name) for name in numbers}
    return [name for name, by in grown.items() if (by < 0 if name in GROWS else by > 0)]


@given(LAYOUTS, st.sampled_from(FIGURES), st.floats(1.0, 10.0))
def test_a_better_device_makes_nothing_slower(layout: JobLayout, figure: str, factor: float) -> None:
    device = QWEN.device
    better = replace(device, **{figure: factor * getattr(device, figure)})
    before, after = (roofline(QWEN.model, its, FACTORS_OF_FILES, layout) for its in (device, better))
    assert worse(before, after) == []


@given(LAYOUTS, st.sampled_from(SHARES), st.floats(0.0, 1.0))
def test_a_larger_share_makes_nothing_slower(layout: JobLayout, share: str, towards: float) -> None:
    value = getattr(FACTORS_OF_FILES, share)
    better = replace(FACTORS_OF_FILES, **{share: min(1.0, value + towards * (1.0 - value))})
    before, after = (roofline(QWEN.model, QWEN.device, factors, layout) for factors in (FACTORS_OF_FILES, better))
    assert worse(before, after) == []


@given(LAYOUTS, st.integers(1, 3))
def test_more_devices_make_no_engine_and_no_optimizer_slower(layout: JobLayout, doublings: int) -> None:
    """Where links cost nothing: an all-reduce may cost more than sharing the work saves."""
    free = replace(FACTORS_OF_FILES, latency_s=0.0, overlap=1.0)
    device = replace(QWEN.device, link_bytes_per_s=1e30, network_bytes_per_s=1e30)
    more = replace(
        layout, engine_devices=layout.engine_devices << doublings, train_ranks=layout.train_ranks << doublings
    )
    before, after = (roofline(QWEN.model, device, free, its) for its in (layout, more))
    assert worse(before, after) == []


# -- the files


@pytest.mark.parametrize("name", choices("device"))
def test_every_device_of_the_files_is_plausible(name: str) -> None:
    device = DeviceConfig(**OmegaConf.load(EXPERIMENTS / "device" / f"{name}.yaml"))
    assert 100e12 <= device.flops <= 5e15 and 1e12 <= device.memory_bytes_per_s <= 10e12
    assert 60e9 <= device.memory_bytes <= 300e9
    assert device.network_bytes_per_s < device.link_bytes_per_s < device.memory_bytes_per_s
    assert len(device.source) > 20


def test_a_7b_model_on_an_h100_is_about_as_fast_as_people_measure() -> None:
    """Orders of magnitude: a decode step of a few milliseconds, forward of some 30,000 tokens a second."""
    cost = roofline(QWEN.model, QWEN.device, FACTORS_OF_FILES, JobLayout(train_ranks=8))
    assert 0.004 < cost.decode_step_s + cost.decode_weights_s < 0.012
    assert 20_000 < 1 / cost.log_prob_s_per_token < 50_000
    assert 6_000 < 1 / cost.train_s_per_token < 12_000
    assert 500_000 < cost.kv_tokens < 1_500_000
    assert shape.forward_flops_per_pair(QWEN.model) * 8192 < 2 * shape.active_parameters(QWEN.model), (
        "attention is less"
    )


def test_models_are_as_large_as_their_names_say() -> None:
    model = compose_job(["model=qwen7b"]).model
    norms = 28 * (2 * 3584 + 3584 + 2 * 4 * 128) + 3584  # and biases of queries, keys and values
    assert shape.active_parameters(model) == shape.parameters(model) - 152064 * 3584 - norms
    assert shape.forward_flops_per_token(model) - shape.prefill_flops_per_token(model) == 2 * 152064 * 3584
    # Qwen3-30B-A3B: 30.5 billion parameters, 3.3 billion of them for a token with the table of embeddings.
    model = compose_job(["model=qwen3-30b-a3b"]).model
    assert shape.parameters(model) / 1e9 == pytest.approx(30.5, abs=0.05)
    assert (shape.active_parameters(model) + model.vocabulary * model.hidden) / 1e9 == pytest.approx(3.3, abs=0.1)
    for name in choices("model"):
        billions = name.removeprefix("qwen3-").removeprefix("qwen").partition("b")[0]
        if not name.startswith("tiny"):
            model = ModelConfig(**OmegaConf.load(EXPERIMENTS / "model" / f"{name}.yaml"))
            assert shape.parameters(model) / 1e9 == pytest.approx(float(billions), rel=0.25, abs=0.2), name


def test_operations_bytes_and_room_equal_arithmetic_by_hand() -> None:
    layer = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16  # queries, keys, values, output, feed-forward
    assert shape.active_parameters(MODEL) == 2 * layer + 10 * 8
    assert shape.parameters(MODEL) == 2 * (layer + 2 * 4 + 2 * 8) + 2 * 10 * 8 + 8
    assert shape.forward_flops_per_token(MODEL) == 2 * (2 * layer + 80)
    assert shape.kv_bytes_per_token(MODEL) == 2 * 2 * 1 * 4 * 2  # keys and values, layers, KV heads, head_dim, bytes
    assert shape.weight_bytes(MODEL) == 2 * shape.parameters(MODEL)
    tokens = 1000
    in_turn = sum(shape.decode_flops_per_cached_token(MODEL) * cached for cached in range(tokens))
    assert shape.forward_flops_per_pair(MODEL) * tokens**2 == pytest.approx(in_turn, rel=0.01)
    assert kv_tokens(MODEL, DEVICE, FACTORS, JobLayout()) == (90_000 - 2 * ALL) // 32
    assert kv_tokens(MODEL, DEVICE, FACTORS, JobLayout(colocated=True)) == (50_000 - 2 * ALL) // 32
    wide = replace(MODEL, kv_heads=2)
    assert kv_tokens(wide, DEVICE, FACTORS, JobLayout(engine_devices=2)) == (90_000 - shape.parameters(wide)) // 32
    config = compose_job(["model=qwen32b"])
    need = r"its weights are 61\.0 GiB on each device of a rollout engine, which may use 47\.8 GiB of device=h100"
    with pytest.raises(ConfigError, match=rf"{need}; set engine.tensor_parallel=2 or .*device=h200"):
        kv_tokens(config.model, config.device, config.cost, JobLayout(colocated=True))  # type: ignore[arg-type]
    model = compose_job(["model=qwen7b"]).model
    short = shape.sample_flops(model, 10, 1, scorings=1)  # attention is nothing yet
    weights = shape.active_parameters(model)
    expected = 11 * (6 + 2) * weights + 10 * 2 * (weights - shape.head_parameters(model)) + 2 * weights
    assert short == pytest.approx(expected, rel=1e-3)
    assert shape.sample_flops(model, 10, 1, scorings=2) - short == pytest.approx(11 * 2 * weights, rel=1e-3)
