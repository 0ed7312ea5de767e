"""From a model's shape, a device's figures and a layout to what simulated work costs: a formula for each phase.

Work lasts as long as its slowest part: operations over the device's peak, or bytes over its memory's bandwidth, each
times the share of the peak that is reached (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009). What is
sent between devices is added, less the share `overlap` that hides behind computing. docs/simulator.md has all formulas,
their sources, and what is left out.
"""

from __future__ import annotations

from harness.config import CostConfig, DeviceConfig, ModelConfig, RooflineConfig
from harness.cost_model import shape
from harness.cost_model.layout import Layout
from harness.cost_model.links import all_reduce_s, all_to_all_s, gather_s, ring_bytes_per_s
from harness.cost_model.memory import kv_bytes_per_device, kv_tokens, state_bytes

__all__ = ["Layout", "roofline"]

_OPTIMIZER_BYTES = 28
"""AdamW, per parameter, in float32: weight, gradient and two moments are read, weight and moments written."""


def roofline(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> CostConfig:
    """What a worker's work costs: of an engine of `engine_devices`, or a rank of `train_devices`.

    Raises ConfigError where an engine's memory cannot hold the weights.
    """
    slower = factors.colocated_train_factor if layout.colocated else 1.0
    return CostConfig(
        name=factors.name,
        decode_step_s=decode_step_s(model, factors, layout),
        decode_step_s_per_sample=decode_s_per_sample(model, device, factors, layout),
        decode_weights_s=decode_weights_s(model, device, factors, layout),
        decode_s_per_cached_token=decode_s_per_cached_token(model, device, factors, layout),
        kv_tokens=kv_tokens(model, device, factors, layout),
        prefill_s_per_token=prefill_s_per_token(model, device, factors, layout),
        prefill_s_per_pair=shape.forward_flops_per_pair(model) / _engine_flops(device, factors.forward_share, layout),
        log_prob_s_per_token=log_prob_s_per_token(model, device, factors, layout),
        log_prob_s_per_pair=log_prob_s_per_pair(model, device, factors, layout),
        log_prob_call_s=log_prob_call_s(model, device, factors, layout),
        train_s_per_token=slower * train_s_per_token(model, device, factors, layout),
        train_s_per_pair=slower * train_s_per_pair(model, device, factors, layout),
        train_call_s=slower * train_call_s(model, device, factors, layout),
        train_step_s=slower * optimizer_s(model, device, factors, layout),
        call_s=factors.call_s,
        weight_bytes=shape.weight_bytes(model),
        network_bytes_per_s=transfer_bytes_per_s(device, factors, layout),
        host_bytes_per_s=device.host_bytes_per_s * factors.host_share * layout.engine_devices,
        sync_s=factors.sync_s,
        offload_s=factors.offload_s + trainer_moves_s(model, device, factors, layout),
        reload_s=factors.reload_s + trainer_moves_s(model, device, factors, layout),
        reward_s_per_sample=factors.reward_s_per_sample,
        prompt_tokens=factors.prompt_tokens,
        lengths=factors.lengths,
    )


def decode_step_s(model: ModelConfig, factors: RooflineConfig, layout: Layout) -> float:
    """What every step takes, whatever runs: the engine's own work, and the latency of two all-reduces in each layer
    where devices share it (Megatron-LM: Shoeybi et al., arXiv 1909.08053, section 3)."""
    return factors.decode_step_s + (2 * model.layers * factors.latency_s if layout.engine_devices > 1 else 0.0)


def decode_weights_s(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """All matrices are read once in a step, each device its part (Pope et al., arXiv 2211.05102, section 2)."""
    read = shape.matmul_parameters(model) * shape.bytes_per_number(model) / layout.engine_devices
    return read / (device.memory_bytes_per_s * factors.memory_share)


def decode_s_per_sample(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """The matrix products of one token, and the bytes of its all-reduces: the other side of a step's roofline. So bytes
    between devices hide while weights are read."""
    products = shape.forward_flops_per_token(model) / _engine_flops(device, factors.decode_share, layout)
    return products + 2 * _all_reduce_s_per_token(model, device, factors, layout.engine_devices)


def decode_s_per_cached_token(
    model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout
) -> float:
    """Keys and values of every running sample are read in every step (Pope et al., section 3.3); where many queries
    share them, the products may take longer."""
    read_s = kv_bytes_per_device(model, layout) / (device.memory_bytes_per_s * factors.memory_share)
    return max(read_s, shape.decode_flops_per_cached_token(model) / _engine_flops(device, factors.decode_share, layout))


def prefill_s_per_token(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Bound by operations; two all-reduces in each layer."""
    products = shape.prefill_flops_per_token(model) / _engine_flops(device, factors.forward_share, layout)
    return products + 2 * _all_reduce_s_per_token(model, device, factors, layout.engine_devices)


def log_prob_s_per_token(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """A forward pass with the head; two all-reduces in each layer, and two all-to-alls where experts are spread."""
    products = shape.forward_flops_per_token(model) / _flops(device, factors.forward_share, layout.tensor)
    return _in_stages(products + 2 * _exposed_s_per_token(model, device, factors, layout), layout)


def log_prob_s_per_pair(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Attention of a forward pass."""
    seconds = shape.forward_flops_per_pair(model) / _flops(device, factors.forward_share, layout.tensor)
    return _in_stages(seconds, layout)


def log_prob_call_s(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Shards are gathered once."""
    return _communication_s(model, device, factors, layout, gathers=1, scatters=0, in_layers=2)


def train_s_per_token(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Forward, backward as two of it, and once more forward with recomputation. Each pass forward or backward has two
    all-reduces in each layer (Shoeybi et al., section 3), and as many all-to-alls where experts are spread."""
    passes = shape.train_passes(layout.recompute)
    products = passes * shape.forward_flops_per_token(model) / _flops(device, factors.train_share, layout.tensor)
    return _in_stages(products + _collectives(layout) * _exposed_s_per_token(model, device, factors, layout), layout)


def train_s_per_pair(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Attention of all passes."""
    passes = shape.train_passes(layout.recompute)
    seconds = passes * shape.forward_flops_per_pair(model) / _flops(device, factors.train_share, layout.tensor)
    return _in_stages(seconds, layout)


def train_call_s(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Shards are gathered for the forward pass and for the backward pass, and gradients reduced (ZeRO-3: Rajbhandari et
    al., arXiv 1910.02054, section 7.2.2), in float32, once for each micro-batch."""
    return _communication_s(model, device, factors, layout, gathers=2, scatters=1, in_layers=_collectives(layout))


def optimizer_s(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Bound by memory: each device updates its shard."""
    moved = _OPTIMIZER_BYTES * shape.parameters(model) / layout.shards
    return moved / (device.memory_bytes_per_s * factors.memory_share)


def transfer_bytes_per_s(device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """A broadcast from one device to all engines, piece by piece in a chain: as fast as its slowest way."""
    way = device.link_bytes_per_s if layout.one_node else device.network_bytes_per_s
    return way * factors.network_share


def trainer_moves_s(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """Where rollout takes turns with training, the trainer's state leaves for the host, or comes back."""
    if not layout.colocated:
        return 0.0
    return state_bytes(model, layout) / (device.host_bytes_per_s * factors.host_share)


def _flops(device: DeviceConfig, share: float, devices: int) -> float:
    """Operations per second of devices that share each layer."""
    return devices * device.flops * share


def _engine_flops(device: DeviceConfig, share: float, layout: Layout) -> float:
    return _flops(device, share, layout.engine_devices)


def _in_stages(seconds: float, layout: Layout) -> float:
    """Each stage does its part of the layers, and stands still for (p - 1) / (m + p - 1) of the time with p stages and
    m samples (GPipe's bubble: Narayanan et al., arXiv 2104.04473, section 2.2.1)."""
    stages, samples = layout.pipeline, layout.samples_per_call
    return seconds / stages * (samples + stages - 1) / samples


def _collectives(layout: Layout) -> int:
    """In each layer: two forward, two backward, and two of the second pass forward."""
    return 6 if layout.recompute else 4


def _all_reduce_s_per_token(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, devices: int) -> float:
    """One all-reduce of a token's activations in every layer. It also sums what experts give that lie on different
    devices."""
    number = model.layers * model.hidden * shape.bytes_per_number(model)
    return all_reduce_s(number, devices, ring_bytes_per_s(devices, device, factors))


def _all_to_all_s_per_token(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """A token's activations go to each of its experts, or come back, in every layer; each of a rank's devices
    that share a layer sends its part (GShard: Lepikhin et al., arXiv 2006.16668, section 3.2)."""
    sent = model.layers * model.hidden * shape.bytes_per_number(model) * model.active_experts / layout.tensor
    return all_to_all_s(sent, layout.expert_ranks, device, factors, apart=layout.train_devices)


def _exposed_s_per_token(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: Layout) -> float:
    """One of both in every layer, less what hides behind computing."""
    reduce_s = _all_reduce_s_per_token(model, device, factors, layout.tensor)
    return (1.0 - factors.overlap) * (reduce_s + _all_to_all_s_per_token(model, device, factors, layout))


def _communication_s(
    model: ModelConfig,
    device: DeviceConfig,
    factors: RooflineConfig,
    layout: Layout,
    *,
    gathers: int,
    scatters: int,
    in_layers: int,
) -> float:
    """Of one call: bytes between data-parallel ranks, each of a rank's devices its part, and the latency of every
    collective in every layer; less what hides behind computing. Experts that are spread are gathered by the ranks that
    have the same ones. in_layers: all-reduces of each layer, and all-to-alls."""
    ranks, spread = layout.train_ranks, layout.expert_ranks
    number = (gathers * shape.bytes_per_number(model) + scatters * 4) / layout.train_devices
    experts = shape.expert_parameters(model)

    def moved_s(weights: float, ranks: int, apart: int) -> float:
        return gather_s(weights * number, ranks, ring_bytes_per_s(ranks, device, factors, apart=apart))

    bytes_s = moved_s(shape.parameters(model) - experts, ranks, layout.train_devices)
    bytes_s += moved_s(experts / spread, ranks // spread, layout.train_devices * spread)
    collectives = (gathers + scatters) * (ranks > 1) + in_layers * ((layout.tensor > 1) + (spread > 1))
    latency_s = collectives * model.layers / layout.pipeline * factors.latency_s
    return (1.0 - factors.overlap) * (bytes_s + latency_s)
