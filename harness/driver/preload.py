"""What costs a worker most of its start. Imports nothing itself, so that others can begin to import these at once."""

from __future__ import annotations

PRELOAD = (
    "harness.driver.build",
    "engines.torch.fsdp",
    "engines.torch.rollout",
    "engines.torch.model:load_architecture",
    "torch.distributed.tensor",
    "safetensors.torch",
)
"""Modules, or functions of modules to call, for `harness.runtime.fork_server`."""
