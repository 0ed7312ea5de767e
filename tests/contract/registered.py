"""The engines that the contract suite runs, a line each, and how those without a file of their own are started."""

from __future__ import annotations

from tests.contract.engine_under_test import EngineUnderTest, constructed, named
from tests.contract.sglang_engine import SGLANG
from tests.contract.simulated_engine import SIMULATED
from tests.contract.vllm_engine import VLLM

TORCH = EngineUnderTest(name="torch", start=constructed("engines.torch.rollout:TorchRollout"))

REGISTERED = {
    engine.name: engine
    for engine in (
        TORCH,
        SIMULATED,
        VLLM,
        SGLANG,
    )
}
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
