"""One file per engine. The registry names them without importing them: an engine's packages load when it is used."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "sglang": "engines.sglang.rollout:SGLangRollout",
    "torch": "engines.torch.rollout:TorchRollout",
    "vllm": "engines.vllm.rollout:VLLMRollout",
}
"""Name in the configuration -> "module:Class" of a `harness.protocols.RolloutEngine`."""

PACKAGES = {"vllm": "vllm"}
"""Engine -> the module that it imports and that is not in every environment; `make setup-<engine>` installs it."""
