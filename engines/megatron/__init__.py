"""Training by megatron-core."""
