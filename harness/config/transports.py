"""Weight transports as those see them who place, price and plan a job: what each says of itself, beside its code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from harness.config.cost import CostConfig
from harness.config.fields import ConfigError
from harness.config.plugins import load
from harness.config.registries import TRANSPORTS, find


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of one weight update. send_s: the trainer waits; stage_s: on the way in the background, nothing waits;
    load_s: an engine waits."""

    send_s: float
    stage_s: float
    load_s: float


@dataclass(frozen=True)
class TransferMemory:
    """Bytes on a device of each training rank, and on one of each receiver; what: name of the former; kept: between
    transfers, too, not only while weights travel."""

    what: str
    sender: float
    receiver: float = 0.0
    kept: bool = True


class Transport(ABC):
    """A way for weights from training ranks to engines and scorers.

    A subclass has a line in `harness.config.registries`, or is named by its import path as the `transport` of a
    schedule. It may stand in one file with both of its ends; those below have theirs elsewhere. All else asks what it
    says here.
    """

    over: ClassVar[Literal["device", "host"]] = "host"
    """The group that a sender and all receivers meet as: of their devices (NCCL between GPUs), or of hosts (Gloo)."""
    all_ranks_send: ClassVar[bool] = False
    """Each training rank sends a share of the buckets, over a group of its own; otherwise the first one sends all."""
    staged: ClassVar[bool] = False
    """Weights travel to the host memory of receivers in the background, and are loaded from there when a schedule says
    so: its ends are `HostSender` and `HostReceiver`."""
    in_turn: ClassVar[bool] = False
    """Receivers begin, in a simulation, when all is sent; otherwise both sides begin together."""
    sends_differences: ClassVar[bool] = False
    """The ends can send what changed since the version before, and nothing else, where `TransferPlan.delta` says so."""
    one_host: ClassVar[bool] = False
    """Both ends share something of one host, so that a job cannot span several."""
    colocated: ClassVar[bool] = False
    """Both ends are in one process, of roles that share devices: nothing is connected, nothing is offered."""
    offers: ClassVar[Any] = None
    """The type of what `offer` has for receivers, by which it is decoded: a `GroupOffer`
    (harness/weight_sync/process_group.py), or a union of several."""

    ends: ClassVar[str] = ""
    """Import path of a subclass with the ends, where this file loads no torch, which takes most of a second."""

    @abstractmethod
    def times(self, cost: CostConfig, sender_links: float) -> TransferTimes:
        """Times of one update by the speeds of a job's costs. sender_links: links to host memory of the training ranks
        that send, for each one of an engine's."""

    @abstractmethod
    def memory(self, bucket: float, parameter: float, *, sharded: bool) -> TransferMemory:
        """Memory that it takes, for buckets and a largest parameter of so many bytes. sharded: over training ranks."""

    def host_memory(self, weights: float, bucket: float) -> tuple[float, float]:
        """Bytes on hosts for weights, and buckets, of so many bytes: of all training ranks together, and of each
        receiver. As it is, none."""
        return 0.0, 0.0

    def with_ends(self) -> Transport:
        """The same, with both ends; loads torch."""
        made: Transport = load(self.ends, "schedule.transport")() if self.ends else self
        return made

    def offer(self, plan: Any, rendezvous: Any, device: Any, *, within_gpu: bool) -> tuple[Any, Any]:
        """The source of senders (`harness.weight_sync.endpoints.WeightSource`), and what receivers join by (`offers`).

        Called on training rank 0. plan: `TransferPlan` of what travels; rendezvous: `Rendezvous` where all meet;
        device: of this rank; within_gpu: receivers are on the same GPU. As it is, an offer that makes senders itself.
        """
        made = self.offers(plan, rendezvous)
        return made, made


def converted_s(cost: CostConfig, sent_s: float) -> float:
    """Seconds to convert weights and to send them, which takes `sent_s` by itself, in n equal buckets, one converted
    while the one before it travels: the first of both, and n - 1 times the slower (a pipeline of two stages: Narayanan
    et al., arXiv 2104.04473, section 2.2.1, counts the same bubble), and what each bucket takes besides."""
    rest = cost.buckets - 1
    piped_s = (cost.convert_s + sent_s + rest * max(cost.convert_s, sent_s)) / cost.buckets
    return piped_s + cost.buckets * cost.bucket_s


class Collective(Transport):
    """Broadcast between devices, two buckets at either end."""

    over = "device"
    all_ranks_send = sends_differences = True
    ends = "harness.weight_sync.collective:CollectiveEnds"

    def times(self, cost: CostConfig, sender_links: float) -> TransferTimes:
        """Both sides at once, over the network."""
        seconds = converted_s(cost, cost.weight_bytes / cost.network_bytes_per_s) + cost.sync_s
        return TransferTimes(seconds, 0.0, seconds)

    def memory(self, bucket: float, parameter: float, *, sharded: bool) -> TransferMemory:
        return TransferMemory("transfer buckets", 2 * bucket, 2 * bucket)


class SharedMemory(Transport):
    """Two slots that the processes of a device, or of a host, share."""

    in_turn = one_host = True
    ends = "harness.weight_sync.ipc:SharedMemoryEnds"

    def times(self, cost: CostConfig, sender_links: float) -> TransferTimes:
        """The trainer writes host memory, then engines read it."""
        host_s = cost.weight_bytes / cost.host_bytes_per_s
        return TransferTimes(converted_s(cost, host_s / sender_links) + cost.sync_s, 0.0, host_s + cost.sync_s)

    def memory(self, bucket: float, parameter: float, *, sharded: bool) -> TransferMemory:
        return TransferMemory("transfer buckets", 2 * bucket, 2 * bucket)

    def host_memory(self, weights: float, bucket: float) -> tuple[float, float]:
        return 2 * bucket, 0.0


class HostStaged(Transport):
    """A copy in host memory of the sender, two of each receiver: the newest version and the one that arrives. One
    bucket is gathered on a device at a time."""

    all_ranks_send = staged = sends_differences = True
    ends = "harness.weight_sync.host_staged:HostStagedEnds"

    def times(self, cost: CostConfig, sender_links: float) -> TransferTimes:
        """The trainer copies to its host; the network in the background; then engines read their host's memory."""
        host_s = cost.weight_bytes / cost.host_bytes_per_s
        network_s = cost.weight_bytes / cost.network_bytes_per_s
        return TransferTimes(converted_s(cost, host_s / sender_links) + cost.sync_s, network_s, host_s + cost.sync_s)

    def memory(self, bucket: float, parameter: float, *, sharded: bool) -> TransferMemory:
        return TransferMemory("a bucket, gathered", bucket, kept=False)

    def host_memory(self, weights: float, bucket: float) -> tuple[float, float]:
        return weights, 2 * weights


class Local(Transport):
    """Weights stay where they are; sharded ones are gathered a parameter at a time."""

    colocated = True

    def times(self, cost: CostConfig, sender_links: float) -> TransferTimes:
        """An upper bound, to host memory and back: what is copied on one device need not go through the host."""
        seconds = converted_s(cost, cost.weight_bytes / cost.host_bytes_per_s) + cost.sync_s
        return TransferTimes(seconds, 0.0, seconds)

    def memory(self, bucket: float, parameter: float, *, sharded: bool) -> TransferMemory:
        return TransferMemory("a parameter, gathered", parameter if sharded else 0.0, kept=False)


def transport_of(name: str) -> Transport:
    """The transport of a name of the registry, or of an import path. Raises ConfigError for what is none."""
    found = find("schedule.transport", name)
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise ConfigError(f"transport={name} is no transport; extend harness.config.transports.Transport")
    try:
        return found()
    except TypeError as error:  # abstract
        raise ConfigError(f"transport={name}: {error}") from error


def connected_transports() -> list[str]:
    """Names of the registry that connect processes."""
    return [name for name in TRANSPORTS if not transport_of(name).colocated]
