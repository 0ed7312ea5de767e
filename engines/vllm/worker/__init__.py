"""The code inside of vLLM's worker process. Needs vLLM, which imports it by name; nothing of the adapter does."""
