"""The engines that the contract suite runs, and what it has to know about each."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest

from engines.simulated.rollout import SimulatedRollout
from harness.config import LengthsConfig
from harness.cost_model.lengths import ResponseLengths
from harness.protocols import RolloutEngine
from tests.contract.engine_under_test import EngineUnderTest, Setting, construct, constructed, named
from tests.support.simulated_setting import COST


def processes(engine: Any) -> Sequence[int]:
    ids: Sequence[int] = engine.process_ids
    return ids


TORCH = EngineUnderTest(name="torch", start=constructed("engines.torch.rollout:TorchRollout"))


async def simulated(setting: Setting) -> RolloutEngine:
    """On a real clock, at a millisecond a step; lengths are drawn by the cost model, whatever the sampling."""
    lengths = LengthsConfig(kind="uniform", mean=40.0, cap=80)
    return SimulatedRollout(
        replace(COST, decode_step_s=1e-3, call_s=0.0, offload_s=1e-3, reload_s=1e-3),
        ResponseLengths(lengths, setting.seed),
        slots=setting.slots,
        group_size=1,
        clock=setting.clock,
        load_s=1e-3,
        name=setting.name,
    )


SIMULATED = EngineUnderTest(
    name="simulated",
    start=simulated,
    cannot={"tokens": "a simulated sample has a length and no content"},
    sample_by=lambda engine, sampling: None,
    prompt=lambda prompt: np.array([len(prompt)]),
)


def vllm_by(runner: Literal["0", "1"]) -> Callable[[Setting], Awaitable[RolloutEngine]]:
    """Start vLLM with its model runner V1 or V2, which samples by kernels of Triton."""

    async def start(setting: Setting) -> RolloutEngine:
        if runner == "1" and not (find_spec("triton") and find_spec("triton.backends.cpu")):
            pytest.skip("model runner V2 needs Triton with a backend for CPUs; on GPUs: test_vllm_on_a_gpu.py")
        with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=runner):
            return construct(named("engines.vllm.rollout:VLLMRollout"), setting)

    return start


VLLM = EngineUnderTest(
    name="vllm",
    marker="vllm",
    start=vllm_by("0"),
    processes=processes,
    cannot={"resumed draws": "vLLM's generator of a sample starts anew with each request"},
    start_timeout_s=600.0,
)
VLLM_V2 = replace(VLLM, name="vllm_v2", start=vllm_by("1"))
SGLANG = EngineUnderTest(
    name="sglang",
    marker="sglang",
    start=constructed("engines.sglang.rollout:SGLangRollout"),
    processes=processes,
    start_timeout_s=400.0,
)

REGISTERED = {engine.name: engine for engine in (TORCH, SIMULATED, VLLM, VLLM_V2, SGLANG)}
"""By name. What an engine needs is imported when it starts, not here: this file loads in every environment."""


def engine_called(path: str) -> EngineUnderTest:
    """A registered name, or "module:name" of an engine's class or of an `EngineUnderTest`.

    Raises ValueError for a name that is neither.
    """
    if path in REGISTERED:
        return REGISTERED[path]
    if ":" not in path:
        raise ValueError(f"{path} is none of {', '.join(REGISTERED)}, and no module:Class of an engine")
    found = named(path)
    if isinstance(found, EngineUnderTest):
        return found
    return EngineUnderTest(name=found.__name__, start=constructed(path))
