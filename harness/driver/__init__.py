"""Puts a job together from its configuration, runs its schedule, and writes down what happened."""

PRELOAD = (
    "harness.driver.build",
    "engines.torch.fsdp",
    "engines.torch.rollout",
    "engines.torch.model:load_architecture",
    "torch.distributed.tensor",
    "safetensors.torch",
)
"""Modules, or functions of modules to call, that cost a worker most of its start: for `harness.runtime.fork_server`."""
