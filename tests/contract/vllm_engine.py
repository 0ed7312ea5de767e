"""vLLM under the contract: its own processes, started once for tied and once for untied embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from engines.vllm.rollout import VLLMRollout
from harness.protocols import RolloutEngine
from tests.contract.engine_under_test import EngineUnderTest, constructed


def processes(engine: RolloutEngine) -> Sequence[int]:
    assert isinstance(engine, VLLMRollout)
    return engine.process_ids


VLLM = EngineUnderTest(
    name="vllm",
    marker="vllm",
    start=constructed("engines.vllm.rollout:VLLMRollout"),
    processes=processes,
    cannot={"resumed draws": "vLLM's generator of a sample starts anew with each request"},
    start_timeout_s=600.0,
)
