"""How a simulated job lies on devices, and what its engines hold beside their weights.

Of a device's memory, `kv_share` may be used; the rest is the driver's, the libraries' and lost between blocks. Where
rollout takes turns with training (colocated), the one that waits keeps its state in host memory, which is taken to be
large enough, and an engine may use `kv_share_colocated`. Whether all of a job fits, real or simulated, is counted by
harness/cost_model/memory_plan.py."""

from dataclasses import dataclass

from harness.config import ConfigError, DeviceConfig, EngineConfig, ModelConfig, RooflineConfig
from harness.cost_model.shape import bytes_per_number, kv_bytes_per_token, parameters, served_bytes, weight_bytes

PREFILL_TOKENS = 8192  # most tokens of a prefill pass (engines/torch/kv_slots.py; vLLM's default is the same)
DRAW_BYTES = 20
"""Bytes for each logit of a decode step: float32 logits, log-probabilities and probabilities, and their sum in float64
(engines/torch/sampling.py)."""


def key_length(tokens: int) -> int:
    """Tokens that the slot of a sample of so many tokens holds: as engines/torch/kv_slots.py, which loads torch."""
    step = 16 if tokens <= 256 else 256
    return -(-tokens // step) * step


def is_fp8(engine: EngineConfig) -> bool:
    """Whether the engine's matrices have 8 bits."""
    return engine.options.get("quantization") == "fp8"


@dataclass(frozen=True)
class EngineMemory:
    """The memory of a rollout engine. longest: tokens of a sample. paged: the cache is of whatever memory is left, and
    holds one sample at least; else it has room for every slot at full length."""

    model: ModelConfig
    engine: EngineConfig
    longest: int
    paged: bool = False

    @property
    def weights(self) -> float:
        """Bytes of weights on each device."""
        return served_bytes(self.model, is_fp8(self.engine)) / self.engine.tensor_parallel

    @property
    def token(self) -> float:
        """Keys and values of one token. Heads are divided over an engine's devices; more devices than heads hold some
        of them twice."""
        return kv_bytes_per_token(self.model) / min(self.engine.tensor_parallel, self.model.kv_heads)

    @property
    def kv_cache(self) -> float:
        """Bytes of the least KV cache on each device: all slots of the embedded engine, one sample of others."""
        slots = 1 if self.paged or self.engine.name != "torch" else self.engine.slots
        return slots * key_length(self.longest) * self.token

    @property
    def work(self) -> float:
        """Bytes of a step's tensors: a layer's widest moment in prefill; in decoding, drawing a token for each slot."""
        model = self.model
        networks = model.active_experts if model.experts else 1
        tokens = min(PREFILL_TOKENS, self.engine.slots * self.longest)
        prefill = tokens * bytes_per_number(model) * (3 * model.ff * networks + 4 * model.hidden)
        return max(prefill / self.engine.tensor_parallel, self.engine.slots * model.vocabulary * DRAW_BYTES)


GIB = 1 << 30

STATE_BYTES = 16  # bytes per parameter: weights, gradients and both moments of AdamW, in float32


@dataclass(frozen=True)
class JobLayout:
    """Devices of a rollout engine, and of the training world. Scoring is laid out as training is."""

    engine_devices: int = 1  # of one rollout engine: its tensor parallelism
    train_devices: int = 1  # of one data-parallel rank: tensor x pipeline
    train_ranks: int = 1  # data-parallel ranks; they share weights, gradients and optimizer (FSDP, ZeRO-3)
    colocated: bool = False  # rollout takes turns with training on the same devices
    pipeline: int = 1  # of train_devices: stages that the layers are cut into
    expert_ranks: int = 1  # of train_ranks: those over which the experts of each layer are spread
    samples_per_call: int = 1  # of a rank's micro-batch: they go through the pipeline one after another
    recompute: bool = False  # activations inside of layers are computed again for the backward pass
    one_node: bool = False  # all devices of the job stand in one node
    fp8: bool = False  # the engine's matrices have 8 bits
    adapters: int = 0  # parameters of these, where they alone are trained

    @property
    def tensor(self) -> int:
        """Devices of a rank that share each layer."""
        return self.train_devices // self.pipeline

    @property
    def shards(self) -> int:
        """Devices over which training state is cut."""
        return self.train_ranks * self.train_devices


def state_bytes(model: ModelConfig, layout: JobLayout) -> float:
    """Training state of one device: 16 bytes per parameter over all devices (ZeRO-3: Rajbhandari et al., arXiv
    1910.02054, section 5.3; they count weights and gradients in half precision and a third copy in float32: 16 too).
    With adapters it is 16 for each of theirs, and the weights in the model's dtype."""
    if layout.adapters:
        return (STATE_BYTES * layout.adapters + weight_bytes(model)) / layout.shards
    return STATE_BYTES * parameters(model) / layout.shards


def typical_tokens(factors: RooflineConfig) -> float:
    """Prompt and response of a sample, where one number has to do: for layers with sliding windows."""
    return factors.prompt_tokens + (factors.lengths.mean or factors.lengths.cap)


def kv_bytes_per_device(model: ModelConfig, layout: JobLayout, length: float = 0.0) -> float:
    """Bytes of one token's keys and values on each device. Heads are divided over an engine's devices; more devices
    than heads hold some of them twice. length: of a typical sample, where layers have sliding windows."""
    return kv_bytes_per_token(model, length) / min(layout.engine_devices, model.kv_heads)


def engine_memory(device: DeviceConfig, factors: RooflineConfig, layout: JobLayout) -> float:
    """Bytes that a rollout engine may use on each of its devices."""
    return device.memory_bytes * (factors.kv_share_colocated if layout.colocated else factors.kv_share)


def kv_tokens(model: ModelConfig, device: DeviceConfig, factors: RooflineConfig, layout: JobLayout) -> int:
    """Tokens that the KV cache of an engine holds beside the weights. Raises ConfigError where these leave no room."""
    there = engine_memory(device, factors, layout)
    weights = served_bytes(model, layout.fp8) / layout.engine_devices
    tokens = int((there - weights) // kv_bytes_per_device(model, layout, typical_tokens(factors)))
    if tokens < 1:
        raise ConfigError(
            f"model={model.name}: its weights are {weights / GIB:.1f} GiB on each device of a "
            f"rollout engine, which may use {there / GIB:.1f} GiB of device={device.name}; {advice(layout)}"
        )
    return tokens


def advice(layout: JobLayout) -> str:
    """The end of a sentence: settings that make an engine smaller on each device."""
    wider = 2 * layout.engine_devices
    return f"set engine.tensor_parallel={wider} or a device with more memory, as in device=h200"
