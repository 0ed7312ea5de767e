"""The devices of each role: a schedule's split, resolved and checked. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.config import AlgorithmConfig, ConfigError
from harness.config.fields import MOST_DEVICES

_PERCENT = re.compile(r"([1-9][0-9]?|100)%")
DEVICE_ROLES = ("rollout", "actor", "actor_fwd", "reference", "critic")
HOST_ROLES = ("reward", "filter", "advantages")


def host_roles(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Roles of this job that compute on the host."""
    return tuple(role for role in HOST_ROLES if role != "filter" or algorithm.filters)


@dataclass(frozen=True)
class Placement:
    """Device numbers of every device role. Roles with equal numbers share devices in turn."""

    devices: Mapping[str, tuple[int, ...]]

    @property
    def total(self) -> int:
        """Devices used by all roles together."""
        return len({device for devices in self.devices.values() for device in devices})

    def roles_on(self, device: int) -> list[str]:
        """Roles that have this device."""
        return [role for role, devices in self.devices.items() if device in devices]

    def share(self, role: str, other: str) -> bool:
        """Whether this job has both, on the same devices."""
        return role in self.devices and self.devices[role] == self.devices.get(other)

    @property
    def pools(self) -> dict[str, tuple[int, ...]]:
        """Disjoint pools, named by the roles that share them."""
        pools: dict[tuple[int, ...], list[str]] = {}
        for role, devices in self.devices.items():
            pools.setdefault(devices, []).append(role)
        return {"+".join(roles): devices for devices, roles in pools.items()}


def resolve_split(split: Mapping[str, int | str], devices: int, roles: tuple[str, ...] = DEVICE_ROLES) -> Placement:
    """Resolve `split` over `devices` devices for the roles that this job has. A critic of which it says nothing is on
    the actor's devices.

    Raises ConfigError where a value cannot be read, or where the split needs more devices than there are.
    """
    owner_of, counts = _owned(split, devices, roles)
    placed: dict[str, tuple[int, ...]] = {}
    start = 0
    for role, count in counts.items():
        placed[role] = tuple(range(start, start + count))
        start += count
    return Placement({role: placed[owner_of[role]] for role in DEVICE_ROLES if role in owner_of})


def devices_of(role: str, split: Mapping[str, int | str], devices: int, roles: tuple[str, ...]) -> int:
    """How many devices `resolve_split` gives a role. Raises as it does."""
    owner_of, counts = _owned(split, devices, roles)
    return counts[owner_of[role]]


def _owned(
    split: Mapping[str, int | str], devices: int, roles: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, int]]:
    """The role whose devices each uses, and how many such a one has."""
    wanted = {role: split[role] for role in split if role in roles}
    if "critic" in roles:
        wanted.setdefault("critic", "actor")
    for role in split:
        if role not in DEVICE_ROLES:
            raise ConfigError(f"schedule.split.{role}: no such role; roles are {', '.join(DEVICE_ROLES)}")
    for role in roles:
        if role not in wanted:
            raise ConfigError(f"schedule.split.{role} is missing; give a number of devices or a role to share with")
    owner_of = {role: _owner(role, wanted) for role in wanted}
    owners = {role: wanted[role] for role in wanted if owner_of[role] == role}
    counts = _counts(owners, devices)
    needed = sum(counts.values())
    if needed > devices:
        parts = " + ".join(f"{role} {count}" for role, count in counts.items())
        more = range(needed, min(4 * needed, MOST_DEVICES + 1))
        enough = next((n for n in more if sum(_counts(owners, n).values()) <= n), None)
        fix = "make the split smaller" if enough is None else f"set DEVICES={enough} or make the split smaller"
        raise ConfigError(f"schedule.split needs {needed} devices ({parts}), the job has {devices}; {fix}")
    return owner_of, counts


def _owner(role: str, split: Mapping[str, int | str]) -> str:
    """The role whose devices this one uses: its own, or those at the end of the chain of sharing."""
    chain = [role]
    while (value := split[chain[-1]]) in split:
        if value in chain:
            raise ConfigError(f"schedule.split.{role}={split[role]} shares in a circle; give one of them `rest`")
        chain.append(str(value))
    return chain[-1]


def _counts(owners: Mapping[str, int | str], devices: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for role, value in owners.items():
        if value == "rest":
            continue
        if percent := _percent(value):
            counts[role] = max(1, devices * percent // 100)
        elif isinstance(value, int) and value > 0:
            counts[role] = value
        else:
            raise ConfigError(
                f"schedule.split.{role}={value} is no share; give a number >= 1, 1% to 100%, `rest`, or one of "
                f"{', '.join(DEVICE_ROLES)}"
            )
    takers = [role for role, value in owners.items() if value == "rest"]
    if len(takers) > 1:
        raise ConfigError(f"schedule.split: only one role can take the rest, not {' and '.join(takers)}")
    for role in takers:
        counts[role] = max(1, devices - sum(counts.values()))
    return {role: counts[role] for role in owners}


def _percent(value: int | str) -> int | None:
    """50 for "50%"; None for what is no percentage of 1 to 100."""
    return int(value[:-1]) if isinstance(value, str) and _PERCENT.fullmatch(value) else None
