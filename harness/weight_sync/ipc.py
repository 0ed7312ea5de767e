"""Weights between processes that share a device or a host: two slots of a bucket each that all of them map.

The sender packs one slot while receivers read the other; a process group on the host, which carries no weights, says
when to change over. On CPUs the slots are shared memory: a file in memory that is unlinked as soon as everyone has
mapped it, so nothing is left behind however a process ends. `cuda_ipc` has those of a GPU.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch
import torch.distributed as dist

from harness.weight_sync.digests import digests, verify
from harness.weight_sync.errors import TransferError
from harness.weight_sync.plan import Bucket, TransferPlan, pack, unpack
from harness.weight_sync.process_group import HOST, Rendezvous, TransferGroup

_ALIGNMENT = 64  # bytes; where a slot begins, and its digests


@dataclass(frozen=True)
class SharedOffer:
    """Slots by their path, and where to meet. Whoever made the file unlinks it once all receivers have joined."""

    plan: TransferPlan
    rendezvous: Rendezvous
    path: Path

    def receiver(self, number: int, device: torch.device, before: object = None) -> SlotReceiver:
        return SlotReceiver(self.plan, self._slots(), self.rendezvous.receiver_group(number, HOST), HOST)

    def sender(self, store: dist.Store, device: torch.device, before: object = None) -> SlotSender:
        """The other end; `store` comes from `open_rendezvous`. Returns when all receivers have joined."""
        return SlotSender(self.plan, self._slots(), self.rendezvous.sender_group(store, HOST), device)

    def _slots(self) -> list[torch.Tensor]:
        # Not torch.from_file: that would make a new, empty file where the offer's is gone.
        size = slot_bytes(self.plan)
        with self.path.open("r+b") as file:
            memory = torch.frombuffer(mmap(file.fileno(), 2 * size), dtype=torch.uint8)
        return [memory[:size], memory[size:]]

    def withdraw(self) -> None:
        """All have it mapped, or the job ends: either way nothing may stay behind."""
        self.path.unlink()


def slot_bytes(plan: TransferPlan) -> int:
    """Bytes of a slot: the largest bucket and, where the plan is checked, a digest of each of its tensors."""
    return _aligned(_digests_at(plan) + (8 * plan.most_tensors if plan.checked else 0))


def share_slots(plan: TransferPlan, rendezvous: Rendezvous) -> SharedOffer:
    """Two new slots in shared memory.

    Raises RuntimeError where there is no room: found out later, that would be a bus error and no message.
    """
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    size, free = 2 * slot_bytes(plan), shutil.disk_usage(folder).free
    if size > free:
        raise RuntimeError(
            f"two buckets of weights need {size} bytes in {folder}, which has {free}; enlarge it (Docker: --shm-size) "
            "or lower cluster.bucket_bytes"
        )
    descriptor, name = tempfile.mkstemp(prefix="cadence-weights-", dir=folder)
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    return SharedOffer(plan, rendezvous, Path(name))


class _SlotEnd:
    """What both ends know: the slots (uint8 [slot_bytes] each), and the group by which they change over."""

    def __init__(
        self, plan: TransferPlan, slots: Sequence[torch.Tensor], group: TransferGroup, device: torch.device
    ) -> None:
        self.plan, self._slots, self._group, self._device = plan, slots, group, device

    def _change_over(self) -> None:
        """Every end has done with the slot that it worked on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._group.barrier()

    def _digests(self, slot: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        start = _digests_at(self.plan)
        return slot[start : start + 8 * len(bucket.tensors)].view(torch.int64)


class SlotSender(_SlotEnd):
    """Packs bucket after bucket; returns when the last one was read."""

    async def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Gathering goes to its end also where the group broke: the other ranks are in it, and are not to hang."""
        failure: TransferError | None = None
        try:
            for number, bucket in enumerate(self.plan.buckets):
                slot = self._slots[number % 2]
                pack(bucket, parameters, slot)
                if failure is None:
                    if self.plan.checked:
                        self._digests(slot, bucket).copy_(digests(bucket, slot))
                    failure = self._next(version)
            failure = failure or self._next(version)
        except BaseException:  # the weights could not be gathered: receivers wait for what will never come
            self._group.close()
            raise
        if failure is not None:
            raise failure

    def _next(self, version: int) -> TransferError | None:
        try:
            with self._group.guard(version):
                self._change_over()
        except TransferError as error:
            return error
        return None


class SlotReceiver(_SlotEnd):
    """Reads bucket after bucket from where the sender put it."""

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Slots change over to the end also where a tensor is damaged or the reader stops: so this end holds up no
        other. Raises TransferError."""
        damage: TransferError | None = None
        for number, bucket in enumerate(self.plan.buckets):
            slot = self._slots[number % 2]
            with self._group.guard(version):
                self._change_over()
            try:
                if self.plan.checked and damage is None:
                    verify(bucket, slot, self._digests(slot, bucket), version)
                if damage is None:
                    yield from unpack(bucket, slot)
            except TransferError as error:
                damage = error
            except GeneratorExit:
                self._let_pass(len(self.plan.buckets) - number, version)
                raise
        with self._group.guard(version):
            self._change_over()
        if damage is not None:
            raise damage

    def _let_pass(self, buckets: int, version: int) -> None:
        """Whoever stopped has a reason that counts more than what happens to the rest."""
        try:
            with self._group.guard(version):
                for _ in range(buckets):
                    self._change_over()
        except TransferError:
            self._group.close()


def _digests_at(plan: TransferPlan) -> int:
    return _aligned(plan.largest)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
