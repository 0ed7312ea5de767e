"""SGLang under the contract: a server for tied embeddings, then one for untied ones."""

from __future__ import annotations

from collections.abc import Sequence

from engines.sglang.rollout import SGLangRollout
from harness.protocols import RolloutEngine
from tests.contract.engine_under_test import EngineUnderTest, constructed


def processes(engine: RolloutEngine) -> Sequence[int]:
    assert isinstance(engine, SGLangRollout)
    return engine.process_ids


SGLANG = EngineUnderTest(
    name="sglang",
    marker="sglang",
    start=constructed("engines.sglang.rollout:SGLangRollout"),
    processes=processes,
    start_timeout_s=400.0,
)
