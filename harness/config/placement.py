"""The devices of each role, a schedule's split, resolved and checked; and the processes that form a communicator. Pure
arithmetic, before anything starts.

NCCL refuses a communicator that has two ranks on one device, and a worker, the process of a device, is one rank of a
communicator at most. So no communicator, of devices or of the host, may have two members on one device.

Who is where: the training world is the actor's ranks, one on each of its devices; a critic beside the actor trains in
it, one with devices of its own has a world of its own. actor_fwd and reference beside the
actor score in its process and with its shards, so nothing is sent to them; a reference elsewhere never gets weights.
A rollout engine of tensor parallel k lies on k consecutive devices: k ranks that are a communicator of their own, which
the engine sets up by itself. One process drives it, that of its first device: it is the engine's one member of the
transfer group, takes full tensors, and the engine gives each of its ranks a part (`RolloutEngine.load_weights`). Beside
training ranks that is the worker of the rank on its first device; its other devices have the workers of their ranks.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.config import AlgorithmConfig, ConfigError
from harness.config.fields import MOST_DEVICES
from harness.config.transports import transport_of

_PERCENT = re.compile(r"([1-9][0-9]?|100)%")
ENGINE_ROLES = ("rollout", "lent")
"""Roles of rollout engines: those that always generate, and those on training devices, which are lent to them."""
DEVICE_ROLES = (*ENGINE_ROLES, "actor", "actor_fwd", "reference", "critic")
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
    the actor's devices; lent engines are there where it names them.

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
        if role not in wanted and role != "lent":
            raise ConfigError(f"schedule.split.{role} is missing; give a number of devices or a role to share with")
    owner_of = {role: _owner(role, wanted) for role in wanted}
    owners = {role: wanted[role] for role in wanted if owner_of[role] == role}
    counts = _counts(owners, devices)
    needed = sum(counts.values())
    if needed > devices:
        parts = " + ".join(f"{role} {count}" for role, count in counts.items())
        more = range(needed, min(4 * needed, MOST_DEVICES + 1))
        enough = next((n for n in more if sum(_counts(owners, n).values()) <= n), None)
        fix = "make the split smaller" if enough is None else f"set cluster.devices={enough} or make the split smaller"
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
        if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
            counts[role] = max(1, devices * int(percent[1]) // 100)
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


@dataclass(frozen=True, order=True)
class CommunicatorRank:
    """A rank of a communicator: worker `number` of a role, on a device. An engine of several devices has a member on
    each in its own communicator."""

    role: str
    number: int
    device: int

    def __str__(self) -> str:
        return f"{self.role}[{self.number}]"


@dataclass(frozen=True)
class Communicator:
    """A communicator. members: in rank order. over: "device" is NCCL between GPUs, and Gloo between CPUs; "host" is
    always Gloo."""

    name: str
    members: tuple[CommunicatorRank, ...]
    over: Literal["device", "host"]


def communicators(
    placement: Placement,
    *,
    transport: str,
    training_tensor_parallel: int,
    engine_tensor_parallel: int,
    training_pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    in_order: bool = True,
) -> list[Communicator]:
    """Every communicator of a job that has more than one rank, as the job starts.

    in_order: groups are trained as they were admitted; else the first rank of the training world deals them out.

    transport: of the schedule; one of colocated roles needs no group: engines and scorers lie on the actor's devices.
    """
    world = tuple(CommunicatorRank("actor", rank, device) for rank, device in enumerate(placement.devices["actor"]))
    t, together = training_tensor_parallel, training_tensor_parallel * training_pipeline_parallel
    found = [Communicator("training world", world, "device")]
    if together > 1:
        found += [Communicator(f"data-parallel group {k}", world[k::together], "device") for k in range(together)]
        sharing = [world[start : start + t] for start in range(0, len(world), t)]
        found += [Communicator(f"tensor-parallel group {k}", block, "device") for k, block in enumerate(sharing)]
        blocks = [world[start : start + together] for start in range(0, len(world), together)]
        stages = [block[k::t] for block in blocks for k in range(t)]
        found += [Communicator(f"pipeline {k}", block, "device") for k, block in enumerate(stages)]
        if in_order:
            found += [Communicator(f"micro-batches of group {k}", block, "host") for k, block in enumerate(blocks)]
    if expert_parallel > 1:
        for k in range(together):
            copies = world[k::together]
            starts = range(0, len(copies), expert_parallel)
            blocks = [copies[start : start + expert_parallel] for start in starts]
            found += [Communicator(f"experts {n} of group {k}", block, "device") for n, block in enumerate(blocks)]
            same = [copies[place::expert_parallel] for place in range(expert_parallel)]
            found += [Communicator(f"same experts {n} of group {k}", block, "device") for n, block in enumerate(same)]
    if not in_order:
        found.append(Communicator("micro-batches", world, "host"))
    if "critic" in placement.devices and not placement.share("critic", "actor"):
        own = tuple(CommunicatorRank("critic", rank, device) for rank, device in enumerate(placement.devices["critic"]))
        found.append(Communicator("critic's world", own, "device"))
    engines = list(_engines(placement, engine_tensor_parallel))
    found += [Communicator(f"engine {k}", engine, "device") for k, engine in enumerate(engines)]
    carrier = transport_of(transport)
    if not carrier.colocated:
        receivers = [engine[0] for engine in engines] + list(_scorers(placement))
        senders = world[: sending_ranks(transport, len(world))]
        found += [Communicator(f"weights of {sender}", (sender, *receivers), carrier.over) for sender in senders]
    return [communicator for communicator in found if len(communicator.members) > 1]


def sending_ranks(transport: str, ranks: int, buckets: int | None = None) -> int:
    """How many training ranks, the first ones, send weights to the engines: all of them, unless there are fewer buckets
    to send (None: there are enough), or the transport has the first one send for all."""
    if not transport_of(transport).all_ranks_send:
        return 1
    return ranks if buckets is None else max(1, min(ranks, buckets))


def check_communicators(found: Iterable[Communicator], placement: Placement, transport: str) -> None:
    """Raises ConfigError, naming both roles, the device and a fix, for a communicator with two ranks on one device, and
    for a transport of colocated roles to one that is not on the actor's devices."""
    for communicator in found:
        on: dict[int, CommunicatorRank] = {}
        for member in communicator.members:
            other = on.setdefault(member.device, member)
            if other is not member:
                raise ConfigError(
                    f"schedule.split puts {other} and {member} on device {member.device}, and both are ranks of "
                    f"the communicator {communicator.name!r}, which can have one on a device; {_fix(other, member)}"
                )
    if not transport_of(transport).colocated:
        return
    actor = placement.devices["actor"]
    for role in ("rollout", "actor_fwd"):
        if apart := sorted(set(placement.devices.get(role, ())) - set(actor)):
            raise ConfigError(
                f"schedule.split gives {role} device {apart[0]}, which the actor does not have, and the weights of a "
                f"colocated schedule stay on their device; set schedule.split.{role}=actor"
            )


def _engines(placement: Placement, tensor_parallel: int) -> Iterator[tuple[CommunicatorRank, ...]]:
    devices = placement.devices["rollout"]
    for k, start in enumerate(range(0, len(devices), tensor_parallel)):
        yield tuple(CommunicatorRank("rollout", k, device) for device in devices[start : start + tensor_parallel])


def _scorers(placement: Placement) -> Sequence[CommunicatorRank]:
    """actor_fwd, where it has devices without the actor."""
    if placement.share("actor_fwd", "actor"):
        return []
    return [
        CommunicatorRank("actor_fwd", number, device)
        for number, device in enumerate(placement.devices.get("actor_fwd", ()))
    ]


def _fix(one: CommunicatorRank, other: CommunicatorRank) -> str:
    roles = {one.role, other.role}
    if "actor_fwd" in roles:
        return "set schedule.split.actor_fwd=actor, or give it a number of devices of its own"
    return "give rollout devices of its own, as in schedule.split.rollout=50%, or use a colocated schedule"
