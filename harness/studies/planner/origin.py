"""Where the costs of a plan come from: said wherever its figures are (AsyncFlow, arXiv 2507.01663, section 4.3, plans
with profiles where there are some and with analytical costs where not)."""

from __future__ import annotations

from harness.config import CostConfig, JobConfig


def backed_by_profile(config: JobConfig) -> bool:
    """Whether costs were given, as a profile or a calibration gives them, rather than computed from a data sheet."""
    return isinstance(config.cost, CostConfig)


def origin(config: JobConfig) -> str:
    """For headers and pictures."""
    if backed_by_profile(config):
        return f"profile-backed (cost={config.cost.name}, one layout)"
    return f"analytical (cost={config.cost.name} on device={config.device.name})"
