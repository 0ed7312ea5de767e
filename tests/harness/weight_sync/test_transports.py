"""All of a version or an error, on every transport: what is damaged, broken off, not read to its end, or alone."""

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from harness.weight_sync import process_group
from harness.weight_sync.endpoints import HostSender, stop_reading
from harness.weight_sync.ipc import SharedOffer, share_slots, slot_bytes
from harness.weight_sync.plan import TransferError, digests, plan_transfer
from harness.weight_sync.process_group import GroupOffer, Rendezvous
from tests.support.processes import run_in_processes
from tests.support.weight_ends import LOOPBACK, carried, kept, meet, met_again, offered, plan, same, two_ends, weights

TRANSPORTS = ("collective", "ipc", "host_staged")
HANDED_OVER = ("collective", "ipc")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def offer() -> Iterator[SharedOffer]:
    offer = share_slots(plan(), Rendezvous(f"{LOOPBACK}:1", 2, 5.0))
    yield offer
    offer.path.unlink(missing_ok=True)


def withdraw(offer: GroupOffer) -> None:
    if isinstance(offer, SharedOffer):
        offer.withdraw()


# --- what arrives ----------------------------------------------------------------------------------------------------


async def test_ends_that_share_a_gpu_meet_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "gpu_of", lambda device: "GPU-a")
    offer, store = offered("collective")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, GPU)
        ends = offer.sender(store, GPU), joining.result()
    assert ends[0]._group.device == ends[1]._group.device == torch.device("cpu")
    assert same(await carried(*ends, 1, weights(1)), weights(1))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("checked", [False, True])
async def test_weights_arrive_bit_for_bit_with_and_without_digests(transport: str, checked: bool) -> None:
    ends = two_ends(transport, checked=checked)
    for version in (1, 2):
        assert same(await carried(*ends, version, weights(version)), weights(version))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_damage_is_an_error_and_the_next_is_fine(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor changes after its digest was taken, as on a transport that is no good."""

    def wrong(bucket: Any, data: torch.Tensor) -> torch.Tensor:
        return digests(bucket, data) + torch.tensor([spec.name == "large" for spec in bucket.tensors])

    ends = two_ends(transport, checked=True)
    with monkeypatch.context() as damaging, pytest.raises(TransferError, match="version 1 .*damaged: large"):
        damaging.setattr(f"harness.weight_sync.{transport}.digests", wrong)
        await carried(*ends, 1, weights(1))
    assert same(await carried(*ends, 2, weights(2)), weights(2)), "an end was left in the middle of a transfer"


def receive_in_another_process(number: int, offer: GroupOffer) -> list[bool]:
    receiver: Any = offer.receiver(number, CPU)
    return [same(kept(receiver.receive(version)), weights(version)) for version in (1, 2, 3)]


@pytest.mark.parametrize("transport", HANDED_OVER)
async def test_every_version_reaches_every_process_bit_for_bit(transport: str) -> None:
    offer, store = offered(transport, receivers=2)
    arguments = [(number, offer) for number in range(2)]
    reading = asyncio.create_task(asyncio.to_thread(run_in_processes, receive_in_another_process, arguments, 120))
    sender: Any = await asyncio.to_thread(offer.sender, store, CPU)
    withdraw(offer)
    for version in (1, 2, 3):
        await asyncio.to_thread(lambda version=version: asyncio.run(sender.send(version, weights(version))))
    assert await reading == [[True] * 3] * 2


# --- what stops in the middle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", HANDED_OVER)
@pytest.mark.parametrize("read", [0, 1, 2, 6])
async def test_a_reader_that_stops_does_not_keep_the_sender_from_the_next_version(transport: str, read: int) -> None:
    sender, receiver = two_ends(transport)

    def begin() -> None:
        arriving = receiver.receive(1)
        for _ in range(read):
            next(arriving)
        stop_reading(arriving)

    if read:  # a reader that has not begun takes no part, and the sender waits for it
        sending = asyncio.to_thread(lambda: asyncio.run(sender.send(1, weights(1))))
        await asyncio.gather(sending, asyncio.to_thread(begin))
    assert same(await carried(sender, receiver, 2, weights(2)), weights(2))


@pytest.mark.parametrize("transport", HANDED_OVER)
async def test_weights_that_cannot_be_gathered_are_the_senders_error_and_end_the_receivers_wait(transport: str) -> None:
    sender, receiver = two_ends(transport)
    incomplete = {name: tensor for name, tensor in weights(1).items() if name != "whole"}
    receiving = asyncio.create_task(asyncio.to_thread(lambda: kept(receiver.receive(1))))
    with pytest.raises(KeyError, match="whole"):
        await asyncio.to_thread(lambda: asyncio.run(sender.send(1, incomplete)))
    with pytest.raises(TransferError, match="version 1 broke off"):
        await receiving


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_after_a_failure_both_sides_meet_again_and_go_on(transport: str) -> None:
    offer, store = offered(transport, checked=True)
    sender, receiver = meet(offer, store)
    sender._group.close()
    with pytest.raises(TransferError):
        await carried(sender, receiver, 1, weights(1))
    if isinstance(sender, HostSender):
        with pytest.raises(TransferError, match="version 1 did not get to all"):
            await sender.wait_arrived(1)
    ends = met_again(offer, (sender, receiver))
    assert same(await carried(*ends, 2, weights(2)), weights(2))


class DoneMeanwhile:
    """A broadcast that is done, well or not, just after the time for which it was waited."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None or self.failure:
            raise RuntimeError("Operation timed out!" if timeout is not None else self.failure)


def test_what_is_done_just_after_a_look_at_it_is_no_failure_unless_it_failed() -> None:
    sender, _receiver = two_ends("collective")
    sender._group.wait(DoneMeanwhile())
    with pytest.raises(RuntimeError, match="connection closed"):
        sender._group.wait(DoneMeanwhile("connection closed"))


# --- ends that are alone ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_end_that_is_alone_is_an_error_and_not_a_hang(transport: str) -> None:
    offer, store = offered(transport, timeout_s=1.0)
    with pytest.raises(TransferError, match="did not meet"):
        offer.sender(store, CPU)
    withdraw(offer)
    with pytest.raises(TransferError, match="did not meet"):
        offered("collective", timeout_s=1.0)[0].receiver(0, CPU)


def join_and_leave(number: int, offer: GroupOffer) -> None:
    offer.receiver(number, CPU)


async def test_a_receiver_that_dies_is_an_error_for_the_sender() -> None:
    offer, store = offered("collective")
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(run_in_processes, join_and_leave, [(0, offer)], 90)
        sender: Any = offer.sender(store, CPU)
        gone.result()
    with pytest.raises(TransferError):
        for version in range(1, 50):  # the first sends may still fit into a socket's buffer
            await sender.send(version, weights(version))


async def test_a_sender_alone_fails_by_its_timeout_and_then_at_once() -> None:
    sender, _receiver = two_ends("ipc", timeout_s=1.0)
    with pytest.raises(TransferError, match="version 1 broke off"):
        await sender.send(1, weights(1))
    with pytest.raises(TransferError, match="version 2: a transfer failed before"):
        await sender.send(2, weights(2))


# --- shared memory ---------------------------------------------------------------------------------------------------


def test_the_memory_is_that_of_two_buckets_whatever_the_model() -> None:
    many = plan_transfer({f"{i}": torch.zeros(1000) for i in range(100)}.items(), bucket_bytes=4096)
    offer = share_slots(many, Rendezvous(f"{LOOPBACK}:1", 2, 5.0))
    size = offer.path.stat().st_size
    offer.withdraw()
    assert many.bytes == 400_000 and many.largest == 4000
    assert 2 * many.largest <= size == 2 * slot_bytes(many) <= 2 * many.largest + 128


def test_no_other_user_can_read_the_file_and_an_offer_withdrawn_leaves_none_to_join(offer: SharedOffer) -> None:
    assert offer.path.stat().st_mode & 0o077 == 0
    offer.withdraw()
    with pytest.raises(FileNotFoundError):
        offer.receiver(0, CPU)
    assert not offer.path.exists()


def test_slots_that_do_not_fit_into_shared_memory_are_refused_before_anything_is_made() -> None:
    huge = plan_transfer([("huge", torch.empty(1 << 50, device="meta"))], bucket_bytes=64)
    with pytest.raises(RuntimeError, match="need 9007199254740992 bytes in .*enlarge it"):
        share_slots(huge, Rendezvous(f"{LOOPBACK}:1", 2, 5.0))


# --- memory that a GPU reads and writes itself, by what CUDA is asked for ---------------------------------------------


class Cuda:
    """The pointers that are pinned, and how many bytes from there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.answer = answer
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)

    def check(self, answer: int) -> None:
        if answer:
            raise RuntimeError(f"CUDA error {answer}")

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.pinned[pointer] = size
        return self.answer

    def cudaHostUnregister(self, pointer: int) -> None:  # noqa: N802 - CUDA's name
        del self.pinned[pointer]


def test_slots_of_a_gpu_are_pinned_while_they_are_used(offer: SharedOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    slots = offer._slots(GPU)
    assert cuda.pinned == {slots[0].data_ptr(): 2 * slot_bytes(offer.plan)}
    del slots[0]
    gc.collect()
    assert cuda.pinned, "the other slot is in use"
    del slots
    gc.collect()
    assert not cuda.pinned
    assert offer._slots(CPU) and not cuda.pinned


def test_slots_that_cannot_be_pinned_are_cudas_error(offer: SharedOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, answer=2)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        offer._slots(GPU)


@pytest.mark.parametrize(("device", "pinned"), [(CPU, False), (GPU, True)])
async def test_copies_in_host_memory_are_pinned_for_a_gpu(device: torch.device, pinned: bool, monkeypatch: Any) -> None:
    asked: list[bool] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return torch.zeros(size, dtype=dtype)  # there need be no GPU

    offer, store = offered("host_staged")
    monkeypatch.setattr(torch, "empty", empty)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(offer.receiver, 0, device)
        sender: Any = offer.sender(store, device)
        receiver: Any = joining.result()
    await sender.send(1, weights(1))
    await receiver.stage(1)
    assert asked == [pinned] * 2, "a block of the sender, one of the receiver"
