"""Costs of simulated work from a model's shape, a device's figures and a layout: a formula for each phase.

Work lasts as long as its slowest part: operations over the device's peak, or bytes over its memory's bandwidth, each
times the share of the peak that is reached (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009). What is
sent between devices is added, less the share `overlap` that hides behind computing. docs/simulator.md says what is left
out."""

from dataclasses import dataclass, fields

from harness.config import CostConfig, DeviceConfig, ModelConfig, RooflineConfig, SystemConfig
from harness.cost_model import shape
from harness.cost_model.memory import JobLayout, kv_bytes_per_device, kv_tokens, state_bytes, typical_tokens

OPTIMIZER_BYTES = 28
"""AdamW, per parameter, in float32: weight, gradient and two moments are read, weight and moments written."""


def roofline(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: JobLayout) -> CostConfig:
    """Costs of a worker's work: an engine of `engine_devices`, or a rank of `train_devices`. Raises ConfigError where
    an engine's memory cannot hold the weights."""
    phases = _Phases(model, device, factors, layout)
    slower = factors.colocated_train_factor if layout.colocated else 1.0
    return CostConfig(
        name=factors.name,
        decode_step_s=phases.decode_step_s(),
        decode_step_s_per_sample=phases.decode_s_per_sample(),
        decode_weights_s=phases.read_s(
            shape.matmul_parameters(model) - shape.expert_parameters(model), whole=shape.head_parameters(model)
        ),
        decode_experts_s=phases.read_s(shape.expert_parameters(model)),
        expert_share=model.active_experts / model.experts if model.experts else 1.0,
        decode_s_per_cached_token=phases.decode_s_per_cached_token(),
        kv_tokens=kv_tokens(model, device, factors, layout),
        prefill_s_per_token=phases.prefill_s_per_token(),
        prefill_s_per_pair=phases.prefill_s_per_pair(),
        log_prob_s_per_token=phases.log_prob_s_per_token(),
        log_prob_s_per_pair=phases.pass_s_per_pair(1, factors.forward_share),
        log_prob_call_s=phases.communication_s(gathers=1, scatters=0, in_layers=2),
        train_s_per_token=slower * phases.train_s_per_token(),
        train_s_per_pair=slower * phases.pass_s_per_pair(shape.train_passes(layout.recompute), factors.train_share),
        train_call_s=slower * phases.train_call_s(),
        train_step_s=slower * phases.optimizer_s(),
        call_s=factors.call_s,
        weight_bytes=shape.weight_bytes(model),
        network_bytes_per_s=phases.transfer_bytes_per_s(),
        host_bytes_per_s=device.host_bytes_per_s * factors.host_share * layout.engine_devices,
        sync_s=factors.sync_s,
        offload_s=factors.offload_s + phases.trainer_moves_s(),
        reload_s=factors.reload_s + phases.trainer_moves_s(),
        reward_s_per_sample=factors.reward_s_per_sample,
        prompt_tokens=factors.prompt_tokens,
        lengths=factors.lengths,
        **{field.name: getattr(factors, field.name) for field in fields(SystemConfig)},
    )


@dataclass(frozen=True)
class _Phases:
    model: ModelConfig
    device: DeviceConfig
    factors: RooflineConfig
    layout: JobLayout

    @property
    def _typical(self) -> float:
        return typical_tokens(self.factors)

    def decode_step_s(self) -> float:
        """Seconds that every step takes, whatever runs: the engine's own work, and the latency of two all-reduces in
        each layer where devices share it (Megatron-LM: Shoeybi et al., arXiv 1909.08053, section 3)."""
        latency_s = 2 * self.model.layers * self.factors.latency_s if self.layout.engine_devices > 1 else 0.0
        return self.factors.decode_step_s + latency_s

    def read_s(self, matrices: int, whole: int = 0) -> float:
        """Seconds in which an engine reads so many weights, each device its part: what a step needs it reads once (Pope
        et al., arXiv 2211.05102, section 2). whole: how many of them keep the model's dtype in any case."""
        number = shape.bytes_per_number(self.model)
        bytes_ = whole * number + (matrices - whole) * (1 if self.layout.fp8 else number)
        return bytes_ / self.layout.engine_devices / self._memory_bytes_per_s

    def decode_s_per_sample(self) -> float:
        """The matrix products of one token, and the bytes of its all-reduces: the other side of a step's roofline. So
        bytes between devices hide while weights are read."""
        products = shape.forward_flops_per_token(self.model) / self.engine_flops(self.factors.decode_share)
        return products + 2 * self._all_reduce_s_per_token(self.layout.engine_devices)

    def decode_s_per_cached_token(self) -> float:
        """Keys and values of every running sample are read in every step (Pope et al., section 3.3); where many queries
        share them, the products may take longer."""
        read_s = kv_bytes_per_device(self.model, self.layout, self._typical) / self._memory_bytes_per_s
        products = shape.decode_flops_per_cached_token(self.model, self._typical) / self.engine_flops(
            self.factors.decode_share
        )
        return max(read_s, products)

    def prefill_s_per_token(self) -> float:
        """Bound by operations; two all-reduces in each layer."""
        products = shape.prefill_flops_per_token(self.model) / self.engine_flops(self.factors.forward_share)
        return products + 2 * self._all_reduce_s_per_token(self.layout.engine_devices)

    def prefill_s_per_pair(self) -> float:
        """Attention over the prompt."""
        pair = shape.forward_flops_per_pair(self.model, self._typical)
        return pair / self.engine_flops(self.factors.forward_share)

    def log_prob_s_per_token(self) -> float:
        """A forward pass with the head; two all-reduces in each layer, and two all-to-alls where experts are spread."""
        products = shape.forward_flops_per_token(self.model) / self._rank_flops(self.factors.forward_share)
        return self._in_stages(products + 2 * self._exposed_s_per_token())

    def pass_s_per_pair(self, passes: int, share: float) -> float:
        """Attention, of so many forward passes."""
        return self._in_stages(
            passes * shape.forward_flops_per_pair(self.model, self._typical) / self._rank_flops(share)
        )

    def train_s_per_token(self) -> float:
        """Forward, backward as two of it, and once more forward with recomputation. Each pass forward or backward has
        two all-reduces in each layer (Shoeybi et al., section 3), and as many all-to-alls where experts are spread."""
        flops = shape.train_flops_per_token(self.model, self.layout.adapters, self.layout.recompute)
        products = flops / self._rank_flops(self.factors.train_share)
        return self._in_stages(products + self._collectives * self._exposed_s_per_token())

    def train_call_s(self) -> float:
        """Shards are gathered for the forward pass and for the backward pass, and gradients reduced (ZeRO-3:
        Rajbhandari et al., arXiv 1910.02054, section 7.2.2), in float32, once for each micro-batch."""
        return self.communication_s(gathers=2, scatters=1, in_layers=self._collectives)

    def optimizer_s(self) -> float:
        """Bound by memory: each device updates its shard."""
        trained = self.layout.adapters or shape.parameters(self.model)
        return OPTIMIZER_BYTES * trained / self.layout.shards / self._memory_bytes_per_s

    def transfer_bytes_per_s(self) -> float:
        """A broadcast from one device to all engines, piece by piece in a chain: as fast as its slowest way."""
        way = self.device.link_bytes_per_s if self.layout.one_node else self.device.network_bytes_per_s
        return way * self.factors.network_share

    def trainer_moves_s(self) -> float:
        """Seconds for the trainer's state to the host, or back, where rollout takes turns with training."""
        if not self.layout.colocated:
            return 0.0
        return state_bytes(self.model, self.layout) / (self.device.host_bytes_per_s * self.factors.host_share)

    def communication_s(self, *, gathers: int, scatters: int, in_layers: int) -> float:
        """Seconds of one call: bytes between data-parallel ranks, each of a rank's devices its part, and the latency of
        every collective in every layer; less what hides behind computing. Experts that are spread are gathered by the
        ranks that have the same ones. in_layers: all-reduces of each layer, and all-to-alls."""
        layout, ranks, spread = self.layout, self.layout.train_ranks, self.layout.expert_ranks
        experts = shape.expert_parameters(self.model)

        def moved_s(weights: float, trained: float, ranks: int, apart: int) -> float:
            bytes_ = (
                gathers * shape.bytes_per_number(self.model) * weights + scatters * 4 * trained
            ) / layout.train_devices
            return gather_s(bytes_, ranks, ring_bytes_per_s(ranks, self.device, self.factors, apart=apart))

        shared = shape.parameters(self.model) - experts
        bytes_s = moved_s(shared, layout.adapters or shared, ranks, layout.train_devices)
        own = experts / spread
        bytes_s += moved_s(own, 0 if layout.adapters else own, ranks // spread, layout.train_devices * spread)
        collectives = (gathers + scatters) * (ranks > 1) + in_layers * ((layout.tensor > 1) + (spread > 1))
        latency_s = collectives * self.model.layers / layout.pipeline * self.factors.latency_s
        return (1.0 - self.factors.overlap) * (bytes_s + latency_s)

    def engine_flops(self, share: float) -> float:
        """Operations per second of the devices of an engine."""
        return self.layout.engine_devices * self.device.flops * share

    def _rank_flops(self, share: float) -> float:
        """Operations per second of a rank's devices that share each layer."""
        return self.layout.tensor * self.device.flops * share

    @property
    def _memory_bytes_per_s(self) -> float:
        return self.device.memory_bytes_per_s * self.factors.memory_share

    @property
    def _collectives(self) -> int:
        """All-reduces in each layer: two forward, two backward, and two of the second pass forward."""
        return 6 if self.layout.recompute else 4

    def _in_stages(self, seconds: float) -> float:
        """Each stage does its part of the layers, and stands still for (p - 1) / (m + p - 1) of the time with p stages
        and m samples (GPipe's bubble: Narayanan et al., arXiv 2104.04473, section 2.2.1)."""
        stages, samples = self.layout.pipeline, self.layout.samples_per_call
        return seconds / stages * (samples + stages - 1) / samples

    def _all_reduce_s_per_token(self, devices: int) -> float:
        """Seconds of an all-reduce of a token's activations in every layer. It sums what spread experts give, too."""
        number = self.model.layers * self.model.hidden * shape.bytes_per_number(self.model)
        return all_reduce_s(number, devices, ring_bytes_per_s(devices, self.device, self.factors))

    def _exposed_s_per_token(self) -> float:
        """Seconds of one all-reduce and one all-to-all in every layer, less what hides behind computing. In the latter
        a token's activations go to each of its experts, or come back; each of a rank's devices that share a layer sends
        its part (GShard: Lepikhin et al., arXiv 2006.16668, section 3.2)."""
        model, layout = self.model, self.layout
        sent = model.layers * model.hidden * shape.bytes_per_number(model) * model.active_experts / layout.tensor
        to_all_s = all_to_all_s(sent, layout.expert_ranks, self.device, self.factors, apart=layout.train_devices)
        return (1.0 - self.factors.overlap) * (self._all_reduce_s_per_token(layout.tensor) + to_all_s)


# What collectives cost on rings of devices: bytes over bandwidth; latency is counted where collectives are counted.
# Each of n devices sends and receives (n - 1) / n of the bytes in an all-gather or a reduce-scatter, and twice that in
# an all-reduce (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005;
# NCCL tests, PERFORMANCE.md).


def ring_bytes_per_s(devices: int, device: DeviceConfig, factors: RooflineConfig, *, apart: int = 1) -> float:
    """Bytes per second that each of `devices` devices sends while all do, each `apart` devices from the next. Inside of
    a node: the link. Across nodes: rings enter and leave a node by the network of every member in it, so that the
    slower of the link and of these networks together decides."""
    if devices * apart <= device.per_node:
        return device.link_bytes_per_s * factors.network_share
    members = max(1, device.per_node // apart)
    return min(device.link_bytes_per_s, members * device.network_bytes_per_s) * factors.network_share


def gather_s(number: float, devices: int, bytes_per_s: float) -> float:
    """Seconds until every device has all `number` bytes, of which each had its share; also of a reduce-scatter."""
    return (devices - 1) / devices * number / bytes_per_s


def all_to_all_s(
    number: float, devices: int, device: DeviceConfig, factors: RooflineConfig, *, apart: int = 1
) -> float:
    """Seconds until each of `devices` devices, `apart` from the next, has sent `number` bytes in equal parts to all of
    them, itself included: by the link to those in its node, and by its own network to the others meanwhile (GShard:
    Lepikhin et al., arXiv 2006.16668, section 3.3)."""
    near = min(devices, max(1, device.per_node // apart))
    by_link = (near - 1) / devices * number / device.link_bytes_per_s
    by_network = (devices - near) / devices * number / device.network_bytes_per_s
    return max(by_link, by_network) / factors.network_share


def all_reduce_s(number: float, devices: int, bytes_per_s: float) -> float:
    """Seconds until every device has the sum of all devices' `number` bytes."""
    return 2 * gather_s(number, devices, bytes_per_s)
