"""What runs inside vLLM's worker process. Needs vLLM, which imports it by name; nothing of the adapter does."""
