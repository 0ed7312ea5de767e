"""The part of a device's memory that a rollout engine may take. It follows from the plan of memory, so it is the same
in every run: nothing is asked of the device, where what is free depends on who came first."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cost_model.memory_plan import Item, MemoryPlan, PlanSetting, PoolMemory


@dataclass(frozen=True)
class EngineShare:
    """Bytes on each device of an engine: weights; cache, at most, of keys and values, `token` of them for each token;
    work, of a step. device: all that the device has, or without GPUs the machine."""

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


def engine_share(plan: MemoryPlan, setting: PlanSetting, token: float) -> EngineShare:
    """The engine's share by a plan that fits. token: bytes of a token in the cache.

    On GPUs the cache may have what all else leaves on its device in any phase in which it is there: alone, beside new
    weights and buckets; beside a trainer, what that has while engines generate. Devices of a CPU job have their memory
    together, and engines share evenly what the job as a whole leaves.
    """
    pool = next(pool for pool in plan.pools if "rollout" in pool.roles)
    cache = _item(pool, "KV cache")
    if setting.gpu:
        left = plan.there - max(pool.of(phase) - cache.bytes for phase in cache.phases)
    else:
        left = cache.bytes + (plan.there - plan.everything) / pool.devices
    work = _item(pool, "a step of the engine")
    return EngineShare(
        _item(pool, "engine's weights").bytes, left, work.bytes, token, setting.device_bytes, setting.gpu
    )


def _item(pool: PoolMemory, what: str) -> Item:
    return next(item for item in pool.items if item.what == what)
