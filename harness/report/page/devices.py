"""How the devices of each role spent a run: own work, work of other roles on the same devices, idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.comparison.parts import Cell
from harness.comparison.runs import Run


@dataclass(frozen=True)
class RoleTime:
    """Shares of the time after warm-up, means over the role's devices and over seeds; idle also by seed."""

    role: str
    own: float
    others: float
    idle: float
    idle_by_seed: tuple[float, ...]


def role_times(cell: Cell) -> list[RoleTime]:
    """One per role of the cell, in the order of its placement."""
    times = []
    for role in cell.runs[0].timeline.roles:
        idle = np.array([run.timeline.idle(role) for run in cell.runs])
        own = np.array([_own(run, role) for run in cell.runs])
        times.append(
            RoleTime(
                role=role,
                own=float(own.mean()),
                others=float(np.clip(1 - idle - own, 0, None).mean()),
                idle=float(idle.mean()),
                idle_by_seed=tuple(idle.tolist()),
            )
        )
    return times


def pools(run: Run) -> str:
    """Devices by the roles that share them, those of the host left out: `rollout 1 | actor, actor_fwd, reference 1`."""
    roles: dict[str, list[str]] = {}
    devices: dict[str, set[str]] = {}
    for (role, _), place in run.timeline.placement.items():
        if place.pool.startswith("host "):
            continue
        if role not in roles.setdefault(place.pool, []):
            roles[place.pool].append(role)
        devices.setdefault(place.pool, set()).update(place.devices)
    return " | ".join(f"{', '.join(roles[pool])} {len(devices[pool])}" for pool in roles)


def _own(run: Run, role: str) -> float:
    start, end = run.timeline.steady_window()
    return run.timeline.busy_seconds(role) / (end - start)
