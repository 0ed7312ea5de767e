"""Costs in whole seconds, and a simulated rollout engine whose samples have given lengths."""

import asyncio
from dataclasses import replace

import numpy as np

from engines.simulated.rollout import SimulatedRollout
from harness.config import CostConfig, LengthsConfig
from harness.cost_model.lengths import ResponseLengths
from harness.protocols import Completion, Request
from harness.runtime.virtual_runtime import VirtualClock

COST = CostConfig(
    name="test", decode_step_s=1.0, decode_step_s_per_sample=0.0, prefill_s_per_token=0.0, log_prob_s_per_token=0.5,
    train_s_per_token=2.0, train_step_s=7.0, weight_bytes=100.0, call_s=3.0, network_bytes_per_s=10.0,
    host_bytes_per_s=50.0, sync_s=0.0, offload_s=4.0, reload_s=5.0, prompt_tokens=10,
    lengths=LengthsConfig(kind="constant", mean=8.0, cap=100),
)  # fmt: skip


class Given(ResponseLengths):
    """Sample `i` has `values[i]` tokens."""

    def __init__(self, *values: int) -> None:
        self.cap, self.values = 1000, np.array(values)

    def of(self, sample_ids: np.ndarray, turns: np.ndarray | int = 0) -> np.ndarray:
        return self.values[sample_ids]


def make_engine(
    *values: int, cost: CostConfig = COST, slots: int = 8, group_size: int = 1, load_s: float = 0.0, **changed: float
) -> SimulatedRollout:
    engine = SimulatedRollout(
        replace(cost, **changed),
        Given(*values),
        slots=slots,
        group_size=group_size,
        clock=VirtualClock(asyncio.get_running_loop()),
        load_s=load_s,
    )
    return engine


def requests(*sample_ids: int, prompt_tokens: int = 10) -> list[Request]:
    return [Request(sample_id, np.array([prompt_tokens])) for sample_id in sample_ids]


def runs(completion: Completion) -> list[tuple[int, int]]:
    assert completion.tokens.dtype == np.int64 and completion.versions.dtype == np.int32
    assert completion.log_probs.dtype == np.float32 and not completion.log_probs.any()
    assert len(completion.tokens) == len(completion.versions) == len(completion.log_probs)
    return list(zip(completion.versions.tolist(), completion.tokens.tolist(), strict=True))


async def drain(engine: SimulatedRollout) -> dict[int, Completion]:
    done: list[Completion] = []
    while engine.running or engine.waiting:
        done += await engine.finished()
    return {completion.sample_id: completion for completion in done}


def now() -> float:
    return asyncio.get_running_loop().time()
