"""Weights through the memory of one GPU, by CUDA's handles, and the digests there. Skipped where there is no GPU."""

import asyncio
import multiprocessing
from typing import Any

import pytest
import torch

from harness.weight_sync.difference import apply, difference
from harness.weight_sync.ipc import CudaSlots
from harness.weight_sync.plan import digest, plan_transfer
from harness.weight_sync.process_group import open_rendezvous

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)


def weights(version: int, device: torch.device = GPU) -> dict[str, torch.Tensor]:
    """Several buckets of 1 MiB, one tensor larger than that."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"large": (1024, 1024), "small": (3, 5), "half": (700, 300), "last": (17,)}
    return {name: torch.randn(shape, generator=generator).bfloat16().to(device) for name, shape in shapes.items()}


def receive(offer: Any, answers: Any) -> None:
    """In a process of its own: CUDA's handles are of no use in the one that made them."""
    receiver = offer.receiver(0, GPU)
    for version in (1, 2, 3):
        arrived = {name: tensor.clone() for name, tensor in receiver.receive(version)}
        fine = all(torch.equal(arrived[name], tensor) for name, tensor in weights(version).items())
        answers.send(fine and list(arrived) == list(weights(version)))


@pytest.mark.parametrize("checked", [False, True])
def test_another_process_on_the_gpu_reads_what_was_sent_and_no_byte_goes_through_the_host(checked: bool) -> None:
    rendezvous, store = open_rendezvous("127.0.0.1", 1, 60.0)
    plan = plan_transfer(weights(0).items(), 1 << 20, checked)
    before = torch.cuda.memory_allocated()
    slots = CudaSlots(plan, rendezvous, GPU)
    assert torch.cuda.memory_allocated() - before <= 2 * plan.largest + 4096
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    receiver = context.Process(target=receive, args=(slots.offer, writer), daemon=True)
    receiver.start()
    try:
        sender = slots.sender(store, GPU)
        for version in (1, 2, 3):
            asyncio.run(sender.send(version, weights(version)))
            assert reader.poll(60) and reader.recv()
    finally:
        receiver.join(10)
        receiver.kill()
        receiver.join()


def test_what_changed_and_digests_are_the_same_on_both_devices() -> None:
    old = torch.randint(0, 256, (1 << 20 | 11,), dtype=torch.uint8)
    new = torch.where(torch.rand(old.shape) < 0.01, 255 - old, old)
    body, held = difference(new.to(GPU), old.to(GPU)), old.to(GPU)
    assert torch.equal(body.cpu(), difference(new, old)) and len(body) < len(new) / 5
    apply(body, held)
    assert torch.equal(held.cpu(), new)
    data = torch.randint(0, 256, (4096 * 8 * 5 + 11,), dtype=torch.uint8)
    assert digest(data.to(GPU)).item() == digest(data).item()
