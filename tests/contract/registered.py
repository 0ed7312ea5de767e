"""The engines that the contract suite runs, and what it has to know about each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.contract.engine_under_test import EngineUnderTest, constructed, named
from tests.contract.simulated_engine import SIMULATED


def processes(engine: Any) -> Sequence[int]:
    ids: Sequence[int] = engine.process_ids
    return ids


TORCH = EngineUnderTest(name="torch", start=constructed("engines.torch.rollout:TorchRollout"))
VLLM = EngineUnderTest(
    name="vllm",
    marker="vllm",
    start=constructed("engines.vllm.rollout:VLLMRollout"),
    processes=processes,
    cannot={"resumed draws": "vLLM's generator of a sample starts anew with each request"},
    start_timeout_s=600.0,
)
SGLANG = EngineUnderTest(
    name="sglang",
    marker="sglang",
    start=constructed("engines.sglang.rollout:SGLangRollout"),
    processes=processes,
    start_timeout_s=400.0,
)

REGISTERED = {engine.name: engine for engine in (TORCH, SIMULATED, VLLM, SGLANG)}
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
    return (
        found if isinstance(found, EngineUnderTest) else EngineUnderTest(name=found.__name__, start=constructed(path))
    )
