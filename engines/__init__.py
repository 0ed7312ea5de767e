"""One file per engine. The registry names them without importing them: an engine's packages load when it is used."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "torch": "engines.torch_rollout:TorchRollout",
}
"""Name in the configuration -> "module:Class" of a `harness.protocols.RolloutEngine`."""
