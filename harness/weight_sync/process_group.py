"""The process groups of one transfer: one from each training rank that sends to all receivers.

They are built on a store, beside whatever default group their members have: so an engine needs nothing of the
trainer's, and the trainer nothing of the engine's. `BucketSender` and `BucketReceiver` are the two ends of transports
that move bucket after bucket through them.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from engines.gloo_groups import all_connected, prove
from harness.protocols import TransferError
from harness.runtime.stores import join_store, open_store
from harness.weight_sync.plan import Bucket, TransferPlan, pack, unpack, verify

SOURCE = 0
HOST = torch.device("cpu")
_ABORTED = "aborted"  # a key of the rendezvous's store
_CHECK_S = 0.5  # how often a wait checks whether the rendezvous was aborted
_ABORT_S = 10.0  # to be let in by the store's process, which may compute, or be reached slowly
_POLL_S = 1e-4  # how often a GPU, or the members that have come, are polled


class TransferGroup:
    """One end of the group. Its first failure closes it, so that the other ends fail at once instead of by their
    timeouts; from then on every use fails, until both sides connect again.

    Where an end dies, only those that talk to it notice; so the driver, which hears of a death, aborts the
    rendezvous, and no end waits any longer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, aborted: Callable[[], bool]) -> None:
        self.device = device
        self._group: dist.ProcessGroup | None = group
        self._aborted = aborted

    @contextmanager
    def guard(self, version: int) -> Iterator[None]:
        """Guard a use of the group: what breaks in it is a TransferError that names the version."""
        if self._group is None:
            raise TransferError(f"version {version}: a transfer failed before, and its ends have not connected since")
        try:
            yield
        except TransferError:
            raise
        except RuntimeError as error:  # torch's own
            self.close()
            raise TransferError(f"version {version} broke off: {error}") from error

    def broadcast(self, data: torch.Tensor) -> dist.Work:
        """Broadcast from the sender to all others; `data` (on the group's device) is there once it was waited for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SOURCE, 0
        assert self._group is not None
        return self._group.broadcast([data], options)

    def barrier(self) -> None:
        """Wait for all members to come here."""
        assert self._group is not None
        self.wait(self._group.barrier(dist.BarrierOptions()))

    def wait(self, work: dist.Work) -> None:
        """Wait until it is done, fails (RuntimeError, torch's own), or the rendezvous is aborted (TransferError)."""
        if self.device.type == "cuda":
            checked = time.monotonic()
            while not work.is_completed():
                time.sleep(_POLL_S)
                if time.monotonic() - checked > _CHECK_S:
                    checked = time.monotonic()
                    self._raise_if_aborted()
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=_CHECK_S))
                return
            except RuntimeError:
                if work.is_completed():  # perhaps since the look at it: then only its own error is one
                    work.wait()
                    return
                self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if self._aborted():
            self.close()
            raise TransferError("it was aborted: one of its members is gone")

    def close(self) -> None:
        """Release the group, in a thread: that waits for what the group has under way, which Gloo ends by its own
        timeout only."""
        groups, self._group = [self._group], None
        if groups[0] is not None and self.device.type == "cuda":
            groups[0].abort()
        threading.Thread(target=groups.clear, daemon=True).start()


@dataclass
class BucketInFlight:
    """A bucket that travels, in pieces. Holds the tensors that it is sent from, or received into."""

    group: TransferGroup
    tensors: list[torch.Tensor]
    works: list[dist.Work]

    @classmethod
    def start(cls, group: TransferGroup, tensors: list[torch.Tensor]) -> Self:
        """Start to broadcast these tensors."""
        return cls(group, tensors, [group.broadcast(tensor) for tensor in tensors if tensor.numel()])

    def wait(self) -> list[torch.Tensor]:
        """Wait for all of them, and return them."""
        for work in self.works:
            self.group.wait(work)
        if self.group.device.type == "cuda":
            torch.cuda.current_stream(self.group.device).synchronize()
        return self.tensors


class Sources:
    """A receiver's end of the groups of all senders. The first failure closes all of them, so that every sender fails
    at once, and none sends a version that this receiver will not have."""

    def __init__(self, plan: TransferPlan, groups: Sequence[TransferGroup]) -> None:
        self._groups, self._owners = groups, plan.owners(len(groups))

    @property
    def device(self) -> torch.device:
        """The device of the groups."""
        return self._groups[0].device

    @property
    def senders(self) -> int:
        """Groups, one for each sender."""
        return len(self._groups)

    @contextmanager
    def guard(self, version: int) -> Iterator[None]:
        """Guard, as `TransferGroup.guard`, every use of any of the groups."""
        try:
            with ExitStack() as guards:
                for group in self._groups:
                    guards.enter_context(group.guard(version))
                yield
        except TransferError:
            self.close()
            raise

    def expect(self, number: int, into: list[torch.Tensor]) -> BucketInFlight:
        """Begin to receive this bucket from the sender that has it. Each sender's buckets are expected in order."""
        return BucketInFlight.start(self._groups[self._owners[number]], into)

    def expect_message(self, number: int, bucket: Bucket, room: torch.Tensor) -> BucketInFlight:
        """Wait for the head of a message of this bucket (harness/weight_sync/difference.py), and begin to receive its
        body into `room` (uint8 [>= bucket.bytes]). What arrives is the body, and the digests."""
        head = torch.empty(1 + len(bucket.tensors), dtype=torch.int64, device=self.device)
        self.expect(number, [head]).wait()
        arriving = self.expect(number, [room[: int(head[0])]])
        arriving.tensors.append(head[1:])
        return arriving

    def barrier(self) -> None:
        """Wait for all senders and all receivers to come here."""
        for group in self._groups:
            group.barrier()

    def close(self) -> None:
        """Close all groups."""
        for group in self._groups:
            group.close()


@dataclass(frozen=True)
class Rendezvous:
    """The place where process groups come together: a store, a group for each of `senders`, with `size` members: the
    sender and all receivers. Waits end after timeout_s."""

    place: str = field(repr=False)
    size: int
    timeout_s: float
    senders: int = 1

    def connect(self) -> dist.Store:
        """The store, for those that do not hold it."""
        with _connecting():
            return join_store(self.place, self.size, self.timeout_s)

    def sender_group(self, store: dist.Store, device: torch.device, number: int = 0) -> TransferGroup:
        """The group of sender `number`, as itself. Returns when all its members have joined."""
        return self._join(store, number, SOURCE, device)

    def receiver_groups(self, number: int, device: torch.device) -> list[TransferGroup]:
        """The groups of all senders, as receiver `number` (from 0). Its rank differs from group to group: Gloo's first
        ranks pass on most of what they get."""
        groups: list[TransferGroup] = []
        try:
            for sender in range(self.senders):
                rank = 1 + (number + sender) % (self.size - 1)
                groups.append(self._join(self.connect(), sender, rank, device))
        except BaseException:
            for group in groups:
                group.close()
            raise
        return groups

    def abort(self) -> None:
        """Let no member of these groups wait for the others any longer."""
        with suppress(RuntimeError):  # the store is gone, and so is the group
            join_store(self.place, self.size, min(self.timeout_s, _ABORT_S)).set(_ABORTED, "")

    def _join(self, store: dist.Store, sender: int, rank: int, device: torch.device) -> TransferGroup:
        def aborted() -> bool:
            try:
                return store.check([_ABORTED])
            except RuntimeError:  # its process is gone
                return True

        prefixed, seconds = dist.PrefixStore(f"weights of {sender}", store), timedelta(seconds=self.timeout_s)
        with _connecting():
            gpus = self._wait_for_all(prefixed, rank, gpu_of(device), aborted)
            if device.type == "cuda" and len(set(gpus)) < self.size:
                device = HOST  # NCCL joins no two members of one GPU
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = seconds
                nccl = dist.ProcessGroupNCCL(prefixed, rank, self.size, options)
                return TransferGroup(cast(dist.ProcessGroup, nccl), device, aborted)

            def join() -> Any:
                group = dist.ProcessGroupGloo(prefixed, rank, self.size, seconds)
                prove(group, prefixed)
                return group

            gloo = all_connected(
                join, prefixed, f"weights of {sender}", rank, range(self.size), self.timeout_s, aborted
            )
            return TransferGroup(cast(dist.ProcessGroup, gloo), device, aborted)

    def _wait_for_all(self, store: dist.Store, rank: int, gpu: str, aborted: Callable[[], bool]) -> list[str]:
        """Wait until every member is here: building a group cannot be aborted. Returns the GPU of each."""
        store.set(f"here {rank}", gpu)
        deadline, pause = time.monotonic() + self.timeout_s, _POLL_S
        while missing := [k for k in range(self.size) if not store.check([f"here {k}"])]:
            if aborted():
                raise TransferError("sender and receivers did not meet: one of them is gone")
            if time.monotonic() > deadline:
                raise TransferError(
                    f"sender and receivers did not meet: members {missing} of {self.size} did not come within "
                    f"{self.timeout_s} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _CHECK_S / 10)
        return [store.get(f"here {k}").decode() for k in range(self.size)]


def gpu_of(device: torch.device) -> str:
    """The GPU itself, whatever its number is in this process; "" for cores."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def open_rendezvous(place: str, receivers: int, timeout_s: float, senders: int = 1) -> tuple[Rendezvous, dist.Store]:
    """A store at this place, as of `open_store`, and the way to it. It lives as long as it is held."""
    store, there = open_store(place, receivers + 1, timeout_s)
    return Rendezvous(there, receivers + 1, timeout_s, senders), store


@dataclass(frozen=True)
class GroupOffer:
    """The facts by which receivers, and senders beside the first one, join a transport whose ends meet as a process
    group; small, and travels. plan: of what travels; rendezvous: where they meet."""

    plan: TransferPlan
    rendezvous: Rendezvous

    def receiver(self, number: int, device: torch.device, previous: Any = None) -> Any:
        """Join as receiver `number` (from 0). Blocks until the transport is up on all sides. previous: which this one
        replaces, after receivers changed or a transfer failed. Raises TransferError where the ends did not meet."""
        raise NotImplementedError

    def sender(self, store: dist.Store, device: torch.device, previous: Any = None, number: int = 0) -> Any:
        """Join as sender `number`: `harness.weight_sync.endpoints.WeightSource`."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Remove what would outlive the job: all have joined, or it ends. On the driver."""


@contextmanager
def _connecting() -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise TransferError(f"sender and receivers did not meet: {error}") from error


class BucketEnd(ABC):
    """One end of a transport that moves bucket after bucket."""

    _group: TransferGroup | Sources

    def __init__(self, plan: TransferPlan, group: TransferGroup | Sources) -> None:
        self.plan, self._group = plan, group

    @abstractmethod
    def _finish(self) -> None:
        """Wait until the last bucket has been taken."""

    def _release(self) -> None:  # noqa: B027 - not every transport has anything under way
        """Let go of what the group has under way: a group that is in use does not close."""


class BucketSender(BucketEnd):
    """Sends the buckets that are dealt to it, and helps to gather those of the other senders. What a bucket travels in,
    and when its buffer is free again, is the transport's. number: of this sender, which is its training rank."""

    def __init__(self, plan: TransferPlan, group: TransferGroup, senders: int = 1, number: int = 0) -> None:
        super().__init__(plan, group)
        self.number = number
        self._owners = plan.owners(senders)

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Gathering goes on to the end even where the group broke: the other ranks take part in it, and must not hang.
        Raises TransferError."""
        failure: TransferError | None = None

        def attempt(step: Callable[..., None], *arguments: Any) -> None:
            nonlocal failure
            if failure is None:
                try:
                    with self._group.guard(version):
                        step(*arguments)
                except TransferError as error:
                    failure = error

        turn = 0  # of two buffers; those of its own buckets only
        try:
            for bucket, owner in zip(self.plan.buckets, self._owners, strict=True):
                if owner != self.number:
                    pack(bucket, parameters, None, owner)
                    continue
                attempt(self._wait_for_buffer)
                filled = self._fill(turn, bucket, parameters)
                attempt(self._hand_over, filled)
                turn = 1 - turn
            attempt(self._finish)
        except BaseException:  # the weights could not be gathered: receivers wait for what will never come
            self._release()
            self._group.close()
            raise
        if failure is not None:
            self._release()
            raise failure

    def _wait_for_buffer(self) -> None:
        """Wait until the buffer of the next bucket may be filled."""

    @abstractmethod
    def _fill(self, turn: int, bucket: Bucket, parameters: Mapping[str, torch.Tensor]) -> Any:
        """Gather the bucket into its buffer, the first or the second."""

    @abstractmethod
    def _hand_over(self, filled: Any) -> None:
        """Let what was filled travel."""


class BucketReceiver(BucketEnd):
    """Takes buckets in the order of the plan, each from the sender that has it. How one arrives is the transport's."""

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of every parameter; a tensor is valid until the next one is asked for.

        Takes part to the end even where a tensor is damaged or the reader stops, so that no other end is held up.
        Raises TransferError.
        """
        damage: TransferError | None = None
        try:
            for number, bucket in enumerate(self.plan.buckets):
                with self._group.guard(version):
                    data, expected = self._next(number)
                try:
                    if damage is None:
                        if expected is not None:
                            verify(bucket, data, expected, version)
                        yield from unpack(bucket, data)
                except TransferError as error:
                    damage = error
                except GeneratorExit:
                    self._drain(number + 1, version)
                    raise
            with self._group.guard(version):
                self._finish()
        finally:
            self._release()
        if damage is not None:
            raise damage

    def _drain(self, number: int, version: int) -> None:
        """Take the buckets from `number` on. Why the reader stopped counts more than what happens to them."""
        try:
            with self._group.guard(version):
                for rest in range(number, len(self.plan.buckets)):
                    self._next(rest)
                self._finish()
        except TransferError:
            self._group.close()

    @abstractmethod
    def _next(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait for this bucket: its bytes and, where the plan is checked, its digests."""
