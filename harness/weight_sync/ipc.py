"""Weights between processes that share a device or a host: two slots of a bucket each that all of them map.

The sender packs one slot while receivers read the other; a process group on the host, which carries no weights, says
when to switch. On CPUs the slots are shared memory: a file in memory that is unlinked as soon as all have mapped it, so
nothing is left behind however a process ends; a process that has a GPU pins it, so that the GPU itself reads and writes
it. Where all share one GPU they map its memory by CUDA's handles.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist

from harness.config.transports import SharedMemory
from harness.weight_sync.plan import Bucket, TransferPlan, digests, pack
from harness.weight_sync.process_group import (
    HOST,
    BucketEnd,
    BucketReceiver,
    BucketSender,
    GroupOffer,
    Rendezvous,
    Sources,
    TransferGroup,
)

_ALIGNMENT = 64  # bytes; where a slot begins, and its digests


@dataclass(frozen=True)
class CudaHandle:
    """How another process maps a slot: what CUDA says of its memory, as torch.multiprocessing reduces a tensor."""

    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync: bool
    offset: int
    size: int

    @classmethod
    def of(cls, slot: torch.Tensor) -> CudaHandle:
        """slot: uint8 [size] on a GPU, kept by its process as long as others map it."""
        from torch.multiprocessing.reductions import reduce_tensor

        _, (_, (size,), _, offset, _, _, *memory, _, counter, counter_offset, event, sync) = reduce_tensor(slot)
        device, handle, storage_bytes, storage_offset = memory
        return cls(device, handle, storage_bytes, storage_offset, counter, counter_offset, event, sync, offset, size)

    def map(self) -> torch.Tensor:
        """Map the memory into this process: uint8 [size]."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor(
            torch.Tensor,
            (self.size,),
            (1,),
            self.offset,
            torch.UntypedStorage,
            torch.uint8,
            self.device,
            self.handle,
            self.storage_bytes,
            self.storage_offset,
            False,
            self.ref_counter,
            self.ref_counter_offset,
            self.event,
            self.event_sync,
        )


@dataclass(frozen=True)
class SharedOffer(GroupOffer):
    """Slots by their path, and where to meet. The file is unlinked once all receivers joined."""

    path: Path

    def receiver(self, number: int, device: torch.device, previous: object = None) -> SlotReceiver:
        slots = self._slots(device)
        return SlotReceiver(self.plan, slots, Sources(self.plan, self.rendezvous.receiver_groups(number, HOST)), device)

    def sender(self, store: dist.Store, device: torch.device, previous: object = None, number: int = 0) -> SlotSender:
        return SlotSender(self.plan, self._slots(device), self.rendezvous.sender_group(store, HOST), device)

    def _slots(self, device: torch.device) -> list[torch.Tensor]:
        # Not torch.from_file: that would make a new, empty file where the offer's is gone.
        size = slot_bytes(self.plan)
        with self.path.open("r+b") as file:
            mapped = mmap(file.fileno(), 2 * size)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        if device.type == "cuda":
            pin(memory, mapped)
        return [memory[:size], memory[size:]]

    def withdraw(self) -> None:
        """Unlink the file: all have it mapped, or the job ends; either way nothing may stay behind."""
        self.path.unlink()


@dataclass(frozen=True)
class CudaOffer(GroupOffer):
    """Slots by their handles, and where to meet. The sender has to hold the slots until all receivers have joined; the
    memory is freed with the last process that has it mapped."""

    handles: tuple[CudaHandle, CudaHandle]

    def receiver(self, number: int, device: torch.device, previous: object = None) -> SlotReceiver:
        slots = [handle.map() for handle in self.handles]
        sources = Sources(self.plan, self.rendezvous.receiver_groups(number, HOST))
        return SlotReceiver(self.plan, slots, sources, device)


class CudaSlots:
    """Two new slots on `device`, and the offer of them. Makes the sender, which keeps the slots."""

    def __init__(self, plan: TransferPlan, rendezvous: Rendezvous, device: torch.device) -> None:
        self.plan, self.rendezvous = plan, rendezvous
        self.slots = [torch.empty(slot_bytes(plan), dtype=torch.uint8, device=device) for _ in range(2)]
        first, second = map(CudaHandle.of, self.slots)
        self.offer = CudaOffer(plan, rendezvous, (first, second))

    def sender(self, store: dist.Store, device: torch.device, previous: object = None, number: int = 0) -> SlotSender:
        """Returns when all receivers have joined."""
        return SlotSender(self.plan, self.slots, self.rendezvous.sender_group(store, HOST), device)


class SharedMemoryEnds(SharedMemory):
    """Both ends of it."""

    offers = SharedOffer | CudaOffer

    def offer(
        self, plan: TransferPlan, rendezvous: Rendezvous, device: torch.device, *, within_gpu: bool
    ) -> tuple[CudaSlots | SharedOffer, CudaOffer | SharedOffer]:
        """Slots of the device that sender and receivers share or, where the training world has more, of the host."""
        if within_gpu:
            slots = CudaSlots(plan, rendezvous, device)
            return slots, slots.offer
        made = share_slots(plan, rendezvous)
        return made, made


def pin(memory: torch.Tensor, mapped: mmap) -> None:
    """Pin mapped memory for CUDA, until nothing uses the mapping any more: torch pins only what it allocates. Into
    pageable memory a copy would go through a buffer of the driver, at a fraction of the link's speed, and wait.

    Raises RuntimeError, CUDA's own, where it cannot be pinned.
    """
    cudart: Any = torch.cuda.cudart()
    pointer = memory.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(pointer, memory.numel(), 0))

    def unpin(mapped: mmap) -> None:  # which is not unmapped before
        cudart.cudaHostUnregister(pointer)

    finalize(memory.untyped_storage(), unpin, mapped).atexit = False


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


def slot_bytes(plan: TransferPlan) -> int:
    """Bytes of a slot: the largest bucket and, where the plan is checked, a digest of each of its tensors."""
    return _aligned(_digests_at(plan) + (8 * plan.most_tensors if plan.checked else 0))


class _SlotEnd(BucketEnd):
    """The base of both ends: the slots (uint8 [slot_bytes] each), and how they switch between them."""

    def __init__(
        self, plan: TransferPlan, slots: Sequence[torch.Tensor], group: TransferGroup | Sources, device: torch.device
    ) -> None:
        super().__init__(plan, group)
        self._slots, self._device = slots, device

    def _digests(self, turn: int, bucket: Bucket) -> torch.Tensor:
        start = _digests_at(self.plan)
        return self._slots[turn][start : start + 8 * len(bucket.tensors)].view(torch.int64)

    def _switch(self) -> None:
        """Wait until every end is done with the slot that it worked on."""
        self._synchronise()
        self._group.barrier()

    def _synchronise(self) -> None:
        """Wait for what the device copies."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _finish(self) -> None:
        self._switch()


class SlotSender(_SlotEnd, BucketSender):
    """Packs bucket after bucket; returns when the last one was read."""

    def _fill(self, turn: int, bucket: Bucket, parameters: Mapping[str, torch.Tensor]) -> None:
        pack(bucket, parameters, self._slots[turn])
        if self.plan.checked:
            self._synchronise()
            self._digests(turn, bucket).copy_(digests(bucket, self._slots[turn]))

    def _hand_over(self, filled: None) -> None:
        self._switch()


class SlotReceiver(_SlotEnd, BucketReceiver):
    """Reads bucket after bucket from where the sender put it."""

    def _next(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._switch()
        turn, bucket = number % 2, self.plan.buckets[number]
        return self._slots[turn], self._digests(turn, bucket) if self.plan.checked else None


def _digests_at(plan: TransferPlan) -> int:
    return _aligned(plan.largest)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
