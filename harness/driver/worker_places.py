"""Where each worker computes, as the timeline shows it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.placement import Placement
from harness.metrics.timeline import Place


def worker_places(
    placement: Placement, *, pooled: bool, host: Sequence[str], per_engine: int = 1
) -> dict[tuple[str, str], Place]:
    """(role, worker) -> its pool and devices, for the timeline. A simulated (`pooled`) role is one worker that stands
    for all its devices, save rollout, whose engines each have `per_engine` of their own. host: the roles there."""
    found: dict[tuple[str, str], Place] = {}
    for pool, devices in placement.pools.items():
        names = tuple(f"device {device}" for device in devices)
        for role in (role for role, its in placement.devices.items() if its == devices):
            if pooled and role != "rollout":
                found[role, "0"] = Place(pool, names)
            else:
                size = per_engine if role == "rollout" else 1
                parts = [names[start : start + size] for start in range(0, len(names), size)]
                found |= {(role, str(number)): Place(pool, part) for number, part in enumerate(parts)}
    return found | {(role, "0"): Place(f"host {role}", (f"host {role}",)) for role in host}
