"""Which shares of a device's peaks a profile's costs imply: the inverse of `harness.cost_model.roofline`."""

from __future__ import annotations

from collections.abc import Collection

from harness.config import CostConfig, DeviceConfig, ModelConfig
from harness.cost_model import shape

_OPTIMIZER_BYTES = 28  # per parameter, as of harness.cost_model.roofline


def known_device(name: str, known: Collection[str]) -> str | None:
    """Which of `known` is the device that calls itself `name`, such as h100 for "NVIDIA H100 80GB HBM3"."""
    words = name.lower().replace("-", " ").split()
    found = [each for each in known if each in words]
    return max(found, key=len) if found else None


def implied_shares(cost: CostConfig, model: ModelConfig, device: DeviceConfig) -> dict[str, float]:
    """By the names of `RooflineConfig`, of those that can be said: a cost of nothing has no share.

    memory_share comes from reading caches, weights and optimizer state, whichever was seen.
    """
    flops = shape.forward_flops_per_token(model)
    read = shape.kv_bytes_per_token(model)
    weights = shape.matmul_parameters(model) * shape.bytes_per_number(model)
    state = _OPTIMIZER_BYTES * shape.parameters(model)
    found = {
        "forward_share": (flops / device.flops, cost.log_prob_s_per_token),
        "train_share": (shape.train_passes(False) * flops / device.flops, cost.train_s_per_token),
        "decode_share": (flops / device.flops, cost.decode_step_s_per_sample),
        "memory_share (caches)": (read / device.memory_bytes_per_s, cost.decode_s_per_cached_token),
        "memory_share (weights)": (weights / device.memory_bytes_per_s, cost.decode_weights_s),
        "memory_share (optimizer)": (state / device.memory_bytes_per_s, cost.train_step_s),
        "host_share": (1 / device.host_bytes_per_s, 1 / cost.host_bytes_per_s),
    }
    return {name: least / seconds for name, (least, seconds) in found.items() if seconds > 0}
