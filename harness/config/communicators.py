"""The processes that form a communicator: a pure function of the placement, checked before anything starts.

NCCL refuses a communicator that has two ranks on one device, and a worker, the process of a device, is one rank of a
communicator at most. So no communicator, of devices or of the host, may have two members on one device.

Who is where: the training world is the actor's ranks, one on each of its devices; a critic beside the actor trains in
it, one with devices of its own has a world of its own. actor_fwd and reference beside the
actor score in its process and with its shards, so nothing is sent to them; a reference elsewhere never gets weights.
A rollout engine of tensor parallel k lies on k consecutive devices: k ranks that are a communicator of their own, which
the engine sets up by itself. One process drives it, that of its first device: it is the engine's one member of the
transfer group, takes full tensors, and the engine gives each of its ranks a part (`RolloutEngine.load_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.config import ConfigError
from harness.config.placement import Placement
from harness.config.transports import transport_of


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
    in_order: bool = True,
) -> list[Communicator]:
    """Every communicator of a job that has more than one rank, as the job starts.

    in_order: groups are trained as they were admitted; else the first rank of the training world deals them out.

    transport: of the schedule; one of colocated roles needs no group: engines and scorers lie on the actor's devices.
    """
    world = tuple(CommunicatorRank("actor", rank, device) for rank, device in enumerate(placement.devices["actor"]))
    t = training_tensor_parallel
    found = [Communicator("training world", world, "device")]
    if t > 1:
        found += [Communicator(f"data-parallel group {k}", world[k::t], "device") for k in range(t)]
        blocks = [world[start : start + t] for start in range(0, len(world), t)]
        found += [Communicator(f"tensor-parallel group {k}", block, "device") for k, block in enumerate(blocks)]
        if in_order:
            found += [Communicator(f"micro-batches of group {k}", block, "host") for k, block in enumerate(blocks)]
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
