"""The embedded engine: rollout, scoring and FSDP2 training in plain torch."""
