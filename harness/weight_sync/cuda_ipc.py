"""The slots of `ipc` in the memory of a GPU, which the processes on it map by CUDA's handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.weight_sync.ipc import SlotReceiver, SlotSender, slot_bytes
from harness.weight_sync.plan import TransferPlan
from harness.weight_sync.process_group import HOST, Rendezvous

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""How to map a slot: a function of torch and its arguments; picklable, and of use in other processes only."""


@dataclass(frozen=True)
class CudaOffer:
    """Slots by their handles, and where to meet. The sender has to hold the slots until all receivers have joined."""

    plan: TransferPlan
    rendezvous: Rendezvous
    handles: tuple[Handle, Handle]

    def receiver(self, number: int, device: torch.device, before: object = None) -> SlotReceiver:
        slots = [rebuild(*arguments) for rebuild, arguments in self.handles]
        return SlotReceiver(self.plan, slots, self.rendezvous.receiver_group(number, HOST), device)

    def withdraw(self) -> None:
        """The memory goes with the last process that has it mapped: nothing to do."""


class CudaSlots:
    """Two new slots on `device`, and the offer of them. Makes the sender, which keeps the slots."""

    def __init__(self, plan: TransferPlan, rendezvous: Rendezvous, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.plan, self.rendezvous = plan, rendezvous
        self.slots = [torch.empty(slot_bytes(plan), dtype=torch.uint8, device=device) for _ in range(2)]
        first, second = (reduce_tensor(slot) for slot in self.slots)
        self.offer = CudaOffer(plan, rendezvous, (first, second))

    def sender(self, store: dist.Store, device: torch.device, before: object = None) -> SlotSender:
        """Returns when all receivers have joined."""
        return SlotSender(self.plan, self.slots, self.rendezvous.sender_group(store, HOST), device)
