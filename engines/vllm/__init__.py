"""vLLM: AsyncLLM in the rollout worker, its own processes behind it."""
