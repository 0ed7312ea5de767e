"""The simulated engine under the contract: on a real clock, at a millisecond a step; no token is compared."""

from __future__ import annotations

import numpy as np

from engines.simulated.rollout import SimulatedRollout
from harness.config import CostConfig, LengthsConfig
from harness.cost_model.lengths import ResponseLengths
from harness.protocols import RolloutEngine, Sampling
from tests.contract.engine_under_test import EngineUnderTest, Setting

COST = CostConfig(
    name="contract",
    decode_step_s=1e-3,
    decode_step_s_per_sample=0.0,
    prefill_s_per_token=1e-6,
    log_prob_s_per_token=1e-6,
    train_s_per_token=1e-6,
    train_step_s=1e-3,
    weight_bytes=1e3,
    call_s=0.0,
    network_bytes_per_s=1e9,
    host_bytes_per_s=1e9,
    sync_s=0.0,
    offload_s=1e-3,
    reload_s=1e-3,
    prompt_tokens=8,
    lengths=LengthsConfig(kind="uniform", mean=40.0, cap=80),
)


async def start(setting: Setting) -> RolloutEngine:
    return SimulatedRollout(
        COST,
        ResponseLengths(COST.lengths, setting.seed),
        slots=setting.slots,
        group_size=1,
        clock=setting.clock,
        load_s=1e-3,
        name=setting.name,
    )


def keep_sampling(engine: RolloutEngine, sampling: Sampling) -> None:
    """Its lengths are drawn by the cost model, whatever the sampling."""


def number_of_tokens(prompt: np.ndarray) -> np.ndarray:
    return np.array([len(prompt)])


SIMULATED = EngineUnderTest(
    name="simulated",
    start=start,
    cannot={"tokens": "a simulated sample has a length and no content"},
    sample_by=keep_sampling,
    prompt=number_of_tokens,
)
